"""Patterns: what a name says."""

from __future__ import annotations

import pytest

from harness.watch.patterns import BadPattern, pattern


@pytest.mark.parametrize(
    ("text", "name", "numbers"),
    [
        ("checkpoint-{step}", "checkpoint-40", {"step": 40}),
        ("iter_{step}", "iter_0000040", {"step": 40}),
        ("ep{epoch}-ba{step}-rank{rank}.pt", "ep1-ba20-rank3.pt", {"epoch": 1, "step": 20, "rank": 3}),
        ("a_{step}|b-{step}", "b-7", {"step": 7}),
        ("*zero_rank_{rank}_*.pt", "bf16_zero_rank_2_mp_rank_00.pt", {"rank": 2}),
        ("{name}.pt", "last.pt", {}),
        ("{step}/{step}.pt", "3/3.pt", {"step": 3}),
        ("{name}{step}.pt|{step}.pt", "epoch10.pt", {"step": 10}),
        ("{name}{step}.pt|{step}.pt", "10.pt", {"step": 10}),
        ("*{step}*.pt", "a12b.pt", {"step": 12}),
        ("{step}{name}", "12b", {"step": 12}),
    ],
)
def test_what_fits_says_its_numbers(text: str, name: str, numbers: dict[str, int]) -> None:
    match = pattern(text).match(name)
    assert match is not None
    assert match.numbers == numbers


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("checkpoint-{step}", "checkpoint-40x"),
        ("checkpoint-{step}", "old/checkpoint-40"),
        ("checkpoint-{step}", "checkpoint-"),
        ("{name}.pt", "a/b.pt"),
        ("a.pt", "axpt"),
        ("{step}/{step}.pt", "3/4.pt"),
        ("{name}{step}.pt", "10.pt"),
        ("{name}{time}.pt", "model_v2_100.pt"),
        ("{name}{time}.pt", "model_lr0.1_100.pt"),
    ],
)
def test_what_does_not_fit_all_of_it_does_not_fit(text: str, name: str) -> None:
    assert pattern(text).match(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "a_2026-11-29_14-03-23.pt",
        "2026-11-29.pt",
        "a_2026-11-29T140323.pt",
        "a29.11.2026.pt",
        "a-20261129_140323.pt",
        "a_loss_0.25.pt",
    ],
)
def test_a_time_is_known_and_tells_no_number(name: str) -> None:
    match = pattern("{name}{time}.pt|{time}.pt").match(name)
    assert match is not None
    assert match.numbers == {}


def test_a_name_is_made_again_as_it_stood() -> None:
    match = pattern("iter_{step}").match("iter_0000040")
    assert match is not None
    assert pattern("{step}").fill(match.texts) == "0000040"
    with pytest.raises(BadPattern, match="epoch"):
        pattern("{epoch}").fill(match.texts)


def test_a_field_that_there_is_not_is_refused() -> None:
    with pytest.raises(BadPattern, match="steps"):
        pattern("checkpoint-{steps}")
