"""Whether an agent grows: its own memory, its descriptors, its threads, over its life."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.soak.hosts import Sample

LONG_S = 60.0  # younger agents tell nothing: some wait 20 s for another host before they upload at all
SLACK_BYTES, SLACK_DESCRIPTORS, SLACK_THREADS = 36 << 20, 4, 2

FIGURES: dict[str, tuple[Callable[[Sample], int], int]] = {
    "own memory": (lambda sample: sample.own_bytes, SLACK_BYTES),
    "descriptors": (lambda sample: sample.descriptors, SLACK_DESCRIPTORS),
    "threads": (lambda sample: sample.threads, SLACK_THREADS),
}


@dataclass(frozen=True)
class Growth:
    """The medians of one figure of one agent, in the middle third of its life and in the last.

    In the first third it warms up: libraries, connections, the first upload's buffers. `rose_by` is how far all of its
    range moved up, least and most and median alike: what only comes and goes moves one of them and not the others.
    """

    pid: int
    figure: str
    middle: float
    last: float
    rose_by: float


def longest(samples: Mapping[int, Sequence[Sample]]) -> tuple[int, float]:
    """The agent that was watched longest, and for how long."""
    ages = {pid: found[-1].at - found[0].at for pid, found in samples.items()}
    return max(ages.items(), key=lambda age: age[1], default=(0, 0.0))


def grown(samples: Mapping[int, Sequence[Sample]]) -> list[Growth]:
    """The figures that never came back to what they once were."""
    return [
        growth
        for pid, found in samples.items()
        if found[-1].at - found[0].at >= LONG_S
        for growth in growths(pid, found)
        if growth.rose_by > FIGURES[growth.figure][1]
    ]


def growths(pid: int, samples: Sequence[Sample]) -> list[Growth]:
    """All figures of one agent."""
    ended = samples[-1].at
    third_s = (ended - samples[0].at) / 3
    middle = [sample for sample in samples if 2 * third_s >= ended - sample.at >= third_s]
    last = [sample for sample in samples if ended - sample.at < third_s]
    return [_growth(pid, name, middle, last) for name in FIGURES] if middle and last else []


def _growth(pid: int, name: str, middle: Sequence[Sample], last: Sequence[Sample]) -> Growth:
    before, after = ([FIGURES[name][0](sample) for sample in third] for third in (middle, last))
    rose_by = min(of(after) - of(before) for of in (min, max, statistics.median))
    return Growth(pid, name, statistics.median(before), statistics.median(after), rose_by)
