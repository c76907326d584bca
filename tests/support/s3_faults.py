"""Which calls go wrong, and how: rules that strike the nth matching call, the same way every time.

Owns the rules, their counters and the wait of a stalled call. Knows no HTTP: `s3_server.py` does what a rule says.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field

KINDS: dict[str, str] = {
    "error": "answer `status` and `code`; nothing takes effect",
    "reset": "RST: with at=request after `after_bytes` of the body, with at=reply after so many of the reply's",
    "stall": "as reset, but hold the connection open and say nothing, until released",
    "slow": "wait `delay_s`: with at=request before the call takes effect, with at=reply after",
    "truncate": "send `after_bytes` of the reply's body (without it: half), then close",
    "corrupt_response": "flip one bit of the reply's body, at `offset` (without it: in the middle)",
    "corrupt_stored": "flip one bit of the request's body, as if the network had: refused where a sum was sent",
    "lose_reply": "let the call take effect, then RST",
    "forget_part": "accept a part and do not keep it",
    "page": "answer `status` with a page of HTML, which leads elsewhere if it is a redirect; nothing takes effect",
    "header": "say `code` (`Name: value`) in the head of the reply",
    "short_reply": "say in the head that the reply's body has only its first half, and send that",
    "empty_list": "answer a list as if no key were there: a stale one, or a gateway's",
    "embedded_error": "answer 200 with an error document of `code`; nothing takes effect",
}


@dataclass
class Fault:
    """One rule. See `KINDS` for what happens.

    Attributes:
        kind: a key of KINDS.
        operations: names of operations as S3 has them; none is every one.
        key: a regular expression that is searched in the key.
        nth: the first matching call that is struck, from 1.
        times: how many are struck from there on; `None` is every one.
        for_s: no call is struck later than this after the rule was made.
    """

    kind: str
    operations: tuple[str, ...] = ()
    key: str = ""
    nth: int = 1
    times: int | None = 1
    for_s: float | None = None
    at: str = "request"
    status: int = 500
    code: str = "InternalError"
    after_bytes: int | None = None
    delay_s: float = 0.0
    offset: int | None = None
    fault_id: int = 0
    matched: int = 0
    struck: int = 0
    made_at: float = field(default_factory=time.monotonic)
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault {self.kind!r}; there are {', '.join(KINDS)}")
        if self.at not in ("request", "reply"):
            raise ValueError(f"at={self.at!r}; there are request and reply")
        if self.kind == "lose_reply":
            self.kind, self.at = "reset", "reply"

    def breaks(self, at: str) -> bool:
        """Whether the connection breaks or hangs on this side of the call's effect."""
        return self.kind in ("reset", "stall", "slow") and self.at == at

    def matches(self, operation: str, key: str) -> bool:
        return (not self.operations or operation in self.operations) and re.search(self.key, key) is not None

    def strikes(self) -> bool:
        """Count a matching call, and say whether it is struck."""
        self.matched += 1
        if self.for_s is not None and time.monotonic() - self.made_at > self.for_s:
            return False
        if self.matched < self.nth or (self.times is not None and self.matched >= self.nth + self.times):
            return False
        self.struck += 1
        return True


class Faults:
    """The rules of one server. May be used from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._faults: list[Fault] = []
        self._made = 0
        self._closed = threading.Event()

    def add(self, fault: Fault) -> int:
        with self._changed:
            self._made += 1
            fault.fault_id = self._made
            self._faults.append(fault)
            return fault.fault_id

    def strike(self, operation: str, key: str) -> Fault | None:
        """The rule that strikes this call: of several, the one that was made first. Every match is counted."""
        with self._changed:
            struck = [fault for fault in self._faults if fault.matches(operation, key) and fault.strikes()]
            self._changed.notify_all()
            return struck[0] if struck else None

    def wait_struck(self, fault_id: int, times: int, timeout_s: float | None) -> None:
        """Block until a rule has struck so often.

        Raises:
            KeyError: there is no such rule, or it is forgotten meanwhile: it strikes nobody any more.
            TimeoutError: the limit, if there is one, is over.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._struck(fault_id) >= times, timeout_s):
                struck = self._struck(fault_id)
                raise TimeoutError(f"fault {fault_id} struck {struck} times, not {times}, within {timeout_s:g} s")

    def _struck(self, fault_id: int) -> int:
        for fault in self._faults:
            if fault.fault_id == fault_id:
                return fault.struck
        raise KeyError(f"no fault {fault_id}")

    def hold(self, fault: Fault) -> None:
        """Keep a struck call waiting: until it is released, for its `delay_s`, or until the server closes."""
        if fault.kind == "slow":
            self._closed.wait(fault.delay_s)
        else:
            fault.released.wait()
        if self._closed.is_set():
            raise ConnectionError("the server closed")

    def release(self) -> None:
        """Let the stalled calls go on; these rules stall no others."""
        with self._changed:
            for fault in self._faults:
                fault.released.set()

    def clear(self) -> None:
        """Forget every rule; stalled calls go on."""
        self.release()
        with self._changed:
            self._faults.clear()
            self._changed.notify_all()

    def close(self) -> None:
        self._closed.set()
        self.clear()
