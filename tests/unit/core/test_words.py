"""What a terminal and a claim may have of what others wrote."""

from __future__ import annotations

import shlex

import pytest

from harness.core.words import HIDDEN, count, duration, printable, size, without_secrets

HARMFUL = {
    "a colour": "\x1b[31m",
    "a title": "\x1b]0;title\x07",
    "back to the beginning of the line": "\r",
    "one back": "\x08",
    "an escape in one character": "\x9b2J",
    "right to left": "\u202e",
    "half a character": "\ud800",
}


@pytest.mark.parametrize("harm", HARMFUL.values(), ids=HARMFUL)
def test_what_a_terminal_would_obey_is_shown(harm: str) -> None:
    shown = printable(f"before{harm}after")

    assert shown.isprintable()
    assert shown.startswith("before\\")
    assert shown.endswith("after")
    shown.encode()


@pytest.mark.parametrize("text", ["", "two\nlines\tand a tab", "é 数 🙂 \\x1b"])
def test_what_is_harmless_is_as_it_was(text: str) -> None:
    assert printable(text) == text


HIDES = [
    ("--api-key=abc", "--api-key=***"),
    ("--api-key abc --lr 3", "--api-key *** --lr 3"),
    ("--api_key abc", "--api_key ***"),
    ("-password abc", "-password ***"),
    ("--hub_token abc", "--hub_token ***"),
    ("--wandb.api_key=abc", "--wandb.api_key=***"),
    ("wandb.api_key=abc", "wandb.api_key=***"),
    ("WANDB_API_KEY=abc", "WANDB_API_KEY=***"),
    ("--aws-secret-access-key abc", "--aws-secret-access-key ***"),
    ("--db postgresql://me:abc@host/db", "--db postgresql://me:***@host/db"),
    ("--with hf_abcdefghijklmnopqrstuvwxyz", "--with ***"),
    ("train.py AKIAABCDEFGHIJKLMNOP", "train.py ***"),
    ("--token --verbose", "--token --verbose"),
]


@pytest.mark.parametrize(("command", "hidden"), HIDES, ids=[command for command, _ in HIDES])
def test_what_looks_secret_is_hidden(command: str, hidden: str) -> None:
    assert list(without_secrets(shlex.split(command))) == shlex.split(hidden)
    assert without_secrets(without_secrets(shlex.split(command))) == tuple(shlex.split(hidden))


@pytest.mark.parametrize(
    "command",
    [
        "--max-tokens=100 --tokenizer gpt2 --num-tokens 3",
        "--key-dim 64 --sort-key name",
        "s3://bucket/prefix https://host/path",
        "--secrets-of-the-sea 1 --author me",
        "python -m torch.distributed.run --nproc-per-node 2 train.py optimizer.lr=0.1",
    ],
)
def test_what_does_not_is_kept(command: str) -> None:
    assert list(without_secrets(shlex.split(command))) == shlex.split(command)
    assert HIDDEN not in command


def test_a_command_of_bytes_that_are_no_utf_8_can_be_written_down() -> None:
    (word,) = without_secrets(["x\udce9"])
    assert word == "x\\udce9"
    word.encode()


def test_numbers_are_told_in_groups_of_three() -> None:
    assert [count(None), count(0), count(999), count(1234567)] == ["?", "0", "999", "1 234 567"]


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (999, "999 B"), (12_345, "12.3 kB"), (340_000_000, "340 MB"), (1_500_000_000, "1.5 GB"),
     (13_400_000_000, "13.4 GB"), (1_340_000_000_000, "1.34 TB")],
)  # fmt: skip
def test_sizes_are_short(number: int, words: str) -> None:
    assert size(number) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 ms"), (0.0304, "30 ms"), (0.3, "0.3 s"), (4.0, "4.0 s"), (41.4, "41 s"), (120.0, "120 s"),
     (300.0, "5.0 min"), (11_520.0, "3.2 h"), (354_240.0, "4.1 days")],
)  # fmt: skip
def test_durations_are_short(seconds: float, words: str) -> None:
    assert duration(seconds) == words
