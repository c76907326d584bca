"""The torn-checkpoint matrix: whatever a writer that was killed leaves, only what is whole counts as whole.

Each layout is written for three steps, in the order of its framework. At each moment the directory is judged as at a
start, when nothing runs any more, and as while the program runs, but stands still: the worst for every rule about time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.watch.adapter import Adapter, named
from harness.watch.judge import Circumstances, lack_of, shape_of
from harness.watch.look import Candidate, Look, candidates
from harness.watch.record import Record
from harness.watch.sound import Sound
from harness.watch.survey import Survey, record_of
from tests.support.layouts import LAYOUTS, RANKS, Layout, contents, everything

DOCS = Path(__file__).parents[3] / "docs" / "watch.md"
STEPS = (10, 20, 30)
EACH_RANK = (
    "transformers",
    "transformers-jit",
    "mindnlp",
    "accelerate",
    "deepspeed",
    "deepspeed-tensor",
    "deepspeed-plain",
    "nnscaler",
    "dcp",
    "diffusers",
    "megatron",
    "nemo",
    "verl",
)
"""Layouts that are written by two ranks here, as the environment of such a program says."""


@dataclass(frozen=True)
class Truth:
    """What a step's checkpoint consists of once its writer has come to its end: all of its files."""

    files: Mapping[str, bytes]


def truths(adapter: Adapter, layout: Layout, root: Path) -> dict[int, Truth]:
    """Write each step to its end, and return what it consists of then."""
    found = {}
    for step in STEPS:
        for _ in layout(root, step):
            pass
        newest = candidates(Look.at(root), adapter)[-1]
        found[step] = Truth(contents(root, [*newest.files]))
    return found


def is_whole(root: Path, candidate: Candidate, known: Mapping[int, Truth]) -> bool:
    """Whether it is, byte by byte, what one step's writer has come to its end with."""
    there = contents(root, [*candidate.files])
    return any(there == truth.files for truth in known.values())


def judged_whole(root: Path, adapter: Adapter, known: Circumstances) -> list[Candidate]:
    look = Look.at(root)
    found = candidates(look, adapter)
    return [one for one in found if lack_of(one, look, adapter, found, Sound(), known) is None]


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_a_whole_checkpoint_counts_as_one_wherever_its_writer_was_killed(name: str, tmp_path: Path) -> None:
    adapter_name, layout = LAYOUTS[name]
    adapter = named(adapter_name)
    known = truths(adapter, layout, tmp_path / "to-the-end")
    assert all(truth.files for truth in known.values())
    root = tmp_path / "out"
    root.mkdir()
    ranks = RANKS if name in EACH_RANK else 1
    taken: Record | None = None
    moments, seen = 0, set[str]()

    for step in STEPS:
        for _ in layout(root, step):
            moments += 1
            for record in {None, taken} if taken is None else (None, taken):
                for one in Survey.of(root, adapter_name, record).judged:
                    if one.lack is None:
                        seen.add(one.candidate.name)
                        assert is_whole(root, one.candidate, known), (moments, one.candidate.name)
            look = Look.at(root)
            shape = frozenset[str]() if taken is None else frozenset(taken.shape)
            live = Circumstances(before=look, ranks=ranks, shape=shape)
            for candidate in judged_whole(root, adapter, live):
                assert is_whole(root, candidate, known), (moments, candidate.name)
        ended = judged_whole(root, adapter, Circumstances(ranks=ranks, ended_well=True))
        assert ended, f"step {step} is whole"
        newest = ended[-1]
        assert contents(root, [*newest.files]) == known[step].files
        taken = record_of(newest, adapter, step, ranks)
        assert shape_of(newest) == frozenset(taken.shape)

    assert moments >= 6 * len(STEPS)
    assert everything(root)
    row = rf"\| {name} +\| {adapter_name} +\| {moments} +\| 0 +\|"
    assert re.search(row, DOCS.read_text()), f"docs/watch.md has another figure than {moments} moments of {name}"
