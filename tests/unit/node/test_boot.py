"""What an agent is told about its node: one variable, which holds the event that it emits."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core.events import NODE_VARIABLE, NodeBooted, decode_node
from harness.node.boot import describe_node
from tests.support.node import INSTANCE


def told(path: Path | None) -> NodeBooted:
    environ = {} if path is None else {"HARNESS_BOOT": str(path)}
    found = decode_node(describe_node(INSTANCE, environ)[NODE_VARIABLE])
    assert found is not None
    return found


def test_an_agent_is_told_which_instance_it_is_on_and_where_its_boot_went(tmp_path: Path) -> None:
    path = tmp_path / "boot.json"
    path.write_text('{"boot_id": "x", "booted_at": 1793000000, "parts_s": {"system": 31.5, "environment": 12}}\n')

    found = told(path)

    assert (found.instance, found.instance_type, found.zone, found.spot) == (
        INSTANCE.id, "g6e.xlarge", "us-east-1a", True,
    )  # fmt: skip
    assert found.booted_at == "2026-10-26T07:33:20+00:00"
    assert found.parts_s == {"system": 31.5, "environment": 12.0}


@pytest.mark.parametrize(
    "text", [None, "", "{}", "[]", '{"booted_at": "soon", "parts_s": {}}', '{"booted_at": 1, "parts_s": 2}']
)
def test_a_node_that_another_program_has_prepared_has_no_measurements(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "boot.json"
    if text is not None:
        path.write_text(text)

    found = told(path)

    assert (found.instance, found.booted_at, found.parts_s) == (INSTANCE.id, None, {})
    assert told(None).parts_s == {}


def test_elsewhere_there_is_nothing_to_tell() -> None:
    assert describe_node(None, {}) == {}


@pytest.mark.parametrize("text", ["", "{}", "i-1", '{"event": "Heartbeat"}'])
def test_what_is_no_description_is_left_alone(text: str) -> None:
    assert decode_node(text) is None
