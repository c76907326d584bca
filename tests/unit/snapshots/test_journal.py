from __future__ import annotations

import pytest

from cloud.store import ObjectStore
from cloud.testing.memory import MemoryStore
from harness.core import events
from harness.core.snapshot import RunKeys
from harness.snapshots import journal as module
from tests.support.protocol import FOREVER
from tests.support.stores import RecordingStore

KEYS = RunKeys("run")


def put(store: ObjectStore, generation: int, segment: int, *told: tuple[str, events.Event]) -> None:
    lines = [events.Line(at=at, mono=1.0, generation=generation, body=body) for at, body in told]
    data = b"".join(events.encode_line(line) for line in lines)
    store.put_if_absent(KEYS.journal(generation, "host", segment), memoryview(data), deadline=FOREVER)


def test_a_trainer_last_lived_when_it_left_not_when_its_last_snapshot_was_sent() -> None:
    store, left = MemoryStore(), events.TrainerLeft(code=75, step=3)
    put(store, 6, 0, ("2026-01-01T00:00:00+00:00", events.Heartbeat()))
    put(store, 7, 0, ("2026-01-02T00:00:00+00:00", events.Heartbeat()), ("2026-01-02T00:00:10+00:00", left))
    put(store, 7, 1, ("2026-01-02T00:00:40+00:00", events.Heartbeat()))

    found = module.last_lived_at(store, KEYS, 7, FOREVER)

    assert found is not None
    assert found.isoformat() == "2026-01-02T00:00:10+00:00"


def test_of_a_trainer_that_died_without_a_word_the_newest_line_counts() -> None:
    store = MemoryStore()
    for segment in range(12):
        put(store, 7, segment, (f"2026-01-02T00:00:{segment:02d}+00:00", events.Heartbeat()))

    found = module.last_lived_at(store, KEYS, 7, FOREVER)

    assert found is not None
    assert found.second == 11
    assert module.last_lived_at(store, KEYS, 8, FOREVER) is None


def test_a_journal_that_nobody_can_read_tells_nothing() -> None:
    store = MemoryStore()
    store.put(KEYS.journal(7, "host", 0), memoryview(b'{"at": 3}\n'), deadline=FOREVER)
    put(store, 7, 1, ("yesterday", events.Heartbeat()))

    assert module.last_lived_at(store, KEYS, 7, FOREVER) is None


# ---- the ends of a long journal -------------------------------------------------------------------------------------


def filled(counts: dict[str, int]) -> MemoryStore:
    store = MemoryStore()
    for host, count in counts.items():
        for number in range(count):
            store.put_if_absent(KEYS.journal(7, host, number), b"", deadline=FOREVER)
    return store


def ends(store: ObjectStore, first: int, last: int) -> list[tuple[list[str], list[str]]]:
    return [
        ([key.removeprefix(KEYS.journal_of(7)) for key in begin], [key.removeprefix(KEYS.journal_of(7)) for key in end])
        for begin, end in module.segments(store, KEYS, 7, first, last, FOREVER)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 999, 1000, 1001, 1003, 1500, 1501, 2001, 3000, 7777])
def test_the_first_and_the_last_segments_are_found_however_many_there_are(count: int) -> None:
    names = [f"host/{number:08d}.jsonl" for number in range(count)]

    ((begin, end),) = ends(filled({"host": count}), 2, 3)

    assert end == names[-3:]
    assert begin == [name for name in names[:2] if name not in end]


def test_each_host_s_segments_have_ends_of_their_own() -> None:
    store = filled({"host": 1200, "host-2": 3, "other": 1})
    store.put(KEYS.journal_of(7) + "someone/else.jsonl", memoryview(b""), deadline=FOREVER)
    store.put(KEYS.unfit(7, "a"), memoryview(b""), deadline=FOREVER)

    assert [end[-1] for _, end in ends(store, 1, 1)] == [
        "host-2/00000002.jsonl",
        "host/00001199.jsonl",
        "other/00000000.jsonl",
    ]


def test_a_run_of_a_year_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`harness status` read each of two million segments, one after the other."""
    monkeypatch.setattr(module, "_PAGE", 10)  # so a thousand segments are a hundred pages
    store = RecordingStore(filled({"host": 1000}))

    ((_, end),) = ends(store, 1, 1)

    assert end == ["host/00000999.jsonl"]
    assert len(store.keys("list")) < 25
