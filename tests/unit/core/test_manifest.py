from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from harness.core.manifest import (
    FORMAT,
    FORMAT_OF_RANKS,
    MAX_CHUNK_BYTES,
    Claim,
    Done,
    FileEntry,
    Manifest,
    Part,
    Quarantine,
    ShardEntry,
    StoredPiece,
    combine_parts,
    encode,
    parse_claim,
    parse_done,
    parse_manifest,
    parse_part,
    parse_quarantine,
)
from harness.core.snapshot import RunKeys, SnapshotId
from harness.errors import SnapshotCorrupt

KEYS, ID = RunKeys("run"), SnapshotId(7, 12000)
KEY = KEYS.commit(ID)
RUN_ID = "0123456789abcdef" * 2
DIRECTORY = "00000007-000000012000-0123456789abcdef"

SHARD_JSON = (
    '{"name":"rank-00000-of-00001.00.safetensors","size":5000,"crc64nvme":"00000000000000aa","chunk_bytes":4096,'
    '"chunks":["00000000000000bb","00000000000000cc"]}'
)
PART_JSON = (
    '{"format":1,"run_id":"0123456789abcdef0123456789abcdef","generation":7,"step":12000,"rank":0,"world_size":1,'
    '"directory":"00000007-000000012000-0123456789abcdef","parent":"00000006-000000011000",'
    '"sealed_at":"2026-01-02T03:04:05.678+00:00",'
    f'"shards":[{SHARD_JSON}],"state":{{"step":12000}},"state_crc64nvme":"00000000000000dd","environment":{{"torch":"2.13"}}}}'
)
MANIFEST_JSON = (
    '{"format":1,"run_id":"0123456789abcdef0123456789abcdef","generation":7,"step":12000,'
    '"directory":"00000007-000000012000-0123456789abcdef","parent":"00000006-000000011000",'
    f'"parts":[{PART_JSON}]}}'
)
RANK_JSON = (
    PART_JSON.replace('"format":1', '"format":2')
    .replace('"rank":0,"world_size":1', '"rank":%d,"world_size":2')
    .replace("rank-00000-of-00001", "rank-%05d-of-00002")
)
RANKS_JSON = MANIFEST_JSON.replace('"format":1', '"format":2', 1).replace(
    PART_JSON,
    (RANK_JSON % (0, 0))[:-1]
    + ',"pieces":{"model/bias":{"own":true}}},'
    + (RANK_JSON % (1, 1)).replace('"state":{"step":12000}', '"state":{}')[:-1]
    + ',"pieces":{"model/weight@2,0":{"tensor":"model/weight","whole":[4,3],"offset":[2,0]}},"lacks":["states/ema"]}',
)
CLAIM_JSON = (
    '{"format":1,"run_id":"0123456789abcdef0123456789abcdef","generation":7,"nonce":"0123456789abcdef",'
    '"claimed_at":"2026-01-02T03:04:05.678+00:00","host":"node-1","pid":4711,"fresh":false,'
    '"parent":"00000006-000000011000","command":["python","train.py"],"named":true,"settings":{"every_s":"60.0"},'
    '"agent":"0011223344556677","place":"boot-1-2","continues":true,"back_to":"00000001-000000000040"}'
)
DONE_JSON = (
    '{"format":1,"generation":7,"nonce":"0123456789abcdef","outcome":"interrupted","step":12000,'
    '"ended_at":"2026-01-02T03:04:05.678+00:00"}'
)
QUARANTINE_JSON = (
    '{"format":1,"generation":7,"step":12000,"reason":"chunk 0 of 2 is not what was committed",'
    '"found_at":"2026-01-02T03:04:05.678+00:00","host":"node-1"}'
)


def part(rank: int = 0, world_size: int = 1, **changes: Any) -> Part:
    shard = ShardEntry(
        name=f"rank-{rank:05d}-of-{world_size:05d}.00.safetensors",
        size=5000,
        crc64nvme="00000000000000aa",
        chunk_bytes=4096,
        chunks=("00000000000000bb", "00000000000000cc"),
    )
    whole = Part(
        format=FORMAT if world_size == 1 else FORMAT_OF_RANKS,
        run_id=RUN_ID,
        generation=7,
        step=12000,
        rank=rank,
        world_size=world_size,
        directory=DIRECTORY,
        parent="00000006-000000011000",
        sealed_at="2026-01-02T03:04:05.678+00:00",
        shards=(shard,),
        state=msgspec.Raw(b'{"step":12000}'),
        state_crc64nvme="00000000000000dd",
        environment={"torch": "2.13"},
        pieces=msgspec.UNSET if world_size == 1 else {"model/bias": StoredPiece(own=True)},
    )
    return msgspec.structs.replace(whole, **changes)


CLAIM = Claim(
    format=FORMAT,
    run_id=RUN_ID,
    generation=7,
    nonce="0123456789abcdef",
    claimed_at="2026-01-02T03:04:05.678+00:00",
    host="node-1",
    pid=4711,
    fresh=False,
    parent="00000006-000000011000",
    command=("python", "train.py"),
    named=True,
    settings={"every_s": "60.0"},
    agent="0011223344556677",
    lock_id="boot-1-2",
    continues=True,
    back_to="00000001-000000000040",
)
BOX = StoredPiece(tensor="model/weight", whole=(4, 3), offset=(2, 0))
DONE = Done(
    format=FORMAT,
    generation=7,
    nonce="0123456789abcdef",
    outcome="interrupted",
    step=12000,
    ended_at="2026-01-02T03:04:05.678+00:00",
)
QUARANTINE = Quarantine(
    format=FORMAT,
    generation=7,
    step=12000,
    reason="chunk 0 of 2 is not what was committed",
    found_at="2026-01-02T03:04:05.678+00:00",
    host="node-1",
)

RECORDS = {
    "claim": (CLAIM, CLAIM_JSON, lambda data: parse_claim(data, KEY)),
    "part": (part(), PART_JSON, lambda data: parse_part(data, KEY)),
    "manifest": (combine_parts([part()]), MANIFEST_JSON, lambda data: parse_manifest(data, KEYS, ID)),
    "manifest of ranks": (
        combine_parts(
            [
                part(0, 2),
                part(1, 2, pieces={"model/weight@2,0": BOX}, state=msgspec.Raw(b"{}"), lacks=("states/ema",)),
            ]
        ),
        RANKS_JSON,
        lambda data: parse_manifest(data, KEYS, ID),
    ),
    "done": (DONE, DONE_JSON, lambda data: parse_done(data, KEY)),
    "quarantine": (QUARANTINE, QUARANTINE_JSON, lambda data: parse_quarantine(data, KEY)),
}
Parse = Callable[[bytes], Any]


@pytest.fixture(params=RECORDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def changed(text: str, *path: str | int, value: Any) -> bytes:
    """`text` with one field set."""
    whole = json.loads(text)
    *above, last = path
    target = whole
    for step in above:
        target = target[step]
    target[last] = value
    return json.dumps(whole, separators=(",", ":")).encode()


# ---- formats --------------------------------------------------------------------------------------------------------


def test_the_bytes_of_every_record_are_pinned(kind: str) -> None:
    record, text, _ = RECORDS[kind]

    assert encode(record) == text.encode() + b"\n"  # type: ignore[arg-type]


def test_every_record_is_read_back_as_it_was(kind: str) -> None:
    record, text, parse = RECORDS[kind]

    assert parse(text.encode()) == record


def test_a_field_of_a_later_minor_version_is_ignored(kind: str) -> None:
    record, text, parse = RECORDS[kind]

    assert parse(changed(text, "of_tomorrow", value=[1])) == record


def test_a_manifest_is_a_function_of_its_parts_whoever_writes_it() -> None:
    parts = [part(rank, 3) for rank in range(3)]

    assert encode(combine_parts(parts)) == encode(combine_parts(parts[::-1]))


@pytest.mark.parametrize(
    "piece",
    [
        {},
        {"own": True, "tensor": "w"},
        {"own": True, "whole": [4], "offset": [0]},
        {"tensor": "w", "whole": [4, 3]},
        {"tensor": "w", "offset": [0, 0]},
        {"whole": [4, 3], "offset": [0, 0]},
        {"tensor": "w", "whole": [4, 3], "offset": [0]},
        {"tensor": "w", "whole": [4, 3], "offset": [5, 0]},
        {"tensor": "w", "whole": [4, 3], "offset": [-1, 0]},
        {"tensor": "w", "whole": [2**63, 3], "offset": [0, 0]},
    ],
)
def test_a_piece_that_is_no_box_of_a_tensor_is_refused(piece: dict[str, Any]) -> None:
    with pytest.raises(SnapshotCorrupt, match="piece"):
        parse_manifest(changed(RANKS_JSON, "parts", 0, "pieces", value={"model/weight": piece}), KEYS, ID)


def of_files(*paths: str, **changes: Any) -> Part:
    """A part with an empty file at each path."""
    files = tuple(
        FileEntry(
            name=f"rank-00000-of-00001.{index:05d}.file",
            size=0,
            crc64nvme="0000000000000000",
            chunk_bytes=4096,
            chunks=(),
            path=path,
        )
        for index, path in enumerate(paths)
    )
    return part(**{"format": FORMAT_OF_RANKS, "shards": (), "files": files, **changes})


def test_files_are_read_as_they_were_written() -> None:
    whole = of_files("checkpoint-1/a", "checkpoint-1/deep/b", "latest")
    assert parse_part(encode(whole), KEY) == whole
    assert [entry.name for entry in whole.stored] == [entry.name for entry in whole.files]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "paths",
    [
        ("/etc/passwd",),
        ("../a",),
        ("a/../../b",),
        ("a//b",),
        ("./a",),
        ("",),
        ("a\0b",),
        ("a" * 5000,),
        ("a", "a"),
        ("a", "a/b"),
    ],
)
def test_files_that_have_no_place_of_their_own_below_a_directory_are_refused(paths: tuple[str, ...]) -> None:
    with pytest.raises(SnapshotCorrupt):
        parse_part(encode(of_files(*paths)), KEY)


def test_files_have_their_names_and_their_format() -> None:
    with pytest.raises(SnapshotCorrupt, match="with files"):
        parse_part(encode(of_files("a", format=FORMAT)), KEY)
    (file,) = of_files("a").stored
    with pytest.raises(SnapshotCorrupt, match=r"expected rank-00000-of-00001\.00000\.file"):
        parse_part(encode(of_files(files=(msgspec.structs.replace(file, name="other.file"),))), KEY)
    with pytest.raises(SnapshotCorrupt):
        parse_manifest(changed(RANKS_JSON, "parts", 0, "files", value={"state.bin": "a"}), KEYS, ID)


def test_several_ranks_in_format_1_are_refused() -> None:
    with pytest.raises(SnapshotCorrupt, match="several ranks"):
        parse_part((RANK_JSON % (0, 0)).replace('"format":2', '"format":1').encode(), KEY)


# ---- what is no record at all ---------------------------------------------------------------------------------------

GARBAGE = {
    "empty": b"",
    "a newline": b"\n",
    "not JSON": b"\x00\x01\x02",
    "half of it": MANIFEST_JSON.encode()[:200],
    "not UTF-8": b'{"format":1,"host":"\xff"}',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "no format": b"{}",
    "10 MB of brackets": b"[" * 10_000_000,
    "10 MB of brackets behind a format": b'{"format":1,"state":' + b"[" * 10_000_000,
    "closed brackets, 100,000 deep": b'{"format":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_by_name(kind: str, data: bytes) -> None:
    _, _, parse = RECORDS[kind]

    with pytest.raises(SnapshotCorrupt) as refusal:
        parse(data)

    assert str(refusal.value).startswith(f"{KEY}: ")
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("number", [0, 3, 99, "1", 1.5, None])
def test_another_format_number_is_refused_as_another_versions(kind: str, number: Any) -> None:
    _, text, parse = RECORDS[kind]

    with pytest.raises(SnapshotCorrupt, match=r"this version reads format 1"):
        parse(changed(text, "format", value=number))


def test_a_missing_field_is_refused_by_name(kind: str) -> None:
    record, text, parse = RECORDS[kind]
    optional = {"environment", "settings", "agent", "place", "continues", "back_to", "pieces", "lacks", "files"}
    for name in set(record.__struct_encode_fields__) - optional:
        whole = json.loads(text)
        del whole[name]

        with pytest.raises(SnapshotCorrupt, match=KEY) as refusal:
            parse(json.dumps(whole).encode())

        assert name in str(refusal.value)


def test_a_field_of_another_type_is_refused(kind: str) -> None:
    record, text, parse = RECORDS[kind]
    for name in set(record.__struct_encode_fields__) - {"state", "files"}:
        with pytest.raises(SnapshotCorrupt, match=KEY):
            parse(changed(text, name, value={"unexpected": []}))


# ---- hostile fields -------------------------------------------------------------------------------------------------

HOSTILE_PARTS: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "directory above the run": (("directory",), "../../etc"),
    "absolute directory": (("directory",), "/etc"),
    "directory with a way out behind it": (("directory",), DIRECTORY + "/../../other"),
    "empty directory": (("directory",), ""),
    "another snapshot's directory": (("directory",), "00000007-000000011000-0123456789abcdef"),
    "directory without a nonce": (("directory",), "00000007-000000012000"),
    "directory with a newline": (("directory",), DIRECTORY + "\n"),
    "shard above the directory": (("shards", 0, "name"), "../../x.safetensors"),
    "absolute shard": (("shards", 0, "name"), "/etc/passwd"),
    "shard of another rank": (("shards", 0, "name"), "rank-00001-of-00001.00.safetensors"),
    "shard of another world": (("shards", 0, "name"), "rank-00000-of-00002.00.safetensors"),
    "shard out of order": (("shards", 0, "name"), "rank-00000-of-00001.01.safetensors"),
    "negative size": (("shards", 0, "size"), -1),
    "size below a header": (("shards", 0, "size"), 7),
    "a petabyte and one": (("shards", 0, "size"), 1024**5 + 1),
    "size beyond 64 bits": (("shards", 0, "size"), 2**70),
    "size as text": (("shards", 0, "size"), "5000"),
    "chunks of nothing": (("shards", 0, "chunk_bytes"), 0),
    "negative chunks": (("shards", 0, "chunk_bytes"), -4096),
    "chunks that fill memory": (("shards", 0, "chunk_bytes"), MAX_CHUNK_BYTES + 1),
    "a chunk too few": (("shards", 0, "chunks"), ["00000000000000bb"]),
    "a chunk too many": (("shards", 0, "chunks"), ["00000000000000bb"] * 3),
    "no chunks": (("shards", 0, "chunks"), []),
    "chunk digest too short": (("shards", 0, "chunks", 0), "bb"),
    "chunk digest in capitals": (("shards", 0, "chunks", 0), "00000000000000BB"),
    "digest that is none": (("shards", 0, "crc64nvme"), "zzzzzzzzzzzzzzzz"),
    "digest with a newline": (("shards", 0, "crc64nvme"), "00000000000000aa\n"),
    "generation 0": (("generation",), 0),
    "negative generation": (("generation",), -7),
    "generation beyond every key": (("generation",), 10**8),
    "negative step": (("step",), -1),
    "step beyond every key": (("step",), 10**12),
    "negative rank": (("rank",), -1),
    "rank outside the world": (("rank",), 1),
    "empty world": (("world_size",), 0),
    "a world of a million": (("world_size",), 1_000_000),
    "run of another kind": (("run_id",), "../../../x"),
    "run in capitals": (("run_id",), RUN_ID.upper()),
    "parent that is none": (("parent",), "../x"),
    "parent of generation 0": (("parent",), "00000000-000000000001"),
}


@pytest.mark.parametrize(("path", "value"), HOSTILE_PARTS.values(), ids=HOSTILE_PARTS.keys())
def test_a_hostile_part_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match=KEY):
        parse_part(changed(PART_JSON, *path, value=value), KEY)


@pytest.mark.parametrize(("path", "value"), HOSTILE_PARTS.values(), ids=HOSTILE_PARTS.keys())
def test_a_hostile_part_in_a_manifest_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match=KEY):
        parse_manifest(changed(MANIFEST_JSON, "parts", 0, *path, value=value), KEYS, ID)


@pytest.mark.parametrize(("name", "value"), [("generation", 6), ("step", 1), ("run_id", "f" * 32), ("parent", None),
                                             ("directory", DIRECTORY[:-1] + "0"), ("parts", [])])  # fmt: skip
def test_a_manifest_that_differs_from_its_parts_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match=KEY):
        parse_manifest(changed(MANIFEST_JSON, name, value=value), KEYS, ID)


def test_a_manifest_under_another_snapshots_key_is_refused() -> None:
    other = SnapshotId(8, 12000)

    with pytest.raises(SnapshotCorrupt, match=r"it says that it is 00000007-000000012000"):
        parse_manifest(MANIFEST_JSON.encode(), KEYS, other)


def hostile_ranks() -> dict[str, list[Part]]:
    return {
        "a duplicate": [part(0, 2), part(0, 2)],
        "one missing": [part(0, 3), part(2, 3)],
        "one too many": [part(0, 2), part(1, 2), part(1, 2)],
        "two worlds": [part(0, 2), part(1, 3)],
        "two steps": [part(0, 2), part(1, 2, step=12001, directory="00000007-000000012001-0123456789abcdef")],
        "two generations": [part(0, 2), part(1, 2, generation=8, directory="00000008-000000012000-0123456789abcdef")],
        "two runs": [part(0, 2), part(1, 2, run_id="f" * 32)],
        "two directories": [part(0, 2), part(1, 2, directory=DIRECTORY[:-1] + "0")],
        "two parents": [part(0, 2), part(1, 2, parent=None)],
        "none": [],
    }


@pytest.mark.parametrize("parts", hostile_ranks().values(), ids=hostile_ranks().keys())
def test_parts_that_do_not_make_one_snapshot_are_refused(parts: list[Part]) -> None:
    with pytest.raises(SnapshotCorrupt):
        combine_parts(parts)


def test_a_manifest_with_parts_out_of_rank_order_is_refused() -> None:
    manifest = combine_parts([part(0, 2), part(1, 2)])
    swapped = msgspec.structs.replace(manifest, parts=manifest.parts[::-1])

    with pytest.raises(SnapshotCorrupt, match="in order"):
        parse_manifest(encode(swapped), KEYS, ID)


def test_a_part_of_another_format_inside_a_manifest_is_refused() -> None:
    with pytest.raises(SnapshotCorrupt, match="another snapshot"):
        parse_manifest(changed(MANIFEST_JSON, "format", value=2), KEYS, ID)
    with pytest.raises(SnapshotCorrupt, match="several ranks"):
        parse_manifest(changed(RANKS_JSON, "parts", 0, "format", value=1), KEYS, ID)


@pytest.mark.parametrize(("name", "value"), [("generation", 0), ("run_id", "x"), ("run_id", "../" + RUN_ID)])
def test_a_hostile_claim_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SnapshotCorrupt, match=KEY):
        parse_claim(changed(CLAIM_JSON, name, value=value), KEY)


def test_an_outcome_that_is_none_is_refused() -> None:
    with pytest.raises(SnapshotCorrupt, match="outcome"):
        parse_done(changed(DONE_JSON, "outcome", value="exploded"), KEY)


def test_sizes_are_sums_over_shards_and_ranks() -> None:
    manifest: Manifest = combine_parts([part(rank, 3) for rank in range(3)])

    assert (manifest.parts[0].payload_bytes, manifest.payload_bytes, manifest.id) == (5000, 15000, ID)
