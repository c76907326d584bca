from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloud.directory.store import DirectoryStore
from harness.config.settings import Settings
from harness.core import events
from harness.errors import ConfigError
from harness.inspect import status as module
from harness.inspect.status import status
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.protocol import FOREVER, KEYS
from tests.support.two_snapshots import SECOND


def journal(settings: Settings, *bodies: events.Event) -> None:
    lines = [events.Line(at="t", mono=1.0, generation=1, body=body) for body in bodies]
    data = b"a foreign line\n" + b"".join(events.encode_line(line) for line in lines)
    open_store(settings.store).put_if_absent(KEYS.journal(1, "host", 0), data, deadline=FOREVER)


def test_the_status_of_a_run_without_an_agent_comes_from_its_store(settings: Settings, store: Path) -> None:
    journal(
        settings,
        events.Sealed(step=30, bytes=1, stall_s=0.1),
        events.Published(tier="local", snapshot=str(SECOND), step=20, bytes=1, seconds=0.1),
        events.Heartbeat(),
    )
    open_store(settings.store)
    found = status(settings)

    assert found == {
        "run": "run",
        "store": settings.store,
        "state": "not running here",
        "generation": 1,
        "step": 30,
        "local_step": 20,
        "durable_step": 20,
        "latest": str(SECOND),
        "snapshots": 2,
        "quarantined": 0,
        "restart": None,
        "ended_at": None,
    }


def test_the_status_of_an_ended_run_is_its_outcome(settings: Settings, store: Path) -> None:
    commit.end(open_store(settings.store), KEYS, 1, "a" * 16, "finished", 20, FOREVER)

    assert status(settings)["state"] == "finished"


def test_the_status_of_a_run_that_never_was_is_an_error(settings: Settings) -> None:
    open_store(settings.store)
    with pytest.raises(ConfigError, match="no run 'run' in"):
        status(settings)


@pytest.mark.usefixtures("frozen")
def test_the_status_of_a_run_whose_agent_is_frozen_comes_from_its_store_and_says_so(
    settings: Settings, store: Path
) -> None:
    """It waited for an answer, for as long as the agent was stopped."""
    found = status(settings)

    assert found["state"] == "does not answer here"
    assert found["durable_step"] == 20


def test_the_status_of_a_long_run_reads_both_ends_of_its_journal(settings: Settings, store: Path) -> None:
    """What a start took is told once, at the beginning; how far it is, at the end."""
    remote = open_store(settings.store)
    for number in range(200):
        at = events.Line(at="t", mono=1.0, generation=1, body=events.Heartbeat(step=number, durable_step=20))
        remote.put_if_absent(KEYS.journal(1, "host", number), events.encode_line(at), deadline=FOREVER)
    read = list[str]()

    class Watched(DirectoryStore):
        def read(self, key: str, **options: Any) -> bytes:
            read.append(key)
            return super().read(key, **options)

    report_of = module.fold(module._read_ends(Watched(Path(settings.store)), KEYS, 1))

    assert report_of["step"] == 199
    assert len(read) == 64
    assert {KEYS.journal(1, "host", number) for number in (0, 47, 184, 199)} <= set(read)


def test_asking_about_a_store_that_is_not_there_makes_none(settings: Settings) -> None:
    with pytest.raises(ConfigError):
        status(settings)

    assert not Path(settings.store).exists()


def test_the_last_restart_of_a_run_without_an_agent_is_told_by_its_journal(settings: Settings, store: Path) -> None:
    told = events.Restarted(
        step=13, snapshot=None, tier=None, total_s=6.7, detect_s=None, start_s=5.5, wait_s=0.1, first_step_s=1.1,
        fetching_s=4.3,
    )  # fmt: skip
    journal(settings, told, events.Heartbeat())

    assert status(settings)["restart"] == told.fields()
