"""A delay comes before what it is named for, and a seam that is gone is not taken for one that is delayed."""

from __future__ import annotations

import importlib
import threading

import pytest

from tests.support import delays


@pytest.mark.parametrize("place", [seam.place for seam in delays.SEAMS.values()])
def test_every_seam_is_a_function_that_there_is(place: str) -> None:
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)

    assert callable(found)


def test_no_name_stands_for_two_seams() -> None:
    assert len(delays.SEAMS) == len(delays.AGENT) + len(delays.TRAINER) + len(delays.NODE)


def test_what_is_delayed_waits_and_then_does_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setenv(delays.VARIABLE, "grant=0.5,trainer-send=0.1")
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds: waited.append(seconds))
    owner = importlib.import_module("harness.agent.trainers.control").TrainerControl
    monkeypatch.setattr(owner, "grant", lambda self: "granted")  # restored at the end, with what is put around it

    delays.install(delays.AGENT)

    assert owner.grant(None) == "granted"
    assert waited == [0.5]


def test_a_delay_after_a_seam_comes_when_it_has_done_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    done = list[object]()
    monkeypatch.setenv(delays.VARIABLE, "said=0.5")
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds: done.append(seconds))
    owner = importlib.import_module("harness.agent.log").Log
    monkeypatch.setattr(owner, "line", lambda self, text: done.append(text))

    delays.install(delays.AGENT)
    owner.line(None, "it is done")

    assert done == ["it is done", 0.5]


def test_a_seam_that_there_is_not_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such seam: grand"):
        delays.wanted("grand=0.5")
