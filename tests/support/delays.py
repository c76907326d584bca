"""Delays at named seams: finds on a quiet machine what load finds once in a hundred runs.

    HARNESS_TEST_DELAY=slots=0.2,trainer-send=0.05 ./scripts/test tests/process tests/ranks

At each seam whoever comes by waits so many seconds first. Load slows everybody alike; a delay of one of two who meet is
what shows which of them was only ever faster. The agent of `tests.support.harness_run` has the seams of AGENT, trainers
of tests/support those of TRAINER. A run that is red, or does something else, under a delay has a race: the test's, or
the product's.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VARIABLE = "HARNESS_TEST_DELAY"
LONG_S, SHORT_S = 0.2, 0.02

# By name: the function before which is waited, and how long in a nightly run; short where it is passed all the time.
AGENT: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "turn": ("harness.agent.loop:Loop.run_posts", SHORT_S),
        "greet": ("harness.agent.trainers.session:Trainer.greet", LONG_S),
        "hear": ("harness.agent.main:Agent._on_message_of_trainer", SHORT_S),
        "spawn": ("harness.agent.trainers.session:Trainer.spawn", LONG_S),
        "child-exit": ("harness.agent.trainers.session:Trainer._on_child_exit", LONG_S),
        "dead": ("harness.agent.trainers.session:Trainer._on_dead", LONG_S),
        "tell-resume": ("harness.agent.trainers.telling:Telling.resume", LONG_S),
        "slots": ("harness.agent.save.slot_pool:SlotRequest.make", LONG_S),
        "grant": ("harness.agent.trainers.control:TrainerControl.grant", SHORT_S),
        "ask": ("harness.agent.trainers.control:TrainerControl.command", SHORT_S),
        "open": ("harness.snapshots.open:_Opening._open", LONG_S),
        "claim": ("harness.snapshots.commit:claim", LONG_S),
        "survey": ("harness.snapshots.records:survey", LONG_S),
        "publish": ("harness.snapshots.commit:publish", LONG_S),
        "verify": ("harness.agent.save.upkeep:Upkeep._read_back", LONG_S),
        "retire": ("harness.agent.save.upkeep:Upkeep._retire", LONG_S),
        "released": ("harness.agent.save.pipeline:SavePipeline._on_released", LONG_S),
        "find": ("harness.agent.resume.finder:Finder.find", LONG_S),
        "fetch": ("harness.agent.resume.finder:Finder._fetch", LONG_S),
        "look": ("harness.snapshots.handover:newer_claim", LONG_S),
        "signal": ("harness.agent.notices.registry:Notices.received", LONG_S),
        "drain": ("harness.agent.drain.controller:DrainController.begin", LONG_S),
        "shut": ("harness.agent.save.pipeline:SavePipeline.close", LONG_S),
        "journal": ("harness.agent.journal:Journal.emit", SHORT_S),
    }
)

TRAINER: Mapping[str, tuple[str, float]] = MappingProxyType(
    {
        "trainer-connect": ("harness.trainer.link:Link._connect", LONG_S),
        "trainer-send": ("harness.trainer.link:Link.send", SHORT_S),
        "trainer-hear": ("harness.trainer.link:Link._on_message", SHORT_S),
        "trainer-granted": ("harness.trainer.link:Link.granted", SHORT_S),
        "trainer-seal": ("harness.ipc.slots:Slot.seal", SHORT_S),
        "trainer-restore": ("harness.trainer.link:Link.wait_ready", LONG_S),
        "trainer-part": ("harness.trainer.link:Link.part", LONG_S),
        "trainer-replace": ("harness.trainer.link:Link._replace", LONG_S),
    }
)


def wanted(text: str) -> dict[str, float]:
    """Read `seam=SECONDS,…`; ValueError for a seam that there is not."""
    told = {name: float(seconds) for name, _, seconds in (word.partition("=") for word in text.split(",") if word)}
    if unknown := told.keys() - AGENT.keys() - TRAINER.keys():
        raise ValueError(f"no such seam: {', '.join(sorted(unknown))}")
    return told


def install(seams: Mapping[str, tuple[str, float]]) -> None:
    """Put the delays that the environment asks for into this process, where they are among `seams`."""
    for name, seconds in wanted(os.environ.get(VARIABLE, "")).items():
        if name in seams:
            _delay(seams[name][0], seconds)


def _delay(place: str, seconds: float) -> None:
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    real = getattr(owner, name)

    @functools.wraps(real)
    def later(*args: Any, **options: Any) -> Any:
        threading.Event().wait(seconds)
        return real(*args, **options)

    setattr(owner, name, later)
