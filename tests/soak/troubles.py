"""What goes wrong around the hosts: the store's faults, and the metadata service's. Drawn from a deck, for seconds.

Owns which faults there are and for how long; `tests/support/s3_server.py` and `cloud/testing/metadata_sim.py` make
them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, TypeVar

from cloud.testing.metadata_sim import Fault
from tests.soak.hosts import Host
from tests.support.s3_server import steer

Card = TypeVar("Card")
ANSWERS_S = 0.5  # a rule that has struck is known at once; about another the server says nothing
REFUSED_S = 20.0  # a start that was refused may say so this long after

MISLED_S = 150.0  # the notice that a page is taken for may leave two minutes


class Deck(Generic[Card]):
    """Every card comes once before any comes again."""

    def __init__(self, cards: list[Card], rng: Random) -> None:
        self._cards, self._rng = cards, rng
        self._left: list[Card] = []

    def draw(self, fits: Callable[[Card], bool] = lambda card: True) -> Card:
        """The next card that fits; at least one does."""
        if not any(fits(card) for card in self._left):
            self._left += self._rng.sample(self._cards, len(self._cards))
        card = next(card for card in self._left if fits(card))
        self._left.remove(card)
        return card


@dataclass(frozen=True)
class Trouble:
    """One fault of the store: `begin` makes it and returns its rules' numbers, `end` undoes what has no end itself."""

    name: str
    begin: Callable[[StoreTroubles, Random], list[int]]
    end: Callable[[StoreTroubles], None] = lambda troubles: None
    longest_s: float = 6.0


class StoreTroubles:
    """The store's faults, one after the other. For one thread."""

    def __init__(self, url: str, rng: Random) -> None:
        self._url, self._rng = url, rng
        self._deck = Deck(TROUBLES, rng)
        self._current: tuple[Trouble, list[int], float] | None = None
        self._refused_until = 0.0
        self.access_key = ""  # of whoever trains
        self.made: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()

    def steer(self, verb: str, **arguments: Any) -> Any:
        return steer(self._url, verb, **arguments)

    def fault(self, kind: str, *operations: str, **details: Any) -> list[int]:
        return [self.steer("fault", kind=kind, operations=operations, **details)]

    def begin(self, now: float, *, spare: bool) -> str:
        """Let something go wrong; what. `spare`: nothing that ends an agent."""
        trouble = self._deck.draw(lambda trouble: not spare or trouble.name not in REFUSALS)
        for_s = self._rng.uniform(1.0, trouble.longest_s)
        self._current = (trouble, trouble.begin(self, self._rng), now + for_s)
        self.made[trouble.name] += 1
        return f"{trouble.name} for {for_s:.1f} s"

    @property
    def is_quiet(self) -> bool:
        return self._current is None

    def refuses(self, now: float) -> bool:
        """Whether a start may have been refused for good: its credentials or permissions were bad a moment ago."""
        return now < self._refused_until

    def refuse_for(self, now: float) -> None:
        self._refused_until = now + REFUSED_S

    def turn(self, now: float) -> None:
        """End what has lasted long enough."""
        if self._current is None:
            return
        trouble, _rules, until = self._current
        if trouble.name in REFUSALS:
            self.refuse_for(now)
        if now >= until:
            self._end()

    def heal(self) -> None:
        """Everything works from now on."""
        if self._current is not None:
            self._end()
        for verb in ("up", "allow", "clear"):
            self.steer(verb)

    def _end(self) -> None:
        assert self._current is not None
        trouble, rules, _ = self._current
        trouble.end(self)
        for rule in rules or [0]:
            if not rules or self._has_struck(rule):
                self.struck[trouble.name] += 1
        self.steer("clear")
        self._current = None

    def _has_struck(self, rule: int) -> bool:
        with contextlib.suppress(ValueError):
            self.steer("wait_struck", fault_id=rule, timeout_s=ANSWERS_S)
            return True
        return False


REFUSALS = ("denied", "expired credentials")
_DATA = ("PutObject", "UploadPart")
_READS = ("GetObject", "HeadObject", "ListObjectsV2", "ListMultipartUploads")
_ODD_HEADERS = ("Last-Modified: yesterday", "x-amz-expiration: ,", "ETag: ", "Content-Range: none")
_WRITES = (*_DATA, "CreateMultipartUpload", "CompleteMultipartUpload", "AbortMultipartUpload", "DeleteObject")


def _expire(troubles: StoreTroubles, _rng: Random) -> list[int]:
    troubles.steer("expire", access_key=troubles.access_key)
    return []


def _deny(troubles: StoreTroubles, rng: Random) -> list[int]:
    troubles.steer("deny", action=rng.choice(("s3:PutObject", "s3:GetObject", "s3:ListBucket", "s3:DeleteObject")))
    return []


def _down(troubles: StoreTroubles, _rng: Random) -> list[int]:
    troubles.steer("down")
    return []


TROUBLES = [
    Trouble("error 500", lambda s, r: s.fault("error", times=None, status=500)),
    Trouble("503 SlowDown", lambda s, r: s.fault("error", times=None, status=503, code="SlowDown"), longest_s=10.0),
    Trouble("reset in a request", lambda s, r: s.fault("reset", *_DATA, after_bytes=r.randrange(1 << 20), times=3)),
    Trouble("reset in a reply", lambda s, r: s.fault("reset", at="reply", after_bytes=r.randrange(200), times=3)),
    Trouble("lost reply", lambda s, r: s.fault("lose_reply", r.choice(_WRITES), times=2)),
    Trouble("lost reply to anything", lambda s, r: s.fault("lose_reply", nth=r.randrange(1, 9), times=2)),
    Trouble("stalled request", lambda s, r: s.fault("stall", times=2, after_bytes=r.randrange(1000)), longest_s=12.0),
    Trouble("stalled reply", lambda s, r: s.fault("stall", *_WRITES, at="reply", times=2), longest_s=12.0),
    Trouble("slow", lambda s, r: s.fault("slow", at="reply", delay_s=r.uniform(0.2, 2.0), times=6), longest_s=8.0),
    Trouble("slow store", lambda s, r: s.fault("slow", times=None, delay_s=r.uniform(1.0, 4.0)), longest_s=25.0),
    Trouble("truncated reply", lambda s, r: s.fault("truncate", times=3)),
    Trouble("damaged reply", lambda s, r: s.fault("corrupt_response", "GetObject", times=1)),
    Trouble("damaged request", lambda s, r: s.fault("corrupt_stored", *_DATA, times=3)),
    Trouble("forgotten part", lambda s, r: s.fault("forget_part", "UploadPart", times=1), longest_s=8.0),
    Trouble(
        "error in a 200",
        lambda s, r: s.fault("embedded_error", "CompleteMultipartUpload", times=2),
        longest_s=8.0,
    ),
    Trouble(
        "409",
        lambda s, r: s.fault(
            "error", "PutObject", "CompleteMultipartUpload", status=409, code="ConditionalRequestConflict", times=2
        ),
    ),
    Trouble("a page", lambda s, r: s.fault("page", times=None, status=200), longest_s=10.0),
    Trouble("a page for a list", lambda s, r: s.fault("page", "ListObjectsV2", status=200, times=4), longest_s=10.0),
    Trouble("a redirect", lambda s, r: s.fault("page", times=None, status=r.choice((301, 302, 303, 307)))),
    Trouble("half a reply, said to be whole", lambda s, r: s.fault("short_reply", *_READS, times=4), longest_s=8.0),
    Trouble("an odd header", lambda s, r: s.fault("header", *_READS, code=r.choice(_ODD_HEADERS), times=6)),
    Trouble("an empty list", lambda s, r: s.fault("empty_list", times=3), longest_s=8.0),
    Trouble(
        "404 for a while",
        lambda s, r: s.fault("error", "GetObject", key=r"safetensors$", status=404, code="NoSuchKey", times=6),
        longest_s=10.0,
    ),
    Trouble("expired credentials", _expire, lambda s: s.steer("allow")),
    Trouble("denied", _deny, lambda s: s.steer("allow")),
    Trouble("down", _down, lambda s: s.steer("up"), longest_s=9.0),
]


class MetadataTroubles:
    """The metadata service's faults, each for seconds and by its own clock."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._deck = rng, Deck(list(Fault), rng)
        self.made: Counter[str] = Counter()

    def begin(self, host: Host, now: float, *, spare: bool) -> str:
        """Let a host's metadata service go wrong; how. `spare`: nothing that ends an agent."""
        fault = self._deck.draw(lambda fault: not spare or fault is not Fault.XHTML)
        for_s = self._rng.uniform(1.0, 6.0)
        host.simulator.fault(fault, for_s=for_s)
        if fault is Fault.XHTML:  # 200 where a notice would be: it is taken for one, since it might be
            host.misled_until = now + for_s + MISLED_S
        self.made[fault.value] += 1
        return f"{fault.value} for {for_s:.1f} s"
