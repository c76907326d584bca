"""`harness export`: what is in the file is what was trained, and there is a file only if that is proved."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from cloud.digest import crc64nvme, format_crc
from cloud.directory.store import DirectoryStore
from cloud.store import ObjectStore
from harness.cli import app
from harness.config.settings import Settings
from harness.core import tree
from harness.core.manifest import FORMAT, Claim, Part, ShardEntry, combine_parts, encode
from harness.core.shard import plan_shards
from harness.core.snapshot import RunKeys, SnapshotId, shard_name
from harness.errors import ConfigError, NoSpace, SnapshotCorrupt
from harness.inspect import export
from harness.snapshots import commit, retire
from harness.trainer.copy import to_slot
from harness.trainer.state import capture
from tests.support.protocol import FOREVER, Content
from tests.support.stores import RecordingStore

ROOT = Path(__file__).parents[3]
RUN = "tiny"
KEYS = RunKeys(RUN)
RUN_ID, OTHER_ID = "0" * 31 + "1", "0" * 31 + "2"
CHUNK = 4096


class Model(nn.Module):
    """Tied weights, a bf16 parameter, a frozen one, buffers, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.fixed = nn.Parameter(torch.randn(2000), requires_grad=False)
        self.register_buffer("empty", torch.empty(0, 5))
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x))).sum() + self.scale.sum().float()  # type: ignore[no-any-return]


class Training(NamedTuple):
    model: Model
    optimizer: torch.optim.AdamW
    scheduler: torch.optim.lr_scheduler.StepLR


def train(steps: int = 2, seed: int = 1) -> Training:
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.arange(6)).backward()
        optimizer.step()
        scheduler.step()
    return Training(model, optimizer, scheduler)


def publish(
    store: ObjectStore,
    states: Mapping[str, object],
    step: int = 20,
    *,
    generation: int = 1,
    run_id: str = RUN_ID,
    edit: Callable[[dict[str, Any]], object] = lambda small: None,
    ranks: int = 1,
) -> SnapshotId:
    """Commit a snapshot of live states, as a trainer and its agent do; in chunks of 4 KiB."""
    snapshot = SnapshotId(generation, step)
    captured = capture.capture(states)
    small = {"step": step, "states": captured.tree, "rng": {"torch": b"\x00\xff"}, "extra": {"note": "hi"}}
    edit(small)
    directory = KEYS.directory(snapshot, "a" * 16)
    text = tree.dumps(small)
    parts = []
    for rank in range(ranks):
        entries = []
        for layout in plan_shards(captured.specs()):
            data = bytearray(layout.size)
            data[: len(layout.header)] = layout.header
            targets = to_slot.views(data, [layout], [0])
            to_slot.copy_into(targets, {name: captured.tensors[name] for name in targets})
            name = shard_name(rank, ranks, layout.index)
            store.put(KEYS.payload(directory, name), memoryview(data), deadline=FOREVER)
            chunks = tuple(format_crc(crc64nvme(data[at : at + CHUNK])) for at in range(0, len(data), CHUNK))
            entries.append(ShardEntry(name=name, size=len(data), crc64nvme=format_crc(crc64nvme(data)),
                                      chunk_bytes=CHUNK, chunks=chunks))  # fmt: skip
        parts.append(Part(format=FORMAT, run_id=run_id, generation=generation, step=step, rank=rank, world_size=ranks,
                          directory=directory, parent=None, sealed_at="", shards=tuple(entries),
                          state=msgspec.Raw(text), state_crc64nvme=format_crc(crc64nvme(text))))  # fmt: skip
        store.put_if_absent(KEYS.part(directory, rank, ranks), encode(parts[-1]), deadline=FOREVER)
    commit.commit(store, KEYS, combine_parts(parts), FOREVER)
    return snapshot


def claim(store: ObjectStore, generation: int = 1, run_id: str = RUN_ID) -> None:
    wanted = Claim(format=FORMAT, run_id=run_id, generation=generation, nonce="b" * 16, claimed_at="", host="here",
                   pid=1, fresh=False, parent=None, command=("python",), named=True)  # fmt: skip
    commit.claim(store, KEYS, wanted, FOREVER)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    opened = DirectoryStore(tmp_path / "store")
    claim(opened)
    return opened


def run(tmp_path: Path, name: str = "out.safetensors", **options: Any) -> tuple[Path, dict[str, Any]]:
    """Export to a directory of its own; the file, and what is told of it."""
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    local = options.pop("local", None)
    say = options.pop("said", []).append
    settings = Settings(store=str(tmp_path / "store"), run=RUN, local=None if local is None else str(local))
    return out / name, export.export(settings, out / name, say, **options)


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())


def assert_same(a: Any, b: Any) -> None:
    """Equal in values, with dtypes and bits."""
    if isinstance(b, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a, b)
    elif isinstance(b, Mapping):
        assert sorted(map(str, a)) == sorted(map(str, b))
        for key in b:
            assert_same(a[key], b[key])
    elif isinstance(b, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


# ---- safetensors ----------------------------------------------------------------------------------------------------


def test_only_a_model_is_its_state_dict_under_plain_names(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()
    publish(store, live._asdict())

    path, told = run(tmp_path, only="model")

    assert_same(load_file(path), dict(live.model.state_dict()))
    assert Model().load_state_dict(load_file(path), strict=True)
    assert metadata_of(path) == {"format": "pt", "run": RUN, "snapshot": "00000001-000000000020", "step": "20"}
    assert told == {
        "file": str(path),
        "run": RUN,
        "snapshot": "00000001-000000000020",
        "step": 20,
        "tier": "remote",
        "only": "model",
        "tensors": len(live.model.state_dict()),
        "bytes": path.stat().st_size,
    }
    assert left_in(path.parent) == [path.name]


def test_tied_weights_come_out_under_each_of_their_names(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()
    publish(store, live._asdict())

    path, _ = run(tmp_path, only="model")

    found = load_file(path)
    assert torch.equal(found["embed.weight"], live.model.embed.weight)
    assert torch.equal(found["head.weight"], live.model.embed.weight)


def test_a_wrapper_s_prefix_is_not_in_the_names(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()
    publish(store, {"model": nn.DataParallel(live.model)})

    path, _ = run(tmp_path, only="model")

    assert_same(load_file(path), dict(live.model.state_dict()))


def test_a_whole_snapshot_has_every_tensor_under_its_path_and_the_rest_in_its_metadata(
    store: DirectoryStore, tmp_path: Path
) -> None:
    live = train()
    publish(store, live._asdict())

    path, _ = run(tmp_path)

    found = load_file(path)
    expected = {f"model/{key}": value for key, value in live.model.state_dict().items()}
    for index, values in live.optimizer.state_dict()["state"].items():
        expected |= {f"optimizer/state/{index}/{key}": value for key, value in values.items()}
    assert_same(found, expected)
    document = tree.loads(metadata_of(path)["state"].encode())
    assert list(document) == ["step", "rng", "extra", "model", "optimizer", "scheduler"]
    assert (document["step"], document["rng"], document["extra"]) == (20, {"torch": b"\x00\xff"}, {"note": "hi"})
    assert document["model"]["head.weight"].name == "model/head.weight"
    assert document["optimizer"]["state"][0]["exp_avg"].name == "optimizer/state/0/exp_avg"
    assert document["optimizer"]["param_groups"] == live.optimizer.state_dict()["param_groups"]
    assert document["scheduler"] == live.scheduler.state_dict()


def test_two_paths_of_one_text_get_two_names(store: DirectoryStore, tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[Any, Any]:
            return {1: torch.zeros(1), "1": torch.ones(1), "": torch.ones(2), "__metadata__": torch.ones(3)}

        def load_state_dict(self, state: Any) -> None: ...

    publish(store, {"odd": Odd()})

    path, _ = run(tmp_path, only="odd")

    document = tree.loads(metadata_of(path)["state"].encode())
    found = load_file(path)
    assert [found[document[key].name].tolist() for key in (1, "1", "", "__metadata__")] == [
        [0.0], [1.0], [1.0, 1.0], [1.0, 1.0, 1.0],
    ]  # fmt: skip


def test_the_bytes_of_a_file(store: DirectoryStore, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("b", torch.tensor([1, -1], dtype=torch.int8))
    model.register_buffer("a", torch.tensor([1.0]))
    publish(store, {"m": model})

    path, _ = run(tmp_path, only="m")

    header = (
        b'{"__metadata__":{"format":"pt","run":"tiny","snapshot":"00000001-000000000020","step":"20"},'
        b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"I8","shape":[2],"data_offsets":[4,6]}}'
    )
    padded = header.ljust(4088)
    assert path.read_bytes() == (4088).to_bytes(8, "little") + padded + b"\x00\x00\x80\x3f\x01\xff"


def test_a_state_without_tensors_is_a_file_without_tensors(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()
    publish(store, live._asdict())

    path, told = run(tmp_path, only="scheduler")

    assert load_file(path) == {}
    assert told["tensors"] == 0
    assert tree.loads(metadata_of(path)["state"].encode()) == live.scheduler.state_dict()


def test_tensors_of_every_kind_and_order_come_out_exactly(store: DirectoryStore, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    model.register_buffer("slice", torch.arange(10)[::3])
    for dtype in to_slot.TORCH_DTYPES.values():
        model.register_buffer(str(dtype).replace("torch.", "as_"), torch.tensor([0.0, 1.0, 1.0]).to(dtype))
    publish(store, {"model": model})

    path, _ = run(tmp_path, only="model")

    found = load_file(path)
    assert found.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert found[key].dtype == value.dtype
        assert found[key].tolist() == value.tolist()


# ---- which snapshot -------------------------------------------------------------------------------------------------


def test_the_newest_that_is_not_quarantined_is_taken(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()._asdict()
    publish(store, live, 30)
    publish(store, live, 10, generation=2)
    quarantined = publish(store, live, 20, generation=2)
    commit.quarantine(store, KEYS, quarantined, "flipped", "here", FOREVER)

    assert run(tmp_path)[1]["snapshot"] == "00000002-000000000010"
    with pytest.raises(SnapshotCorrupt, match="quarantined"):
        run(tmp_path, "other.safetensors", snapshot=str(quarantined))


def test_a_snapshot_is_named_by_its_id_or_by_its_step(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()._asdict()
    for generation, step in ((1, 10), (1, 20), (2, 20), (2, 30)):
        publish(store, live, step, generation=generation)

    assert run(tmp_path, "a.safetensors", step=20)[1]["snapshot"] == "00000002-000000000020"
    assert run(tmp_path, "b.safetensors", snapshot="00000001-000000000020")[1]["snapshot"] == "00000001-000000000020"
    for wrong in ({"step": 21}, {"snapshot": "00000003-000000000030"}, {"snapshot": "20"},
                  {"snapshot": "00000001-000000000020", "step": 20}):  # fmt: skip
        with pytest.raises(ConfigError):
            run(tmp_path, "c.safetensors", **wrong)
    assert left_in(tmp_path / "out") == ["a.safetensors", "b.safetensors"]


def test_what_was_there_before_fresh_is_exported_only_by_its_name(store: DirectoryStore, tmp_path: Path) -> None:
    old = publish(store, train()._asdict(), 90)
    claim(store, 2, OTHER_ID)

    with pytest.raises(ConfigError, match="no snapshot of run"):
        run(tmp_path)
    assert run(tmp_path, snapshot=str(old))[1]["step"] == 90


def test_no_such_run_and_no_such_state_tell_what_there_is(store: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="harness ls"):
        run(tmp_path)
    publish(store, train()._asdict())
    with pytest.raises(ConfigError, match="it holds model, optimizer, scheduler"):
        run(tmp_path, only="mode")
    assert left_in(tmp_path / "out") == []


def test_a_snapshot_that_is_retired_while_it_is_read_is_followed_by_another(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = train()._asdict()
    old = publish(store, live, 10)
    plan = export._plan

    def retire_then_plan(source: Any, *arguments: Any) -> Any:
        if source.manifest.id == old:
            publish(store, live, 20)
            retire.remove(store, KEYS, old, FOREVER)
        return plan(source, *arguments)

    monkeypatch.setattr(export, "_plan", retire_then_plan)

    assert run(tmp_path)[1]["step"] == 20


def test_the_local_tier_is_nearer_unless_it_is_damaged_or_another_run_s(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()._asdict()
    named = Settings(store=str(tmp_path / "store"), run=RUN, local=str(tmp_path / "local"))
    local = DirectoryStore(Path(named.local_tier or ""))
    publish(store, live, 10)
    publish(local, live, 10)
    newer = publish(local, live, 20)
    publish(local, live, 99, run_id=OTHER_ID)

    told = run(tmp_path, "a.safetensors", local=named.local)[1]
    assert (told["snapshot"], told["tier"]) == (str(newer), "local")
    damage(local, SnapshotId(1, 10), b"\xff", -1)
    said: list[str] = []
    assert run(tmp_path, "b.safetensors", step=10, local=named.local, said=said)[1]["tier"] == "remote"
    assert "is not what was committed" in said[1]


# ---- damage ---------------------------------------------------------------------------------------------------------


def shards_of(store: DirectoryStore, snapshot: SnapshotId) -> list[Path]:
    return sorted(store.root.glob(f"{RUN}/snapshots/{snapshot}-*/*.safetensors"))


def damage(store: DirectoryStore, snapshot: SnapshotId, data: bytes, at: int, shard: int = -1) -> None:
    """Overwrite bytes of a shard; a negative place counts from its end."""
    path = shards_of(store, snapshot)[shard]
    whole = bytearray(path.read_bytes())
    at %= len(whole)
    assert whole[at : at + len(data)] != data
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


DAMAGE: dict[str, Callable[[DirectoryStore, SnapshotId], object]] = {
    "the last byte": lambda store, snapshot: damage(store, snapshot, b"\xff", -1),
    "a tensor": lambda store, snapshot: damage(store, snapshot, b"\xff\xff\xff", 4096),
    "the header's padding": lambda store, snapshot: damage(store, snapshot, b"\n", 4095),
    "a name": lambda store, snapshot: damage(store, snapshot, b"n", 11),
    "the header's length": lambda store, snapshot: damage(store, snapshot, b"\xff", 6),
    "a shard that is cut off": lambda store, snapshot: os.truncate(shards_of(store, snapshot)[0], 5000),
    "a shard that is gone": lambda store, snapshot: shards_of(store, snapshot)[0].unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_leaves_no_file(store: DirectoryStore, tmp_path: Path, what: str) -> None:
    publish(store, train()._asdict(), 10)
    DAMAGE[what](store, publish(store, train()._asdict(), 20))

    with pytest.raises(SnapshotCorrupt, match="Nothing was written"):
        run(tmp_path)

    assert left_in(tmp_path / "out") == []


def test_damage_leaves_the_file_that_was_to_be_replaced(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, train()._asdict(), 10)
    path, _ = run(tmp_path)
    before = path.read_bytes()
    damage(store, publish(store, train()._asdict(), 20), b"\xff", -1)

    with pytest.raises(SnapshotCorrupt):
        run(tmp_path, force=True)

    assert path.read_bytes() == before
    assert left_in(path.parent) == [path.name]


def test_of_a_shard_only_the_chunks_that_are_needed_are_read(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Big:
        def state_dict(self) -> dict[str, Any]:
            return {"big": torch.arange(1 << 18, dtype=torch.float64)}

        def load_state_dict(self, state: Any) -> None: ...

    live = train()
    publish(store, {"model": live.model, "big": Big()})
    recording = RecordingStore(store)
    monkeypatch.setattr(export, "open_existing_store", lambda location, settings: recording)

    path, _ = run(tmp_path, only="model")

    assert_same(load_file(path), dict(live.model.state_dict()))
    assert len(recording.keys("get")) < 20, "the 512 chunks of what is not asked for are left alone"


# ---- hostile snapshots ----------------------------------------------------------------------------------------------


def nest(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"$": "enum", "value": value}
    return value


HOSTILE: dict[str, Sequence[Any]] = {
    "a tensor that is not there": (SnapshotCorrupt, {"w": {"$": "tensor", "name": "x", "dtype": "F32"}}),
    "a tensor of another dtype": (SnapshotCorrupt, {"w": {"$": "tensor", "name": "m/w", "dtype": "F64"}}),
    "a reference with more to say": (SnapshotCorrupt, {"w": {"$": "tensor", "name": "m/w", "dtype": "F32", "x": 1}}),
    "a dict without pairs": (SnapshotCorrupt, {"$": "dict", "items": [[1]]}),
    "a bottomless tree": (SnapshotCorrupt, nest(400)),
    "more names than fit the disk": (NoSpace, [{"$": "tensor", "name": "m/w", "dtype": "F32"}] * 40),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_document_is_refused(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model = nn.Module()
    model.register_buffer("w", torch.zeros(1 << 16))
    publish(store, {"m": model})
    error, node = HOSTILE[what]
    monkeypatch.setattr(export.document, "pick", lambda state, only: json.loads(json.dumps(node)))
    monkeypatch.setattr(export.shutil, "disk_usage", lambda path: _Room(1 << 23))

    with pytest.raises(error):
        run(tmp_path)

    assert left_in(tmp_path / "out") == []


class _Room(NamedTuple):
    free: int


def test_a_snapshot_of_something_else_than_a_checkpointer_is_refused(store: DirectoryStore, tmp_path: Path) -> None:
    staged = Content(SnapshotId(1, 20), run_id=RUN_ID).staged()
    commit.publish(store, KEYS, staged, "remote", FOREVER, lambda event: None)

    with pytest.raises(ConfigError, match="not written by a Checkpointer"):
        run(tmp_path)


# ---- the target -----------------------------------------------------------------------------------------------------


def test_a_file_that_is_there_is_replaced_only_by_force(store: DirectoryStore, tmp_path: Path) -> None:
    publish(store, train()._asdict())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "out.safetensors").write_text("mine")

    with pytest.raises(ConfigError, match="--force"):
        run(tmp_path)
    assert (tmp_path / "out" / "out.safetensors").read_text() == "mine"

    path, _ = run(tmp_path, force=True)
    assert load_file(path)
    assert left_in(path.parent) == [path.name]


def test_a_file_that_came_meanwhile_is_not_replaced(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, train()._asdict())
    fill = export._fill
    mine = tmp_path / "out" / "out.safetensors"
    monkeypatch.setattr(export, "_fill", lambda *arguments: (fill(*arguments), mine.write_text("mine")))

    with pytest.raises(ConfigError, match="exists already"):
        run(tmp_path)

    assert mine.read_text() == "mine"
    assert left_in(mine.parent) == [mine.name]


@pytest.mark.parametrize(
    "name", ["model", "model.bin", "model.pt", "nowhere/model.safetensors", "directory.safetensors"]
)
def test_a_target_that_cannot_be_is_refused_before_a_byte_is_read(
    store: DirectoryStore, tmp_path: Path, name: str
) -> None:
    publish(store, train()._asdict())
    (tmp_path / "out" / "directory.safetensors").mkdir(parents=True)

    with pytest.raises(ConfigError):
        run(tmp_path, name, force=True)

    assert left_in(tmp_path / "out") == ["directory.safetensors"]


def test_a_disk_that_fills_up_is_told_and_left_clean(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, train()._asdict())

    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpace):
        run(tmp_path)

    assert left_in(tmp_path / "out") == []


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_makes_a_file_and_says_so(store: DirectoryStore, tmp_path: Path) -> None:
    live = train()
    publish(store, live._asdict())
    command = [
        sys.executable,
        "-m",
        "harness",
        "export",
        "model.safetensors",
        "--only",
        "model",
        "--store",
        "store",
        "--json",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert (told["file"], told["step"], told["bytes"]) == ("model.safetensors", 20, size)
    assert done.stderr.splitlines() == [
        f"harness: exporting 00000001-000000000020 from {tmp_path / 'store'}",
        f"harness: wrote model.safetensors: {len(live.model.state_dict())} tensors, {size} bytes, step 20 of tiny",
    ]
    assert_same(load_file(tmp_path / "model.safetensors"), dict(live.model.state_dict()))


@pytest.mark.parametrize(("code", "prepare"), [(64, lambda store, snapshot: None), (70, DAMAGE["the last byte"])])
def test_the_exit_code_says_whose_fault_it_was(
    store: DirectoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    code: int,
    prepare: Callable[[DirectoryStore, SnapshotId], object],
) -> None:
    prepare(store, publish(store, train()._asdict()))
    monkeypatch.chdir(tmp_path)
    only = ["--only", "nothing"] if code == 64 else []
    monkeypatch.setattr(sys, "argv", ["harness", "export", "m.safetensors", "--run", RUN, "--store", "store", *only])

    with pytest.raises(SystemExit) as left:
        app.main()

    said = capfd.readouterr()
    assert left.value.code == code
    assert said.out == ""
    assert "harness: error: " in said.err
    assert not (tmp_path / "m.safetensors").exists()
