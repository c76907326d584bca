"""Every style of loop, interrupted at each of its events, goes on as if nothing had happened. The agent is played."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.support import loops
from tests.support.lives import Lives
from tests.support.loops import BESIDE, INSIDE, STYLES, VALIDATED

pytestmark = [
    # A loop that is skipped makes no step before the scheduler's, which is restored afterwards.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    # Some styles draw before their loop, or count its batches by themselves, and need not be told.
    pytest.mark.filterwarnings("ignore:.*random numbers were drawn between Checkpointer"),
    pytest.mark.filterwarnings("ignore:a resume in the middle of"),
    # Some make a module grow, and make it as large before their loop when they start again.
    pytest.mark.filterwarnings("ignore:.* since Checkpointer.* was made"),
]

ALL = {**STYLES, **VALIDATED, **INSIDE, **BESIDE}
REPEATING = {**VALIDATED, **INSIDE}
EVERY = [pytest.param(style, marks=pytest.mark.sample) if style == "epochs" else style for style in ALL]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A style is begun anew for each of its events: what it takes grows with their square."""
    monkeypatch.setattr(loops, "BATCHES", 4)


@pytest.fixture
def unbroken(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    lives = lives_of(style, tmp_path / "unbroken", monkeypatch)
    lives.unbroken()
    return lives


def lives_of(style: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    folder.mkdir()
    return Lives(ALL[style], folder, monkeypatch)


@pytest.mark.parametrize("style", EVERY)
def test_a_notice_at_any_moment_costs_nothing_and_repeats_nothing(
    style: str, unbroken: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what comes before a validation in a loop: a step runs again up to there."""
    for event in range(1, len(unbroken.events) + 1):
        lives = lives_of(style, tmp_path / str(event), monkeypatch)
        with contextlib.closing(lives):
            lives.live(notice_at=event)
            lives.live()

        if style in REPEATING:
            lives.outcome.curve = list(dict.fromkeys(lives.outcome.curve))
        assert lives.outcome == unbroken.outcome, f"event {event}, {unbroken.events[event - 1]}"


@pytest.mark.parametrize("style", EVERY)
def test_a_kill_at_any_moment_costs_what_was_not_saved(
    style: str, unbroken: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for event in range(1, len(unbroken.events) + 1, 2):
        lives = lives_of(style, tmp_path / str(event), monkeypatch)
        with contextlib.closing(lives):
            lives.live(kill_at=event, every_steps=1 + event % 3)
            lives.live()

        lives.outcome.curve = sorted(set(lives.outcome.curve))
        assert lives.outcome.curve == sorted(unbroken.outcome.curve), f"event {event}"
        assert lives.outcome.final == unbroken.outcome.final, f"event {event}"
