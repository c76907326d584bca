"""Adapters: a table of the user's is read, and what is wrong in it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.watch.adapter import built_in, named

DOCS = Path(__file__).parents[3] / "docs" / "watch.md"
GOOD = 'title = "t"\nsource = "s"\n[checkpoint]\ndirectory = "step-{step}"\n[resume]\nhow = "by itself"\n'


def write(root: Path, text: str) -> str:
    (root / "mine.toml").write_text(text)
    return str(root / "mine.toml")


def test_a_table_of_the_user_s_has_the_name_of_its_file(tmp_path: Path) -> None:
    adapter = named(write(tmp_path, GOOD))
    assert (adapter.name, adapter.checkpoint.directory) == ("mine", "step-{step}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "title"),
        ("title = ", "mine"),
        (GOOD.replace("{step}", "{stp}"), "{stp}"),
        (GOOD + 'arguments = "x"\n', "arguments"),
        (GOOD.replace('directory = "step-{step}"', ""), "either a directory or files"),
        (GOOD.replace("[resume]", 'files = ["a"]\n[resume]'), "either a directory or files"),
        (GOOD + '[save]\nsignal = "SIGFOO"\n', "SIGFOO"),
        (GOOD + "[complete]\nquiet_s = 10\n", "by_name"),
        (GOOD + '[complete]\nhas = ["{what}"]\n', "{what}"),
        (GOOD + '[[pointers]]\npath = "latest"\nsays = "{id}"\n', "{id}"),
        ("\xff", "mine"),
    ],
)
def test_what_is_wrong_in_a_table_is_said(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        named(write(tmp_path, text))
    assert words in str(caught.value)
    assert "mine" in str(caught.value)


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        named(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="transformers"):
        named("none")


def test_the_docs_have_a_row_for_each_table() -> None:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in DOCS.read_text().splitlines() if "|" in line]
    there = {row[0].strip("| `").partition("`")[0]: row for row in rows if len(row) == 3}
    for name, adapter in built_in().items():
        assert there[name][1] == adapter.title
        assert there[name][2].strip(" |") == adapter.resume.how
        assert ("(by name)" in there[name][0]) is adapter.by_name
