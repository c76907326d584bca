"""Opening: where a program that was started without `harness run` has its store."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.settings import SOCKET_VARIABLE, Settings
from harness.trainer import opening


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Settings]:
    """The settings with which an agent would be started. The program goes from `tmp_path` to `outputs/1` below it."""
    found: list[Settings] = []

    def link(settings: Settings, *_: Any) -> SimpleNamespace:
        found.append(settings)
        return SimpleNamespace(detached=False)

    monkeypatch.setattr(opening, "Link", link)
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    (tmp_path / "outputs" / "1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "outputs" / "1")
    return found


def hydra(cwd: Path, *, initialized: bool) -> SimpleNamespace:
    """What a program that uses Hydra has as `hydra.core.hydra_config`."""
    config = SimpleNamespace(runtime=SimpleNamespace(cwd=str(cwd)))
    return SimpleNamespace(HydraConfig=SimpleNamespace(initialized=lambda: initialized, get=lambda: config))


@pytest.mark.parametrize(("initialized", "store"), [(True, ".harness"), (False, "outputs/1/.harness")])
def test_a_program_under_hydra_has_its_store_where_it_was_started(
    opened: list[Settings], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: str, *, initialized: bool
) -> None:
    """Each start of it has another directory: there it would find nothing to resume."""
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", hydra(tmp_path, initialized=initialized))
    opening.open_link({"run": "a"})
    assert opened[0].store == str(tmp_path / store)


def test_any_other_program_has_it_in_the_current_directory(opened: list[Settings], tmp_path: Path) -> None:
    opening.open_link({"run": "a"})
    assert opened[0].store == str(tmp_path / "outputs" / "1" / ".harness")
