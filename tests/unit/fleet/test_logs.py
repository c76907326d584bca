"""A log that is followed: each line once, late ones too."""

from __future__ import annotations

from cloud.aws.console import LogLine
from harness.fleet.logs import Tail


def line(id_: str, at_s: int, stream: str = "i-1") -> LogLine:
    return LogLine(id_, at_s * 1000, stream, f"line {id_}\n")


def test_a_line_that_comes_late_is_shown_and_none_twice() -> None:
    tail = Tail(since_ms=100_000)

    assert tail.new([line("a", 101), line("b", 110)]) == ["==> i-1 <==", "line a", "line b"]
    assert tail.since_ms == 100_000, "half a minute is asked for again, but nothing before the beginning"
    assert tail.new([line("a", 101), line("late", 105), line("b", 110), line("c", 111)]) == ["line late", "line c"]
    assert tail.new([line("b", 110), line("late", 105), line("c", 111)]) == []


def test_another_instance_is_announced() -> None:
    tail = Tail(since_ms=0)

    told = tail.new([line("a", 1), line("b", 2, "i-2"), line("c", 3, "i-2"), line("d", 4)])

    assert told == ["==> i-1 <==", "line a", "==> i-2 <==", "line b", "line c", "==> i-1 <==", "line d"]


def test_what_is_remembered_does_not_grow_with_the_log() -> None:
    tail = Tail(since_ms=0)
    for second in range(1000):
        tail.new([line(str(second), second)])

    assert tail.since_ms == 999_000 - 30_000
    assert tail.new([line(str(second), second) for second in range(969, 1000)]) == []
