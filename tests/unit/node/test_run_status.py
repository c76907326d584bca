"""What came of a run that was found here, read off its store; and how often a fleet is looked for."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cloud.aws.metadata import MetadataSession
from cloud.store import ObjectStore
from harness.core.manifest import FORMAT, Claim
from harness.core.snapshot import SnapshotId
from harness.ipc.runtime_dir import RuntimeDir
from harness.node import main
from harness.node.exit_policy import Where
from harness.node.job import Job, Request, resolve_job
from harness.node.platform import Platform
from harness.node.run_status import RunStatus
from harness.snapshots import commit
from harness.snapshots.open import open_store
from tests.support.clock import FakeClock
from tests.support.node import INSTANCE, FakeSignals
from tests.support.process import Process
from tests.support.protocol import FOREVER, KEYS, RUN_ID, Content


@pytest.fixture
def job(tmp_path: Path) -> Job:
    environ = {"HARNESS_STORE": str(tmp_path / "store"), "HARNESS_RUNTIME_DIR": str(tmp_path / "runtime")}
    return resolve_job(Request({"run": "run"}, ("true",), None, environ, tmp_path), lambda key: None)


@pytest.fixture
def store(job: Job) -> ObjectStore:
    return open_store(job.settings.store)


def claim(store: ObjectStore, generation: int, outcome: str | None, lock_id: str = "") -> None:
    made = Claim(format=FORMAT, run_id=RUN_ID, generation=generation, nonce="a" * 16, claimed_at="", host="h",
                 pid=1, fresh=False, parent=None, command=(), named=True, lock_id=lock_id)  # fmt: skip
    commit.claim(store, KEYS, made, FOREVER)
    if outcome is not None:
        commit.end(store, KEYS, generation, "a" * 16, outcome, 20, FOREVER)


def here(job: Job) -> str:
    settings = job.settings
    platform = RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run)
    platform.prepare()
    lock = platform.try_lock()
    assert lock is not None
    try:
        return platform.identity(lock)
    finally:
        os.close(lock)


def outcome(job: Job, generation: int | None, seen: int | None = None) -> int | None:
    return RunStatus(job, lambda: seen)._outcome(generation)


@pytest.mark.parametrize(
    ("recorded", "code"),
    [("finished", 0), ("stopped early", 0), ("interrupted", 75), ("superseded", 73), ("failed", None), (None, None)],
)
def test_the_recorded_outcome_of_what_was_found_counts(
    job: Job, store: ObjectStore, recorded: str | None, code: int | None
) -> None:
    claim(store, 3, recorded)

    assert outcome(job, 3) == code


def test_where_nobody_answered_the_generation_that_was_seen_before_counts(job: Job, store: ObjectStore) -> None:
    claim(store, 3, "interrupted")

    assert outcome(job, None, seen=3) == 75
    assert outcome(job, None) is None


def test_a_newer_start_on_another_host_has_superseded_what_was_found(job: Job, store: ObjectStore) -> None:
    claim(store, 3, None, here(job))
    claim(store, 4, None, "another host's lock")

    assert outcome(job, 3) == 73


def test_a_restart_in_place_is_no_other_host(job: Job, store: ObjectStore) -> None:
    claim(store, 3, "failed", here(job))
    claim(store, 4, "interrupted", here(job))

    assert outcome(job, 3) == 75


def test_an_end_before_the_one_that_was_found_says_nothing_of_it(job: Job, store: ObjectStore) -> None:
    claim(store, 2, "interrupted")

    assert outcome(job, 3) is None


def test_a_store_that_cannot_be_read_says_nothing(job: Job, store: ObjectStore) -> None:
    claim(store, 3, "finished")
    (Path(job.settings.store) / KEYS.claim(3)).write_bytes(b"{")
    runs = RunStatus(job, lambda: None)

    assert (runs._outcome(3), runs.durable_step(), runs.over()) == (None, None, False)


def test_progress_is_the_newest_step_in_the_store(job: Job, store: ObjectStore) -> None:
    runs = RunStatus(job, lambda: None)
    assert runs.durable_step() is None

    commit.publish(store, KEYS, Content(SnapshotId(1, 20)).staged(), "remote", FOREVER, lambda event: None)
    assert runs.durable_step() == 20


def test_nothing_is_found_where_nobody_trains(job: Job) -> None:
    assert RunStatus(job, lambda: None).find() is None


SLEEPER = "import signal, sys; print('up', file=sys.stderr, flush=True); signal.pause()"


@pytest.mark.parametrize("watch", ["out", None])
def test_a_watched_program_without_an_agent_is_an_orphan_and_no_run(
    watch: str | None, job: Job, tmp_path: Path
) -> None:
    settings = dataclasses.replace(job.settings, watch=watch)
    runs = RunStatus(dataclasses.replace(job, settings=settings), lambda: None)
    socket = RuntimeDir.of(Path(settings.runtime_dir), settings.store_identity, settings.run).socket
    process = Process([sys.executable, "-c", SLEEPER], cwd=tmp_path, env={"HARNESS_SOCKET": str(socket)})
    process.wait_for("up")
    try:
        assert runs.orphans() == ([] if watch is None else [process.pid])
        assert runs.find() is None
    finally:
        runs.send([process.pid], signal.SIGKILL)
        process.reap()


# ---- just after a boot ----------------------------------------------------------------------------------------------


def look(monkeypatch: pytest.MonkeyPatch, places: list[Platform], environ: dict[str, str]) -> tuple[Platform, float]:
    clock = FakeClock()
    signals: Any = FakeSignals(clock)
    monkeypatch.setattr(main, "find_platform", lambda *given: places.pop(0))
    metadata = MetadataSession("http://nobody.invalid")
    began = clock()
    return main._patiently(metadata, INSTANCE, environ, "a", signals, print), clock() - began


def test_a_named_fleet_is_looked_for_again_and_then_trained_without(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere, fleet = Platform(Where.ELSEWHERE, "no credentials"), Platform(Where.FLEET, "g")
    named = {"HARNESS_GROUP": "g"}

    assert look(monkeypatch, [nowhere, nowhere, fleet], named) == (fleet, 8.0)
    assert look(monkeypatch, [nowhere] * 16, named) == (nowhere, 60.0)
    assert look(monkeypatch, [nowhere], {}) == (nowhere, 0.0)


def test_a_metadata_service_that_hangs_at_the_boot_makes_no_laptop_of_a_fleet_s_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would train, and then stand idle for ever."""
    signals: Any = FakeSignals(FakeClock())
    instances = [None, INSTANCE]
    monkeypatch.setattr(main, "find_instance", lambda *given: instances.pop(0))
    monkeypatch.setattr(
        main,
        "find_platform",
        lambda metadata, instance, *given: Platform(Where.FLEET if instance else Where.ELSEWHERE, ""),
    )
    metadata = MetadataSession("http://nobody.invalid")

    assert main._patiently(metadata, None, {"HARNESS_GROUP": "g"}, "a", signals, print).where is Where.FLEET
