"""Every message survives its bytes, and what is none is refused."""

from __future__ import annotations

import typing

import msgspec
import pytest

from harness.core import messages
from harness.core.events import Drilled, Restarted
from harness.core.messages import GenerationInfo, Hello, Message, RunState, decode, encode

GENERATION = GenerationInfo(3, "a" * 32, "b" * 16, "00000002-000000000010", claimed=True)
RESTARTED = Restarted(
    step=11, snapshot=None, tier=None, total_s=1.0, detect_s=None, start_s=0.3, wait_s=0.0, first_step_s=0.7,
    fetching_s=0.0,
)  # fmt: skip
STATUS = messages.Status(
    run="a", store="/store", local=None, state=RunState.DRAINING, generation=3, run_id="a" * 32, claimed=True, step=12,
    local_step=None, durable_step=10, durable_age_s=1.5, bytes_copied=0, bytes_pending=7, estimate_s=None,
    deadline_s=110.0, finished_step=None, everything_durable=False, restarts=1, restart=RESTARTED,
    unreachable=("ec2",), agent_pid=1, trainer_pid=2,
)  # fmt: skip
EXAMPLES: list[messages.AnyMessage] = [
    Hello(messages.PROTOCOL),
    Hello(messages.PROTOCOL, 1, 2, GENERATION, (0, 3)),
    messages.Attached(),
    messages.Layout(4096, 1),
    messages.Restored("00000002-000000000010", 10, 0.5),
    messages.FirstStep(11, 5.0, ((2.0, 3.0), (3.0, 3.5)), 3.5),
    messages.Sealed(0, 12, 4096, 0.1, 0.2, held=True),
    messages.SaveWanted(),
    messages.SignalReceived(15),
    messages.Training(),
    messages.Finished(100),
    messages.Leaving(),
    messages.Bye(exception=True, hopeless=True),
    messages.Welcome(GENERATION, 1, "{}", True, ("python", "train.py"), 7),
    messages.Refused("why"),
    messages.ResumeHeader("00000002-000000000010", "local", "é{}", GENERATION),
    messages.ResumeReady("00000002-000000000010", "local", True, GENERATION),
    messages.ResumeNone(GENERATION),
    messages.ResumeFailed("SnapshotCorrupt", "why"),
    messages.Slots((0, 1), 2),
    messages.NoSlots("NoSpace", "why"),
    messages.Superseded(),
    messages.Holds((messages.HeldTensor("w", "F32", (2, 3), "shared", (4, 3), (2, 0)),), 1),
    messages.Stores((messages.Rows("w", 0, 2),), ("b",), ("m",), ("w",), 1),
    messages.HoldsWanted(),
    messages.AtEnd(7),
    messages.LeftLoop(),
    messages.Evaluates(7, passed=1),
    messages.ResumeSlots(),
    messages.NoMeeting("StateError", "why"),
    messages.AskStatus(),
    STATUS,
    messages.AskDrill(120.0, end=False),
    messages.Drilling("plan"),
    messages.DrillDone(Drilled(durable_step=1, durable_in_s=None, has_s=120.0, lost_steps=3), "NOT durable"),
    messages.NoDrill("why"),
    messages.Takeover(),
    messages.Busy(4711),
    messages.HandedOver((0,), (GENERATION,)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_bytes(message: messages.AnyMessage) -> None:
    assert decode(encode(message)) == message


def test_there_is_an_example_of_each_and_each_has_a_name_of_its_own() -> None:
    kinds = set(typing.get_args(messages.AnyMessage))
    assert {type(message) for message in EXAMPLES} == kinds == set(Message.__subclasses__())
    assert len({msgspec.inspect.type_info(kind).tag for kind in kinds}) == len(kinds)  # type: ignore[union-attr]


def test_the_bytes_of_what_two_versions_say_to_each_other_are_pinned() -> None:
    """So that a trainer and an agent of two versions are told that they are, whichever of them is the newer one."""
    older = b'{"type": "hello", "protocol": 2, "rank": 0, "world_size": 1, "life": null, "indexes": []}'
    assert decode(older) == Hello(2)
    assert encode(Hello(9)) == b'{"type":"hello","protocol":9,"rank":0,"world_size":1,"generation":null,"indexes":[]}'
    assert encode(messages.Refused("x")) == b'{"type":"refused","message":"x"}'


def test_a_field_of_a_newer_version_is_ignored() -> None:
    assert decode(b'{"type": "finished", "step": 3, "new": [1]}') == messages.Finished(3)


@pytest.mark.parametrize("data", [b"", b"1", b"[]", b"{}", b'{"type": "x"}', b'{"type": "finished", "step": "3"}'])
def test_what_is_no_message_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  whatever msgspec says
        decode(data)


def test_a_status_as_a_document_has_words_for_its_state_and_no_names_of_types() -> None:
    shown = STATUS.fields()
    assert (shown["state"], shown["step"], shown["restart"]["total_s"]) == ("draining", 12, 1.0)
    assert not {"type", "event"} & {*shown, *shown["restart"]}
