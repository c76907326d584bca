"""The documents say what the code does: every name that a user meets is in them, and every link leads somewhere."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import harness
from harness.cli import app
from harness.config.settings import Settings
from harness.core import events, tree
from harness.errors import ExitCode

ROOT = Path(__file__).parents[2]
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TESTED = re.compile(r"tests/[\w/]+\.py")


def text(name: str) -> str:
    return (ROOT / name).read_text()


def section(document: str, heading: str) -> str:
    """From a heading to the next of the same rank."""
    level = heading.split(" ")[0]
    _, found, rest = document.partition(f"\n{heading}\n")
    assert found, f"no section {heading!r}"
    return re.split(rf"\n{level} ", rest)[0]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command's words, and its options."""
    waiting: list[tuple[tuple[str, ...], typing.Any]] = [((), typer.main.get_command(app.app))]
    while waiting:
        words, command = waiting.pop()
        inner = getattr(command, "commands", {})
        waiting += [((*words, name), child) for name, child in inner.items()]
        if words and not inner:
            yield " ".join(words), [flag for param in command.params for flag in param.opts if flag.startswith("--")]


COMMANDS = dict(commands())


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_is_in_operations(command: str) -> None:
    top, _, rest = command.partition(" ")
    told = section(text("docs/operations.md"), f"### harness {top}")
    assert not rest or re.search(rf"`{rest}\b", told)
    missing = [flag for flag in COMMANDS[command] if flag not in ("--help",) and f"`{flag}`" not in told]
    assert not missing


@pytest.mark.parametrize("command", sorted({command.split(" ")[0] for command in COMMANDS}))
def test_every_command_has_an_example_in_operations(command: str) -> None:
    assert f"\n```\nharness {command}" in section(text("docs/operations.md"), f"### harness {command}")


def test_every_setting_and_no_other_is_in_operations() -> None:
    table = section(text("docs/operations.md"), "## Settings")
    told = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(told) == sorted(field.name for field in dataclasses.fields(Settings))


def test_the_defaults_in_operations_are_the_defaults() -> None:
    table = section(text("docs/operations.md"), "## Settings")
    for field in dataclasses.fields(Settings):
        if isinstance(field.default, (int, float)) and not isinstance(field.default, bool):
            assert f"| `{field.name}` | {field.default:g} |" in table


def test_every_event_and_no_other_is_in_the_journal_s_section() -> None:
    table = section(text("docs/operations.md"), "## The journal")
    told = set(re.findall(r"`([A-Z]\w+)`", table))
    assert told == {kind.__name__ for kind in typing.get_args(events.AnyEvent)}


@pytest.mark.parametrize("page", ["README.md", "docs/operations.md"])
def test_every_exit_code_is_told(page: str) -> None:
    told = set(re.findall(r"^\| (\d+) \|", text(page), re.MULTILINE))
    assert told == {str(code.value) for code in ExitCode}


def test_every_tag_of_small_state_and_no_other_is_in_the_format() -> None:
    told = re.findall(r'^\| `\{"\$": "(\w+)"', text("docs/format.md"), re.MULTILINE)
    assert sorted(told) == sorted(tree._DECODERS)


def test_every_module_has_its_line_in_the_architecture() -> None:
    modules = [path.relative_to(ROOT) for package in ("harness", "cloud") for path in (ROOT / package).rglob("*.py")]
    drawn = [path for path in drawn_paths() if "__" not in path]
    assert drawn == sorted(str(path) for path in modules if "__" not in path.name)


def drawn_paths() -> list[str]:
    """The files in the tree of the architecture page, each by its indentation."""
    tree = next(block for block in text("docs/architecture.md").split("```") if block.startswith("\nharness/\n"))
    paths, folders = [], []
    for indent, name in re.findall(r"^( *)([\w/]+(?:\.py)?)", tree, re.MULTILINE):
        del folders[len(indent) // 2 :]
        if name.endswith("/"):
            folders.append(name)
        else:
            paths.append("".join(folders) + name)
    return sorted(paths)


@pytest.mark.parametrize("package", ["harness", "cloud"])
def test_every_file_that_a_module_names_is_there(package: str) -> None:
    for module in (ROOT / package).rglob("*.py"):
        for named in re.findall(r"`([\w/]+\.py)`", module.read_text()):
            places = [module.parent, *module.parent.parents]
            assert any((place / named).is_file() for place in places), f"{module.relative_to(ROOT)} names {named}"


def test_every_python_block_of_the_readme_compiles_and_names_what_exists() -> None:
    from harness import Checkpointer

    blocks = code_blocks(ROOT / "README.md", "python")
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "harness":
                assert all(alias.name in harness.__all__ for alias in node.names)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ckpt":
                public = node.attr in vars(Checkpointer) or node.attr in Checkpointer.__init__.__code__.co_names
                assert public, f"ckpt.{node.attr}"


def test_the_python_blocks_of_the_readme_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate
    import torch

    monkeypatch.setenv("HARNESS", "off")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[str] = []
    names = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "loader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4))),
        "train_one_step": lambda *batch: (seen.append("step"), optimizer.step()),
        "evaluate": lambda: seen.append("evaluation"),
        "draw_batch": lambda: None,
        "args": None,
        "data": None,
        "HarnessCallback": lambda: seen.append("callback"),
        "Trainer": lambda **options: options["callbacks"],
        "accelerator": accelerate.Accelerator(cpu=True),
    }
    names["accelerator"].prepare(torch.nn.Linear(1, 1))
    for block in code_blocks(ROOT / "README.md", "python"):
        exec(compile(block.replace("20_000", "20"), "README.md", "exec"), names)

    assert (seen.count("step"), seen.count("evaluation"), seen.count("callback")) == (10 * 4 + 20 + 10 * 4, 10, 2)


def test_every_flag_of_the_readme_is_one_of_harness_run() -> None:
    lines = [line for line in text("README.md").splitlines() if line.strip().startswith("harness run")]
    assert lines
    for line in lines:
        ours = line.partition(" -- ")[0]
        assert set(re.findall(r"--[a-z-]+", ours)) <= set(COMMANDS["run"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    assert [name for name in TESTED.findall(page.read_text()) if not (ROOT / name).is_file()] == []


def test_every_decision_is_numbered_in_turn_and_has_its_three_parts() -> None:
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert [path.name[:4] for path in decisions] == [f"{number:04d}" for number in range(1, len(decisions) + 1)]
    for path in decisions:
        headings = re.findall(r"^## (.*)$", path.read_text(), re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences"], path.name
