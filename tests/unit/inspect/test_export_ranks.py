"""`harness export` of several ranks: whole tensors, wherever their pieces lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cloud.directory.store import DirectoryStore
from harness.config.settings import Settings
from harness.core import small_state, tree
from harness.core.manifest import Claim, StoredPiece
from harness.core.shard import TensorSpec, plan_shards
from harness.core.snapshot import RunKeys, SnapshotId, shard_name
from harness.core.tree import TensorRef
from harness.errors import SnapshotCorrupt
from harness.inspect import export
from harness.snapshots import commit
from harness.snapshots.commit import Staged, StagedPart
from harness.trainer.copy import to_slot
from tests.support.protocol import FOREVER

RUN_ID = "0" * 31 + "1"
KEYS = RunKeys("run")
NAMES = {torch.float32: "F32", torch.int64: "I64"}
Stored = Mapping[str, tuple[Tensor, StoredPiece | None]]


def box(name: str, whole: Tensor, rows: slice, columns: slice = slice(None)) -> tuple[str, tuple[Tensor, StoredPiece]]:
    """An entry that is a part of a tensor of two dimensions."""
    offset = (rows.start or 0, columns.start or 0)
    piece = StoredPiece(tensor=name, whole=tuple(whole.shape), offset=offset)
    return f"{name}@{offset[0]},{offset[1]}", (whole[rows, columns].contiguous(), piece)


def own(name: str, tensor: Tensor) -> tuple[str, tuple[Tensor, StoredPiece]]:
    return name, (tensor, StoredPiece(own=True))


def publish(directory: Path, ranks: list[Stored], states: list[dict[str, Any]]) -> None:
    """Commit a snapshot of several ranks."""
    store = DirectoryStore(directory)
    wanted = Claim(format=1, run_id=RUN_ID, generation=1, nonce="b" * 16, claimed_at="", host="here", pid=1,
                   fresh=False, parent=None, command=("python",), named=True)  # fmt: skip
    commit.claim(store, KEYS, wanted, FOREVER)
    texts = [tree.dumps(state) for state in states]
    parts = []
    for rank, stored in enumerate(ranks):
        (layout,) = plan_shards(
            [TensorSpec(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, (tensor, _) in stored.items()]
        )
        data = bytearray(layout.size)
        data[: len(layout.header)] = layout.header
        to_slot.copy_into(to_slot.views(data, [layout], [0]), {name: tensor for name, (tensor, _) in stored.items()})
        state, lacks = (texts[0], ()) if rank == 0 else small_state.split(texts[0], texts[rank])
        pieces = {name: piece for name, (_, piece) in stored.items() if piece is not None}
        shards = [(shard_name(rank, len(ranks), 0), memoryview(data))]
        parts.append(
            StagedPart(
                rank=rank,
                world_size=len(ranks),
                state=state,
                environment={},
                sealed_at="",
                shards=shards,
                pieces=pieces,
                lacks=lacks,
            )
        )
    staged = Staged(id=SnapshotId(1, 20), run_id=RUN_ID, parent=None, parts=parts)
    commit.publish(store, KEYS, staged, "remote", FOREVER, lambda event: None)


def model(*names: str, dtype: str = "F32") -> dict[str, Any]:
    """Small state with a model of these tensors."""
    references = {name: TensorRef(f"model/{name}", dtype, "plain", ()) for name in names}
    return {"step": 20, "states": {"model": {"kind": "module", "state": references}}}


def exported(tmp_path: Path, said: list[str], **options: Any) -> dict[str, Tensor]:
    settings = Settings(store=str(tmp_path / "store"), run="run")
    export.export(settings, tmp_path / "out.safetensors", said.append, **options)
    return load_file(tmp_path / "out.safetensors")


def test_pieces_become_whole_tensors_however_they_are_cut(tmp_path: Path) -> None:
    rows, columns, whole = torch.randn(5, 3), torch.randn(4, 6), torch.arange(7)
    grid = torch.randn(4, 4)
    ranks: list[Stored] = [
        dict([box("model/rows", rows, slice(0, 2)), box("model/columns", columns, slice(None), slice(0, 1)),
              box("model/grid", grid, slice(0, 2), slice(2, 4)), box("model/grid", grid, slice(2, 4), slice(0, 2)),
              own("model/mean", torch.zeros(3))]),
        dict([box("model/rows", rows, slice(2, 5)), box("model/columns", columns, slice(None), slice(1, 6)),
              box("model/grid", grid, slice(0, 2), slice(0, 2)), box("model/grid", grid, slice(2, 4), slice(2, 4)),
              own("model/mean", torch.ones(3)), ("model/whole", (whole, None))]),
    ]  # fmt: skip
    state = model("rows", "columns", "grid", "mean")
    state["states"]["model"]["state"]["whole"] = TensorRef("model/whole", "I64", "plain", ())
    publish(tmp_path / "store", ranks, [state, state])
    said: list[str] = []

    found = exported(tmp_path, said, only="model")

    expected = {"rows": rows, "columns": columns, "grid": grid, "whole": whole, "mean": torch.zeros(3)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any("each rank's own, like model/mean" in line for line in said)


def test_what_only_another_rank_has_of_the_model_is_there_too(tmp_path: Path) -> None:
    """The stages of a pipeline."""
    first, second = torch.randn(2, 2), torch.randn(3, 2)
    ranks: list[Stored] = [{"model/first": (first, None)}, dict([own("model/second", second)])]
    publish(tmp_path / "store", ranks, [model("first"), model("second")])

    found = exported(tmp_path, [], only="model")

    assert torch.equal(found["first"], first)
    assert torch.equal(found["second"], second)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 4)], ids=["missing", "twice"])
def test_pieces_that_are_not_the_whole_are_damage(tmp_path: Path, rows: slice) -> None:
    whole = torch.randn(4, 2)
    ranks: list[Stored] = [dict([box("model/w", whole, slice(0, 2))]), dict([box("model/w", whole, rows)])]
    publish(tmp_path / "store", ranks, [model("w"), model("w")])

    with pytest.raises(SnapshotCorrupt, match="model/w"):
        exported(tmp_path, [])
    assert not (tmp_path / "out.safetensors").exists()


def test_the_rest_is_the_first_rank_s(tmp_path: Path) -> None:
    ranks: list[Stored] = [{"model/w": (torch.ones(2), None)}, dict([own("model/b", torch.ones(1))])]
    publish(tmp_path / "store", ranks, [model("w") | {"extra": {"rank": 0}}, model("w") | {"extra": {"rank": 1}}])
    settings = Settings(store=str(tmp_path / "store"), run="run")

    export.export(settings, tmp_path / "out.safetensors", lambda line: None)

    head = (tmp_path / "out.safetensors").read_bytes()
    size = int.from_bytes(head[:8], "little")
    document = json.loads(json.loads(head[8 : 8 + size])["__metadata__"]["state"])
    assert document["extra"] == {"rank": 0}
