from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.snapshot import (
    LISTED_IN_ORDER,
    MAX_GENERATION,
    MAX_STEP,
    RunKeys,
    SnapshotId,
    check_run_name,
    shard_name,
)

KEYS = RunKeys("gpt-small")
ids = st.builds(SnapshotId, st.integers(1, MAX_GENERATION), st.integers(0, MAX_STEP))


def test_every_key_is_pinned() -> None:
    snapshot = SnapshotId(7, 12000)
    directory = KEYS.directory(snapshot, "0123456789abcdef")

    assert [
        KEYS.claim(7),
        KEYS.done(7),
        KEYS.payload(directory, shard_name(3, 8, 0)),
        KEYS.part(directory, 3, 8),
        KEYS.commit(snapshot),
        KEYS.quarantined(snapshot),
        KEYS.journal(7, "host-1", 123),
    ] == [
        "gpt-small/generations/00000007.json",
        "gpt-small/generations/00000007.done.json",
        "gpt-small/snapshots/00000007-000000012000-0123456789abcdef/rank-00003-of-00008.00.safetensors",
        "gpt-small/snapshots/00000007-000000012000-0123456789abcdef/rank-00003-of-00008.json",
        "gpt-small/commits/00000007-000000012000.json",
        "gpt-small/quarantine/00000007-000000012000.json",
        "gpt-small/events/00000007-host-1/00000123.jsonl",
    ]


@given(ids)
def test_a_snapshot_id_survives_its_text(snapshot: SnapshotId) -> None:
    assert SnapshotId.parse(str(snapshot)) == snapshot


@given(ids.filter(lambda one: one.generation < LISTED_IN_ORDER), ids)
def test_a_later_one_comes_later_in_a_list(one: SnapshotId, other: SnapshotId) -> None:
    assert (one < other) == ((one.generation, one.step) < (other.generation, other.step))
    assert (str(one) < str(other)) == (one < other)


@given(ids)
def test_every_key_is_parsed_back_by_its_own_parser_only(snapshot: SnapshotId) -> None:
    generation, directory = snapshot.generation, KEYS.directory(snapshot, "0123456789abcdef")
    written = {
        KEYS.commit(snapshot): (KEYS.parse_commit, snapshot),
        KEYS.quarantined(snapshot): (KEYS.parse_quarantined, snapshot),
        KEYS.claim(generation): (KEYS.parse_claim, generation),
        KEYS.done(generation): (KEYS.parse_done, generation),
        KEYS.part(directory, 0, 1): (KEYS.parse_directory, (snapshot, directory)),
    }

    for key in written:
        for parse, value in written.values():
            own = written[key] == (parse, value)
            assert parse(key) == (value if own else None), key  # type: ignore[operator]


@pytest.mark.parametrize("text", ["", "7-12", "00000007-00000001200x", "00000000-000000000001", "00000007_000000012000",
                                  "00000007-000000012000 ", "\uff100000007-000000012000"])  # fmt: skip
def test_what_is_no_snapshot_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        SnapshotId.parse(text)


@pytest.mark.parametrize(("generation", "step"), [(0, 1), (-1, 1), (1, -1), (MAX_GENERATION + 1, 0), (1, MAX_STEP + 1)])
def test_numbers_that_would_not_sort_are_refused(generation: int, step: int) -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        SnapshotId(generation, step)


@pytest.mark.parametrize(
    "key",
    [
        "other/commits/00000001-000000000001.json",
        "gpt-small/commits/00000001-000000000001.json.tmp",
        "gpt-small/commits/latest.json",
        "gpt-small/commits/",
        "gpt-small/snapshots/00000001-000000000001/x",
        "gpt-small/snapshots/00000001-000000000001-0123456789ABCDEF/x",
        "gpt-small/snapshots/short/x",
        "gpt-small/snapshots/",
        "gpt-small/generations/7.json",
        "gpt-small/generations/00000000.json",
        "gpt-small/README.txt",
    ],
)
def test_a_foreign_object_is_nobodys_key(key: str) -> None:
    parsers = (KEYS.parse_commit, KEYS.parse_quarantined, KEYS.parse_claim, KEYS.parse_done, KEYS.parse_directory)

    assert [parse(key) for parse in parsers] == [None] * 5


@pytest.mark.parametrize("name", ["gpt-small", "a", "_x", "v1.2+lr=3e-4", "x" * 100])
def test_a_run_may_be_called(name: str) -> None:
    assert check_run_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "-flag", "a/b", "a b", "ü", "x" * 101, "a\n"])
def test_a_run_cannot_be_called(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a run's name"):
        check_run_name(name)


@pytest.mark.parametrize("nonce", ["", "short", "../../../../etc", "0123456789ABCDEF", "g" * 16, "0" * 33])
def test_a_nonce_is_hex_and_no_path(nonce: str) -> None:
    with pytest.raises(ValueError, match="nonce"):
        KEYS.directory(SnapshotId(1, 1), nonce)
