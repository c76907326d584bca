from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from cloud.errors import Denied, Unavailable
from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from harness.agent import journal as module
from harness.agent.journal import Journal
from harness.core import events
from harness.core.snapshot import RunKeys
from tests.support.patience import HANG_S
from tests.support.protocol import FOREVER
from tests.support.stores import FaultyStore, RecordingStore

KEYS = RunKeys("run")


def make(listeners: tuple[Callable[[events.Line], None], ...] = ()) -> Journal:
    journal = Journal(
        KEYS,
        "host",
        listeners=listeners,
        heartbeat=lambda: events.Heartbeat(step=3),
    )
    journal.generation = journal.claimed = 7
    return journal


def lines(store: ObjectStore) -> list[events.Line]:
    keys = [info.key for info in store.list(KEYS.events, deadline=FOREVER)]
    text = b"".join(store.read(key, limit_bytes=1 << 20, deadline=FOREVER) for key in keys)
    return [events.decode_line(line) for line in text.splitlines()]


def due(reason: str) -> events.Due:
    return events.Due(reason=reason)


class Seen:
    """Waits for a number of calls of a verb of a store, from another thread."""

    def __init__(self, store: ObjectStore, count: int) -> None:
        self.store, self.count, self.reached, self.calls = store, count, threading.Event(), 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def put_if_absent(self, key: str, data: bytes, **options: object) -> None:
        try:
            self.store.put_if_absent(key, data, **options)  # type: ignore[arg-type]
        finally:
            self.calls += 1
            if self.calls >= self.count:
                self.reached.set()


def test_what_was_emitted_is_in_the_store_after_close_in_order() -> None:
    store, journal = MemoryStore(), make()
    for number in range(5):
        journal.emit(due(str(number)))
    journal.start(store)
    journal.close()

    assert [line.body for line in lines(store)] == [due(str(number)) for number in range(5)]
    assert {line.generation for line in lines(store)} == {7}


def test_a_segment_is_put_once_and_the_next_one_has_the_next_number() -> None:
    store, journal = RecordingStore(MemoryStore()), make()
    seen = Seen(store, 1)
    journal.start(seen)  # type: ignore[arg-type]
    journal.emit(due("first"))
    journal.flush()
    assert seen.reached.wait(HANG_S)
    journal.emit(due("second"))
    journal.close()

    assert store.keys("put_if_absent") == [
        "run/events/00000007-host/00000000.jsonl",
        "run/events/00000007-host/00000001.jsonl",
    ]
    assert [line.body for line in lines(store)] == [due("first"), due("second")]


def test_events_wait_in_memory_while_the_store_is_down_and_none_is_lost() -> None:
    inner = MemoryStore()
    seen, journal = Seen(FaultyStore(inner, "put_if_absent", fail_on=(1, 2), error=Unavailable), 2), make()
    journal.start(seen)  # type: ignore[arg-type]
    journal.emit(due("first"))
    journal.flush()
    while seen.calls < 2:
        journal.flush()
    journal.emit(due("second"))
    journal.close()

    assert [line.body for line in lines(inner)] == [due("first"), due("second")]


def test_segments_of_an_earlier_agent_are_skipped_and_kept() -> None:
    store, journal = MemoryStore(), make()
    for number in range(3):
        store.put_if_absent(KEYS.journal(7, "host", number), b"", deadline=FOREVER)
    journal.emit(due("mine"))
    journal.start(store)
    journal.close()

    assert [line.body for line in lines(store)] == [due("mine")]
    assert store.read(KEYS.journal(7, "host", 3), limit_bytes=1000, deadline=FOREVER)


def put_each(journal: Journal, store: ObjectStore, *reasons: str) -> None:
    """A segment for each."""
    for reason in reasons:
        journal.emit(due(reason))
        journal._put(store)


def keys_of(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list(KEYS.events, deadline=FOREVER)]


def test_small_segments_become_one_and_no_line_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLDED", 4)
    store, journal = MemoryStore(), make()
    foreign = KEYS.journal(7, "host", 2)
    store.put_if_absent(foreign, events.encode_line(lines_of("theirs")), deadline=FOREVER)

    put_each(journal, store, *"abcdefghij")

    told = [line.body.reason for line in lines(store) if isinstance(line.body, events.Due)]
    assert told == ["theirs", *"abcdefghij"], "in order, and each once"
    assert len(keys_of(store)) == 1 + 2 + 2
    assert foreign in keys_of(store)


def lines_of(reason: str) -> events.Line:
    return events.Line(at="", mono=0.0, generation=7, body=due(reason))


@pytest.mark.parametrize("verb", ["put_if_absent", "delete"])
def test_a_fold_that_fails_leaves_every_line(monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr(module, "FOLDED", 4)
    inner, journal = MemoryStore(), make()
    put_each(journal, FaultyStore(inner, verb, fail_on=5 if verb == "put_if_absent" else 2), *"abcdef")

    told = {line.body.reason for line in lines(inner) if isinstance(line.body, events.Due)}
    assert told == set("abcdef")


def test_where_nothing_may_be_deleted_lines_are_put_once_more_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet's role lets no instance delete what happened."""
    monkeypatch.setattr(module, "FOLDED", 4)
    inner, journal = MemoryStore(), make()
    put_each(journal, FaultyStore(inner, "delete", fail_on=None, error=Denied), *"abcdefghijkl")

    assert len(keys_of(inner)) == 12 + 1


def test_segments_of_two_generations_are_not_folded_into_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLDED", 4)
    store, journal = MemoryStore(), make()
    put_each(journal, store, "a", "b")
    journal.generation = journal.claimed = 8
    put_each(journal, store, "c", "d", "e")

    assert [key.split("/")[2] for key in keys_of(store)] == ["00000007-host"] * 2 + ["00000008-host"] * 2


def test_a_quiet_journal_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_S", 0.001)
    store, journal = MemoryStore(), make()
    seen = Seen(store, 2)
    journal.start(seen)  # type: ignore[arg-type]
    assert seen.reached.wait(HANG_S)
    journal.close()

    assert {line.body for line in lines(store)} == {events.Heartbeat(step=3)}


def test_nothing_is_put_before_there_is_a_generation() -> None:
    store, journal = RecordingStore(MemoryStore()), make()
    journal.generation = journal.claimed = 0
    journal.emit(due("early"))
    journal.start(store)
    journal.close()

    assert store.calls == []


def test_listeners_hear_every_line_before_emit_returns() -> None:
    heard: list[events.Line] = []
    make(listeners=(heard.append,)).emit(due("now"))

    assert [line.body for line in heard] == [due("now")]


def test_lines_of_many_threads_are_all_there_and_each_is_whole() -> None:
    store, journal = MemoryStore(), make()
    journal.start(store)

    def work(name: str) -> None:
        for number in range(50):
            journal.emit(due(f"{name}{number}"))
            journal.flush()

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    journal.close()

    reasons = [line.body.reason for line in lines(store) if isinstance(line.body, events.Due)]
    assert sorted(reasons) == sorted(f"{name}{number}" for name in "abcd" for number in range(50))


def test_an_agent_that_goes_on_with_a_long_journal_finds_its_end_at_once() -> None:
    """Trying every number took minutes after days of training: a journal so silent is a dead one's."""
    store = RecordingStore(MemoryStore())
    for segment in range(1000):
        store._store.put_if_absent(KEYS.journal(7, "host", segment), b"", deadline=FOREVER)
    journal = make()
    journal.emit(due("after"))
    journal.start(store)
    journal.close()

    assert store.keys("put_if_absent")[-1] == KEYS.journal(7, "host", 1000)
    assert len(store.keys("put_if_absent")) == 1


def test_the_next_agent_of_a_generation_goes_on_behind_a_folded_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer asks for what is newer than the last segment that it knows, and takes silence for death."""
    monkeypatch.setattr(module, "FOLDED", 3)
    store = MemoryStore()
    put_each(make(), store, *"abcd")
    before = keys_of(store)

    put_each(make(), store, "e")

    added = set(keys_of(store)) - set(before)
    assert len(before) == 2
    assert min(added) > max(before)


def test_nothing_is_put_below_a_number_that_is_not_claimed() -> None:
    """It may be another agent's, and tell a newcomer of that one's life."""
    store, journal = MemoryStore(), make()
    journal.claimed = 6
    journal.emit(due("early"))
    journal.start(store)
    journal.close()

    assert [info.key for info in store.list(KEYS.events, deadline=FOREVER)] == [KEYS.journal(6, "host", 0)]
    assert [line.generation for line in lines(store)] == [7]
