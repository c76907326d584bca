"""docs/format.md is enough: 60 lines that know nothing of the harness restore what `harness run` wrote."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.support import stranger

ROOT = Path(__file__).parents[2]
RUN = "tiny"


def make_model() -> nn.Module:
    """Parameters of two dtypes, buffers of two more, and a tied weight."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)).double()
    model[3].weight = model[0].weight
    model.scale = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    return model


TRAIN = f"""
import torch
from torch import nn
from harness import Checkpointer

{inspect.getsource(make_model)}
torch.manual_seed(1)
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
ckpt = Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
for _ in ckpt.steps(7):
    loss = model(torch.randn(5, 8, dtype=torch.float64)).square().mean() + model.scale.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, "truth.pt")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `truth.pt`, and the store that a real run has left."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "harness", "run", "--run", RUN, "--metadata", "off"]
    subprocess.run(
        [*command, "--", sys.executable, "train.py"],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(directory)},
        check=True,
        capture_output=True,
    )
    return directory


def truth(trained: Path) -> Any:
    return torch.load(trained / "truth.pt", weights_only=True)


def shards(trained: Path) -> list[Path]:
    return sorted((trained / ".harness" / RUN / "snapshots").glob("*/*.safetensors"))


def assert_same(a: Any, b: Any) -> None:
    """Equal with types, dtypes and bits."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    else:
        assert a == b


def test_the_reader_has_at_most_60_lines_and_imports_nothing_of_ours() -> None:
    source = Path(stranger.__file__).read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."])
    }
    assert len(source.splitlines()) <= 60
    assert imported - sys.stdlib_module_names == {"torch"}


def test_a_stranger_restores_the_model_and_the_optimizer(trained: Path) -> None:
    small = stranger.read_latest(trained / ".harness" / RUN)
    expected = truth(trained)
    assert small["step"] == 7
    assert_same(small["states"]["model"]["state"], dict(expected["model"]))
    assert_same(small["states"]["optimizer"]["state"], expected["optimizer"])

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.load_state_dict(small["states"]["model"]["state"])
    optimizer.load_state_dict(small["states"]["optimizer"]["state"])
    assert_same(dict(model.state_dict()), dict(expected["model"]))
    assert_same(optimizer.state_dict(), expected["optimizer"])


def test_a_shard_opens_with_the_safetensors_library_and_holds_the_very_tensors(trained: Path) -> None:
    model = truth(trained)["model"]
    (shard,) = shards(trained)
    with safe_open(shard, "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  no mapping
        assert opened.metadata() is None
    stored = {f"model/{key}": tensor for key, tensor in model.items() if key != "3.weight"}
    assert stored.keys() == {name for name in found if name.startswith("model/")}, "a tied weight is stored once"
    for name, tensor in stored.items():
        assert_same(found[name], tensor)


def test_a_flipped_bit_is_refused_by_the_stranger_too(trained: Path) -> None:
    (shard,) = shards(trained)
    whole = shard.read_bytes()
    shard.chmod(0o600)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(AssertionError, match="is damaged"):
            stranger.read_latest(trained / ".harness" / RUN)
    finally:
        shard.write_bytes(whole)


def test_the_digest_is_the_documented_one() -> None:
    assert stranger.crc64nvme(b"123456789") == "ae8b14860a799888"
    assert stranger.crc64nvme(b"") == "0" * 16
