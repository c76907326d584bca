"""Where a fleet is found: by what is given, by this machine, by its group, by the name of its bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from cloud.aws.console import Console, Group
from cloud.notice import Deadline
from cloud.testing.memory import MemoryStore
from harness.errors import ConfigError
from harness.fleet import home as module
from harness.fleet.definition import Definition
from harness.fleet.home import Home, find

REGION = "eu-west-1"
GPT = Definition({"run": "gpt", "command": "python train.py"})


class PlayedConsole:
    """AWS with these groups and buckets."""

    def __init__(self, groups: dict[str, str] | None = None, buckets: tuple[str, ...] = ()) -> None:
        self._groups, self._buckets = groups or {}, buckets

    def groups(self, deadline: Deadline, name: str) -> list[Group]:
        store = self._groups.get(name)
        return [] if store is None else [Group(name, 1, (), {"harness-store": store})]

    def buckets(self, prefix: str, deadline: Deadline) -> list[str]:
        return [name for name in self._buckets if name.startswith(prefix)]


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, MemoryStore]:
    """Every bucket's folder of fleets, by its address."""
    opened: dict[str, MemoryStore] = {}
    monkeypatch.setattr(module, "open_existing_store", lambda address: opened.setdefault(address, MemoryStore()))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return opened


def found(console: PlayedConsole, bucket: str | None = None, run: str = "gpt") -> Home:
    return find(run, REGION, bucket, cast("Console", console))


@pytest.mark.usefixtures("stores")
def test_the_group_s_tags_lead_to_the_bucket_and_this_machine_remembers_it() -> None:
    first = found(PlayedConsole({"harness-gpt": "s3://mine/checkpoints"}))
    second = found(PlayedConsole())

    assert (first.bucket, second.bucket) == ("mine", "mine")
    assert found(PlayedConsole(), "other").bucket == "other", "what is given comes first"
    assert found(PlayedConsole(), run="gpt2").bucket is None


def test_a_bucket_that_outlives_its_fleet_is_found_by_its_name(stores: dict[str, MemoryStore]) -> None:
    console = PlayedConsole(buckets=("harness-gpt-2026a", "harness-gpt-large-2026b", "harness-gpt-2026c"))
    Home.of("gpt", REGION).in_bucket("harness-gpt-2026c").save(GPT)
    (Home.of("gpt", REGION).folder / "home.json").unlink()

    home = found(console)

    assert home.bucket == "harness-gpt-2026c"
    assert home.load() == GPT


def test_two_buckets_of_one_run_are_not_guessed_between(stores: dict[str, MemoryStore]) -> None:
    names = ("harness-gpt-1", "harness-gpt-2")
    for name in names:
        Home.of("gpt", REGION).in_bucket(name).save(GPT)
    (Home.of("gpt", REGION).folder / "home.json").unlink()

    with pytest.raises(ConfigError, match=r"harness-gpt-1, harness-gpt-2\. Name one with --bucket"):
        found(PlayedConsole(buckets=names))


def test_code_is_kept_beside_all_earlier_code(stores: dict[str, MemoryStore], tmp_path: Path) -> None:
    home = Home.of("gpt", REGION).in_bucket("mine")
    addresses = []
    for text in ("first", "second", "first"):
        (tmp_path / "a.tar.gz").write_text(text)
        addresses.append(home.upload(tmp_path / "a.tar.gz", f"digest-of-{text}"))

    assert addresses == [
        f"s3://mine/sources/gpt/packed/digest-of-{text}.tar.gz" for text in ("first", "second", "first")
    ]
    listed: list[Any] = list(stores["s3://mine/sources/gpt"].list("", deadline=Deadline.never()))
    assert len(listed) == 2


@pytest.mark.parametrize(
    ("run", "prefix"),
    [("gpt", "harness-gpt-"), ("GPT_small", "harness-gpt-small-"), ("a" * 40, "harness-" + "a" * 28 + "-")],
)
def test_a_bucket_s_name_begins_as_the_module_has_it_begin(run: str, prefix: str) -> None:
    """terraform/aws/bucket.tf: name_prefix."""
    assert module._bucket_prefix(run) == prefix
