"""Retry with a deadline, and what a second attempt may mean."""

from __future__ import annotations

import pytest

from cloud.errors import AlreadyExists, CloudError, Denied, NotFound, OutcomeUnknown, Unavailable, call_with_retry
from cloud.notice import Deadline
from cloud.retry import RetryingStore
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from tests.support.clock import FakeClock
from tests.support.stores import FaultyStore

NEVER = Deadline.never()


class Failing:
    """A call that raises each error in turn, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def retrying(store: ObjectStore) -> RetryingStore:
    return RetryingStore(store, sleep=FakeClock().sleep)


# ------------------------------------------------------------------------------------------------------ call_with_retry


def test_a_retryable_error_is_retried() -> None:
    clock = FakeClock()
    call = Failing(Unavailable("1"), OutcomeUnknown("2"))

    assert call_with_retry(call, NEVER, sleep=clock.sleep) == "done"
    assert call.calls == 3


@pytest.mark.parametrize("error", [NotFound("x"), Denied("x"), AlreadyExists("x"), ValueError("a bug")])
def test_any_other_error_is_not_retried(error: Exception) -> None:
    call = Failing(error)

    with pytest.raises(type(error)) as caught:
        call_with_retry(call, NEVER, sleep=FakeClock().sleep)
    assert caught.value is error
    assert call.calls == 1


def test_pauses_double_up_to_the_cap() -> None:
    clock = FakeClock()

    with pytest.raises(Unavailable):
        call_with_retry(Failing(*[Unavailable("x")] * 9), NEVER, sleep=clock.sleep, attempts=9, base_s=0.1, cap_s=2.0)

    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]
    assert len(clock.sleeps) == len(longest)
    assert all(0 <= pause <= bound for pause, bound in zip(clock.sleeps, longest, strict=True))


def test_the_last_error_is_raised_as_it_was() -> None:
    first, last = Unavailable("first"), Unavailable("last")

    with pytest.raises(Unavailable) as caught:
        call_with_retry(Failing(first, last), NEVER, sleep=FakeClock().sleep, attempts=2)
    assert caught.value is last


def test_no_pause_goes_beyond_the_deadline() -> None:
    clock = FakeClock()
    deadline = Deadline.after(3.0, clock)

    with pytest.raises(Unavailable):
        call_with_retry(Failing(*[Unavailable("x")] * 1000), deadline, sleep=clock.sleep, attempts=1000)
    assert not deadline.expired


def test_the_first_attempt_is_made_even_after_the_deadline() -> None:
    clock = FakeClock()

    assert call_with_retry(Failing(), Deadline(0.0, clock), sleep=clock.sleep) == "done"


# -------------------------------------------------------------------------------------------------------- RetryingStore


def test_a_put_that_failed_is_put_again_and_progress_counts_once() -> None:
    inner = MemoryStore()
    sent: list[int] = []
    faulty = FaultyStore(inner, "put", fail_on=(1, 2), after=True, error=OutcomeUnknown)

    receipt = retrying(faulty).put(
        "run/a", memoryview(b"bytes"), deadline=NEVER, progress=lambda n, **_: sent.append(n)
    )

    assert faulty.calls == 3
    assert receipt.size == sum(sent) == 5


@pytest.mark.parametrize("error", [OutcomeUnknown, Unavailable])
def test_a_commit_whose_reply_was_lost_is_our_own_success(error: type[CloudError]) -> None:
    inner = MemoryStore()
    faulty = FaultyStore(inner, "put_if_absent", error=error, after=True)

    retrying(faulty).put_if_absent("run/commit", b"mine", deadline=NEVER)

    assert inner.read("run/commit", limit_bytes=100, deadline=NEVER) == b"mine"


def test_a_commit_that_did_not_take_effect_is_made_again() -> None:
    inner = MemoryStore()
    faulty = FaultyStore(inner, "put_if_absent", error=OutcomeUnknown)

    retrying(faulty).put_if_absent("run/commit", b"mine", deadline=NEVER)

    assert inner.read("run/commit", limit_bytes=100, deadline=NEVER) == b"mine"


@pytest.mark.parametrize("theirs", [b"them", b"theirs", b""])
def test_somebody_elses_commit_is_not_ours_after_a_lost_reply(theirs: bytes) -> None:
    inner = MemoryStore()
    inner.put_if_absent("run/commit", theirs, deadline=NEVER)
    faulty = FaultyStore(inner, "put_if_absent", error=OutcomeUnknown)

    with pytest.raises(AlreadyExists):
        retrying(faulty).put_if_absent("run/commit", b"mine", deadline=NEVER)
    assert inner.read("run/commit", limit_bytes=100, deadline=NEVER) == theirs


def test_the_same_bytes_are_not_ours_without_an_attempt_that_failed() -> None:
    """Two claimants may write equal bytes; only a lost reply makes them possibly one's own."""
    inner = MemoryStore()
    inner.put_if_absent("run/commit", b"mine", deadline=NEVER)

    with pytest.raises(AlreadyExists):
        retrying(inner).put_if_absent("run/commit", b"mine", deadline=NEVER)


def test_reading_back_is_retried_too() -> None:
    inner = MemoryStore()
    faulty = FaultyStore(FaultyStore(inner, "put_if_absent", error=OutcomeUnknown, after=True), "read")

    retrying(faulty).put_if_absent("run/commit", b"mine", deadline=NEVER)

    assert faulty.calls == 2


@pytest.mark.parametrize("error", [Unavailable, Denied])
def test_what_cannot_be_read_back_stays_unknown(error: type[CloudError]) -> None:
    inner = MemoryStore()
    lost = FaultyStore(inner, "put_if_absent", error=OutcomeUnknown, after=True)
    blind = FaultyStore(lost, "read", fail_on=None, error=error)

    with pytest.raises(OutcomeUnknown):
        retrying(blind).put_if_absent("run/commit", b"mine", deadline=NEVER)


def test_a_lost_reply_followed_by_another_failure_stays_unknown() -> None:
    inner = MemoryStore()
    lost = FaultyStore(inner, "put_if_absent", error=OutcomeUnknown, after=True)
    down = FaultyStore(lost, "put_if_absent", fail_on=tuple(range(2, 100)), error=Unavailable)

    with pytest.raises(OutcomeUnknown):
        retrying(down).put_if_absent("run/commit", b"mine", deadline=NEVER)


def test_a_commit_that_surely_failed_says_so() -> None:
    inner = MemoryStore()
    down = FaultyStore(inner, "put_if_absent", fail_on=None, error=Unavailable)

    with pytest.raises(Unavailable):
        retrying(down).put_if_absent("run/commit", b"mine", deadline=NEVER)
    assert list(inner.list("", deadline=NEVER)) == []


@pytest.mark.parametrize("verb", ["get", "read", "stat", "list", "delete"])
def test_every_other_call_is_retried(verb: str) -> None:
    inner = MemoryStore()
    inner.put("run/a", memoryview(b"bytes"), deadline=NEVER)
    faulty = FaultyStore(inner, verb)
    store = retrying(faulty)

    match verb:
        case "get":
            store.get("run/a", memoryview(bytearray(5)), deadline=NEVER)
        case "read":
            store.read("run/a", limit_bytes=5, deadline=NEVER)
        case "stat":
            store.stat("run/a", deadline=NEVER)
        case "list":
            assert [info.key for info in store.list("run/", deadline=NEVER)] == ["run/a"]
        case "delete":
            store.delete("run/a", deadline=NEVER)

    assert faulty.calls == 2


def test_a_listing_that_breaks_off_goes_on_where_it_was() -> None:
    inner = MemoryStore()
    for key in ("a", "b", "c"):
        inner.put(key, memoryview(b""), deadline=NEVER)

    class BreaksOff(MemoryStore):
        asked: list[str] = []  # noqa: RUF012

        def list(self, prefix, *, after="", deadline):  # type: ignore[no-untyped-def]
            self.asked.append(after)
            for info in inner.list(prefix, after=after, deadline=deadline):
                yield info
                if len(self.asked) == 1 and info.key == "b":
                    raise Unavailable("broke off")

    store = BreaksOff()

    assert [info.key for info in retrying(store).list("", deadline=NEVER)] == ["a", "b", "c"]
    assert store.asked == ["", "b"]
