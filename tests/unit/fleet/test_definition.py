"""A fleet's variables: what is given once is remembered, and a wrong name is refused before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.fleet.definition import Definition, Variables
from harness.fleet.terraform import find_module


@pytest.fixture(scope="module")
def variables() -> Variables:
    return Variables(find_module()[0] / "aws")


def test_text_is_text_and_everything_else_is_json(variables: Variables) -> None:
    given = variables.parse(
        [
            "command=python train.py --x=1",
            "gpu_memory_gb=48",
            'env={"A": "b"}',
            "enable_drill=true",
            "ami_id=null",
            "tags={}",
        ]
    )

    assert given == {
        "command": "python train.py --x=1", "gpu_memory_gb": 48, "env": {"A": "b"}, "enable_drill": True,
        "ami_id": None, "tags": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("assignment", "why"),
    [
        ("gpu_memory=48", "there is no variable 'gpu_memory'. There are allocation_strategy, ami_id"),
        ("gpu_memory_gb", "NAME=VALUE is expected"),
        ("gpu_memory_gb=large", "gpu_memory_gb is a number, in JSON"),
        ("env=A=b", r"env is a map\(string\), in JSON"),
    ],
)
def test_what_is_no_variable_is_refused(variables: Variables, assignment: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        variables.parse([assignment])


def test_nothing_is_forgotten_that_is_not_unset() -> None:
    before = Definition({"run": "gpt", "source_archive": "s3://b/a.tar.gz", "gpu_memory_gb": 48, "notify_email": "a@b"})

    after = before.changed({"command": "python b.py"}, ["gpu_memory_gb"])

    assert after.values == {
        "run": "gpt", "source_archive": "s3://b/a.tar.gz", "notify_email": "a@b", "command": "python b.py",
    }  # fmt: skip
    assert after.differences(before) == ['command: default -> "python b.py"', "gpu_memory_gb: 48 -> default"]
    assert Definition.from_json(after.to_json(), "it") == after


@pytest.mark.parametrize("data", [b"", b"[]", b"run = gpt"])
def test_a_file_that_is_no_definition_is_named(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^mine\.json is not"):
        Definition.from_json(data, "mine.json")


def test_every_variable_of_the_module_has_a_type(variables: Variables) -> None:
    named = [
        line.split('"')[1]
        for path in sorted((find_module()[0] / "aws").glob("variables-*.tf"))
        for line in Path(path).read_text().splitlines()
        if line.startswith("variable ")
    ]
    variables.check(named)
    assert len(named) > 40
