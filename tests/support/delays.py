"""Delays at named seams: finds on a quiet machine what load finds once in a hundred runs.

    HARNESS_TEST_DELAY=slots=0.2,trainer-send=0.05 ./scripts/test tests/process tests/ranks

At each seam whoever comes by waits so many seconds first; or afterwards, if a line is said there: a test may go on at
that line, although what it says is done only then. Load slows everybody alike; a delay of one of two who meet is what
shows which of them was only ever faster. The agent of `tests.support.harness_run` has the seams of AGENT, trainers of
tests/support those of TRAINER, `harness resume` of `tests.support.resume_run` those of NODE. A run that is red, or does
something else, under a delay has a race: the test's, or the product's.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

VARIABLE = "HARNESS_TEST_DELAY"
LONG_S, MEDIUM_S, SHORT_S = 0.2, 0.05, 0.02


class Seam(NamedTuple):
    """A place for a delay.

    Attributes:
        place: the function, as `module:name`.
        seconds: how long the delay is in a nightly run; short where the place is passed all the time.
        after: whether it is after the function, and not before it.
    """

    place: str
    seconds: float
    after: bool = False


AGENT: Mapping[str, Seam] = MappingProxyType(
    {
        "turn": Seam("harness.agent.loop:Loop.run_posts", SHORT_S),
        "greet": Seam("harness.agent.trainers.session:Trainer.greet", LONG_S),
        "hear": Seam("harness.agent.main:Agent._on_message_of_trainer", SHORT_S),
        "spawn": Seam("harness.agent.trainers.session:Trainer.spawn", LONG_S),
        "child-exit": Seam("harness.agent.trainers.session:Trainer._on_child_exit", LONG_S),
        "dead": Seam("harness.agent.trainers.session:Trainer._on_dead", LONG_S),
        "tell-resume": Seam("harness.agent.trainers.telling:Telling.resume", LONG_S),
        "slots": Seam("harness.agent.save.slot_pool:SlotRequest.make", LONG_S),
        "grant": Seam("harness.agent.trainers.control:TrainerControl.grant", SHORT_S),
        "ask": Seam("harness.agent.trainers.control:TrainerControl.command", SHORT_S),
        "open": Seam("harness.snapshots.open:_Opening._open", LONG_S),
        "claim": Seam("harness.snapshots.commit:claim", LONG_S),
        "survey": Seam("harness.snapshots.records:survey", LONG_S),
        "publish": Seam("harness.snapshots.commit:publish", LONG_S),
        "verify": Seam("harness.agent.save.upkeep:Upkeep._read_back", LONG_S),
        "retire": Seam("harness.agent.save.upkeep:Upkeep._retire", LONG_S),
        "released": Seam("harness.agent.save.pipeline:SavePipeline._on_released", LONG_S),
        "find": Seam("harness.agent.resume.finder:Finder.find", LONG_S),
        "fetch": Seam("harness.agent.resume.finder:Finder._fetch", LONG_S),
        "look": Seam("harness.snapshots.handover:newer_claim", LONG_S),
        "signal": Seam("harness.agent.notices.registry:Notices.received", LONG_S),
        "drain": Seam("harness.agent.drain.controller:DrainController.begin", LONG_S),
        "shut": Seam("harness.agent.save.pipeline:SavePipeline.close", LONG_S),
        "journal": Seam("harness.agent.journal:Journal.emit", SHORT_S),
        "said": Seam("harness.agent.log:Log.line", MEDIUM_S, after=True),
    }
)

TRAINER: Mapping[str, Seam] = MappingProxyType(
    {
        "trainer-connect": Seam("harness.trainer.link:Link._connect", LONG_S),
        "trainer-send": Seam("harness.trainer.link:Link.send", SHORT_S),
        "trainer-hear": Seam("harness.trainer.link:Link._on_message", SHORT_S),
        "trainer-granted": Seam("harness.trainer.link:Link.granted", SHORT_S),
        "trainer-seal": Seam("harness.ipc.slots:Slot.seal", SHORT_S),
        "trainer-restore": Seam("harness.trainer.link:Link.wait_ready", LONG_S),
        "trainer-part": Seam("harness.trainer.link:Link.part", LONG_S),
        "trainer-replace": Seam("harness.trainer.link:Link._replace", LONG_S),
    }
)

NODE: Mapping[str, Seam] = MappingProxyType(
    {
        "resume-said": Seam("harness.agent.log:Log.line", LONG_S, after=True),
        "resume-ended": Seam("harness.node.supervisor:Supervisor._goes_on", LONG_S),
        "resume-act": Seam("harness.node.actions:Actions._do", LONG_S),
        "resume-look": Seam("harness.node.fleet_reporter:FleetReporter.tick", SHORT_S),
    }
)

SEAMS: Mapping[str, Seam] = MappingProxyType({**AGENT, **TRAINER, **NODE})


def wanted(text: str) -> dict[str, float]:
    """Read `seam=SECONDS,…`; ValueError for a seam that there is not."""
    told = {name: float(seconds) for name, _, seconds in (word.partition("=") for word in text.split(",") if word)}
    if unknown := told.keys() - SEAMS.keys():
        raise ValueError(f"no such seam: {', '.join(sorted(unknown))}")
    return told


def install(seams: Mapping[str, Seam]) -> None:
    """Put the delays that the environment asks for into this process, where they are among `seams`."""
    for name, seconds in wanted(os.environ.get(VARIABLE, "")).items():
        if name in seams:
            _delay(seams[name]._replace(seconds=seconds))


def _delay(seam: Seam) -> None:
    module, _, path = seam.place.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = path.split(".")
    for holder in holders:
        owner = getattr(owner, holder)
    real = getattr(owner, name)

    @functools.wraps(real)
    def later(*args: Any, **options: Any) -> Any:
        if not seam.after:
            threading.Event().wait(seam.seconds)
        result = real(*args, **options)
        if seam.after:
            threading.Event().wait(seam.seconds)
        return result

    setattr(owner, name, later)
