from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

import harness
from harness.core import events
from harness.core.events import AnyEvent, Line, decode_line, describe, encode_line

KINDS = typing.get_args(AnyEvent)
SAMPLES: dict[type, object] = {int: 3, float: 1.5, str: "some words", bool: True}


def sample(kind: type[events.Event]) -> events.Event:
    """One event with every field filled in."""
    values = {}
    for name, hint in typing.get_type_hints(kind).items():
        if typing.get_origin(hint) is dict:
            values[name] = {"part": 1.5}
            continue
        if typing.get_origin(hint) is tuple:
            values[name] = (1, 2)
            continue
        plain = next((arm for arm in typing.get_args(hint) if arm is not type(None)), hint)
        values[name] = SAMPLES[plain]
    return kind(**values)


def test_the_bytes_of_a_line_are_pinned() -> None:
    body = events.Published(tier="remote", snapshot="00000007-000000012000", step=12000, bytes=4096, seconds=0.25)

    data = encode_line(Line(at="2026-01-02T03:04:05.678+00:00", mono=12.5, generation=7, body=body))

    assert data == (
        b'{"at":"2026-01-02T03:04:05.678+00:00","mono":12.5,"generation":7,"body":{"event":"Published",'
        b'"tier":"remote","snapshot":"00000007-000000012000","step":12000,"bytes":4096,"seconds":0.25}}\n'
    )


def test_a_line_for_people_moves_no_cursor() -> None:
    """A notice and a store's reason are others' words."""
    body = events.UpkeepFailed(tier="remote", reason="gone\x1b[2J\r\naway\u202e")

    assert describe(body) == r'UpkeepFailed tier=remote reason="gone\x1b[2J\r away\u202e"'


def test_a_default_is_not_written() -> None:
    line = Line(at="t", mono=1.0, generation=0, body=events.Heartbeat(step=3))

    assert encode_line(line) == b'{"at":"t","mono":1.0,"generation":0,"body":{"event":"Heartbeat","step":3}}\n'


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_read_back_as_it_was(kind: type[events.Event]) -> None:
    line = Line(at="2026-01-02T03:04:05.678+00:00", mono=12.5, generation=7, body=sample(kind))

    data = encode_line(line)

    assert decode_line(data) == line
    assert data.count(b"\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_one_log_line_that_begins_with_its_name(kind: type[events.Event]) -> None:
    text = describe(sample(kind))

    assert text.split(" ", 1)[0] == kind.__name__
    assert "\n" not in text


def test_a_log_line_leaves_out_what_is_not_known_and_quotes_words() -> None:
    event = events.NoticeSeen(kind="interrupt", source="ec2 spot", in_s=118.2)
    unknown = events.NoticeSeen(kind="interrupt", source="signal", in_s=None)

    assert describe(event) == 'NoticeSeen kind=interrupt source="ec2 spot" in_s=118.200'
    assert describe(unknown) == "NoticeSeen kind=interrupt source=signal"


def test_a_log_line_stays_one_line_whatever_an_error_says() -> None:
    assert "\n" not in describe(events.SaveFailed(tier="remote", step=1, reason="one\ntwo", retry_in_s=None))


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"{}", b"not json", b'{"at":"t","mono":1.0,"generation":1,"body":{"event":"OfTomorrow"}}', b"[" * 100],
)
def test_a_foreign_line_is_an_error_that_a_reader_can_skip(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_line(data)


def test_every_type_is_learnt_when_its_module_is_imported() -> None:
    """msgspec learns a type when it first decodes one, and crashes where two threads have it do so at once."""
    root = Path(harness.__file__).parent
    one_thread = {"trainer/witness.py"}  # read once, before the loop
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"msgspec\.json\.decode\([^)]*type=", path.read_text())
    ]
    assert set(found) == one_thread
