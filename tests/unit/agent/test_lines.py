"""What a run prints: which events are worth a line, in both formats."""

from __future__ import annotations

import os
import pty
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.agent.lines import Logfmt, Sentences, lines_of
from harness.agent.log import Log
from harness.config.settings import Settings
from harness.core import events

SNAPSHOT = "00000002-000000001200"
SEALED = events.Sealed(step=1200, bytes=1_500_000_000, stall_s=0.3)


def published(tier: str, seconds: float = 4.0) -> events.Published:
    return events.Published(tier=tier, snapshot=SNAPSHOT, step=1200, bytes=1_500_000_000, seconds=seconds)


def line(event: events.Event) -> events.Line:
    return events.Line(at="", mono=0.0, generation=7, body=event)


def told(*happened: events.Event, store: str = "s3://bucket/x", coloured: bool = False) -> list[str]:
    """What a person reads of it."""
    written: list[str] = []
    sentences = Sentences(store, written.append, coloured=coloured)
    for event in happened:
        sentences(line(event))
    assert all(text.startswith("harness: ") for text in written)
    return [text.removeprefix("harness: ") for text in written]


def test_a_snapshot_is_one_sentence_once_it_is_durable() -> None:
    assert told(SEALED, published("remote")) == ["saved step 1 200 (1.5 GB) in 0.3 s; durable in S3 4.0 s later"]
    assert told(SEALED, published("remote"), store="/mnt/checkpoints")[0].endswith("durable in the store 4.0 s later")


def test_with_a_local_tier_a_snapshot_is_two_sentences_and_only_one_says_durable() -> None:
    assert told(SEALED, published("local", 1.0), published("remote")) == [
        "saved step 1 200 (1.5 GB) in 0.3 s; on the local disk 1.0 s later",
        "step 1 200 is durable in S3, 4.0 s after it was saved",
    ]


def test_snapshots_that_no_tier_stored_are_not_remembered_for_ever() -> None:
    sentences = Sentences("s3://bucket/x", lambda text: None)
    for step in range(1000):
        sentences(line(events.Sealed(step=step, bytes=1, stall_s=0.1)))

    assert len(sentences._stalls) <= 16


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (events.Located(snapshot=SNAPSHOT, tier="remote"), "resuming from step 1 200, found in S3"),
        (events.Located(snapshot=SNAPSHOT, tier="memory"), "resuming from step 1 200, found in memory"),
        (events.NothingToResume(reason="--fresh"), "starting at step 0: --fresh"),
        (
            events.SaveFailed(tier="remote", step=1200, reason="timed out", retry_in_s=4.0),
            "step 1 200 is not saved in S3 yet, trying again in 4.0 s: timed out",
        ),
        (
            events.NoticeSeen(kind="interrupt", source="ec2 spot", in_s=118.2),
            "notice (ec2 spot): this run has to stop here within 118 s",
        ),
        (
            events.NoticeSeen(kind="rebalance", source="ec2 rebalance", in_s=None),
            "ec2 rebalance: this instance is at risk; making a snapshot durable",
        ),
        (events.TrainerLeft(code=1, step=12), "the program has ended with exit code 1"),
        (events.Restarting(in_s=1.0, crashes=1), "starting the program again in 1.0 s (crash 1 without progress)"),
        (
            events.Ended(outcome="finished", exit_code=0, local_step=None, durable_step=1200),
            "finished: step 1 200 is durable in S3",
        ),
        (
            events.Ended(outcome="interrupted", exit_code=75, local_step=1200, durable_step=1200),
            "interrupted: step 1 200 is durable in S3; the same command continues the run, here or elsewhere",
        ),
        (
            events.Ended(outcome="interrupted", exit_code=74, local_step=1200, durable_step=900),
            "interrupted: step 1 200 is on this machine alone, step 900 is durable in S3; the same command continues "
            "the run, without loss only here",
        ),
        (
            events.Ended(outcome="interrupted", exit_code=74, local_step=None, durable_step=900),
            "interrupted: step 900 is durable in S3, later ones are lost; the same command continues the run",
        ),
        (
            events.Ended(outcome="interrupted", exit_code=74, local_step=None, durable_step=None),
            "interrupted: nothing was saved; the same command starts the run again",
        ),
        (
            events.Ended(outcome="failed", exit_code=1, local_step=None, durable_step=None),
            "failed with exit code 1; nothing is durable",
        ),
        (
            events.Ended(outcome="stopped", exit_code=130, local_step=None, durable_step=1200),
            "stopped: step 1 200 is durable in S3; the same command continues the run",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, events.Event) else "",
)
def test_what_matters_is_a_sentence(event: events.Event, words: str) -> None:
    assert told(event) == [words]


def samples() -> Iterator[events.Event]:
    """Each kind of event, with something in each of its fields."""
    for kind in events.Event.__subclasses__():
        values: dict[str, object] = {}
        for name, hint in typing.get_type_hints(kind).items():
            plain = next((arm for arm in typing.get_args(hint) if arm is not type(None)), hint)
            value = {int: 3, float: 1.5, str: "some words", bool: True}[plain]
            values[name] = (value,) if typing.get_origin(hint) is tuple else value
        given = {"tier": "remote", "snapshot": SNAPSHOT, "outcome": "failed"}
        yield kind(**values | {name: value for name, value in given.items() if name in values})


@pytest.mark.parametrize("event", list(samples()), ids=lambda event: type(event).__name__)
def test_no_event_is_more_than_one_line_or_names_of_fields(event: events.Event) -> None:
    written = told(event)

    assert len(written) <= 1
    assert all("\n" not in text and "=" not in text and type(event).__name__ not in text for text in written)


def test_routine_is_no_news() -> None:
    routine = [
        events.Heartbeat(step=1), events.Due(reason="every_s"), SEALED, events.Verified(tier="remote", snapshot="x"),
        events.Retired(tier="remote", snapshot="x"), events.TrainerStarted(pid=1, restarts=0),
        events.TrainerConnected(pid=1, rank=0), events.FirstStep(step=1, seconds=1.0),
        events.Claimed(generation=1, run_id="x"), events.TrainerLeft(code=0, step=3),
    ]  # fmt: skip

    assert told(*routine) == []


def test_off_ec2_a_metadata_service_that_is_not_there_is_no_warning() -> None:
    written: list[str] = []
    Sentences("/store", written.append, coloured=True)(
        line(events.SourceBlind(source="ec2", reason="timed out", expected=False))
    )

    assert written == ["harness: this seems to be no EC2 instance: notices come by SIGTERM or by a drain file here"]


def test_only_what_matters_has_a_colour() -> None:
    ended = events.Ended(outcome="failed", exit_code=1, local_step=None, durable_step=None)

    assert told(SEALED, published("remote"), coloured=True)[0].startswith("saved step")
    assert told(ended, coloured=True) == ["\x1b[1;31mfailed with exit code 1; nothing is durable\x1b[0m"]


def test_what_others_wrote_moves_no_cursor() -> None:
    (text,) = told(events.UpkeepFailed(tier="remote", reason="gone\x1b[2J\naway"), coloured=True)

    assert r"gone\x1b[2J away" in text


def test_a_line_for_machines_names_run_generation_and_event() -> None:
    written: list[str] = []
    lines = Logfmt("run", written.append)
    lines(line(events.Heartbeat(step=1)))
    lines(line(events.Sealed(step=12, bytes=100, stall_s=0.25)))

    assert written == ["harness: run g7 Sealed step=12 bytes=100 stall_s=0.250"]


@pytest.mark.parametrize(
    ("log_format", "on_terminal", "environ", "kind"),
    [
        (None, True, {}, Sentences),
        (None, False, {}, Logfmt),
        ("text", False, {}, Sentences),
        ("logfmt", True, {}, Logfmt),
    ],
)
def test_a_terminal_gets_sentences_unless_the_format_is_set(
    log_format: str | None, on_terminal: bool, environ: dict[str, str], kind: type
) -> None:
    settings = Settings(store="/store", run="run", log_format=log_format)
    master, slave = pty.openpty()
    read, write = os.pipe()
    try:
        assert isinstance(lines_of(settings, Log(slave if on_terminal else write), environ), kind)
    finally:
        for fd in (master, slave, read, write):
            os.close(fd)


@pytest.mark.parametrize(("environ", "coloured"), [({}, True), ({"NO_COLOR": ""}, False), ({"TERM": "dumb"}, False)])
def test_no_colour_where_none_is_wanted(environ: dict[str, str], coloured: bool) -> None:
    master, slave = pty.openpty()
    try:
        lines = lines_of(Settings(store="/store", run="run"), Log(slave), environ)
        assert isinstance(lines, Sentences)
        assert lines._coloured is coloured
    finally:
        os.close(master)
        os.close(slave)


def test_a_format_that_there_is_not_is_refused(tmp_path: Path) -> None:
    from harness.errors import ConfigError

    with pytest.raises(ConfigError, match="text or logfmt"):
        Settings(store=str(tmp_path), run="run", log_format="json")
