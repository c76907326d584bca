"""Writers of checkpoints in the layouts of frameworks, step by step: at each `yield` the writer may be killed.

Each follows its framework's documented order of file operations, with small real contents: zips by torch, safetensors,
pickles, JSON. `written` says how a layout was made; `tests/watch/test_real_libraries.py` has the libraries themselves.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

RANKS = 2
Moments = Iterator[None]
Layout = Callable[[Path, int], Moments]


@functools.cache
def by_torch(step: int, seed: int = 0) -> bytes:
    """A file of `torch.save`."""
    file = io.BytesIO()
    torch.save({"step": step, "weight": torch.full((16,), float(step + seed))}, file)
    return file.getvalue()


@functools.cache
def by_safetensors(step: int, seed: int = 0) -> bytes:
    """A file of safetensors."""
    return safetensors.torch.save({"weight": torch.full((16,), float(step + seed))})


def by_pickle(step: int) -> bytes:
    """A pickle."""
    return pickle.dumps({"step": step, "state": list(range(50))})


def by_hdf5(step: int) -> bytes:
    """A file with the head of HDF5, which tells where it ends."""
    content = by_torch(step)
    head = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0, 4, 0, 16, 0, 0, 0, 0, 0])
    return head + struct.pack("<QQQQ", 0, 2**64 - 1, len(head) + 32 + len(content), 2**64 - 1) + content


def by_json(**content: object) -> bytes:
    """A JSON file."""
    return json.dumps(content, indent=1).encode()


def put(path: Path, data: bytes, *, every: bool = False) -> Moments:
    """Write a file: opened, some of it, all but a byte, all. With `every`, a moment after each byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = len(data)
    some = {0, min(1, size), size // 3, size // 2, max(0, size - 1), size}
    cuts = range(size + 1) if every else sorted(some)
    with path.open("wb", buffering=0) as file:
        yield
        for begin, end in zip(cuts, [*cuts][1:], strict=False):
            file.write(data[begin:end])
            yield


def rename(path: Path, target: Path) -> Moments:
    """Rename a file or directory."""
    path.replace(target)
    yield


def transformers(root: Path, step: int) -> Moments:
    """`Trainer._save_checkpoint`, rank 0; rank 1's random states come last, with no barrier before the mark."""
    at = root / f"checkpoint-{step}"
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for number, name in enumerate(names):
        yield from put(at / name, by_safetensors(step, number))
    index = by_json(metadata={}, weight_map={f"w{number}": name for number, name in enumerate(names)})
    yield from put(at / "model.safetensors.index.json", index, every=True)
    yield from put(at / "optimizer.pt", by_torch(step, 2))
    yield from put(at / "scheduler.pt", by_torch(step, 3))
    yield from put(at / "rng_state_0.pth", by_torch(step, 4))
    yield from put(at / "trainer_state.json", by_json(global_step=step), every=True)
    yield from put(at / "rng_state_1.pth", by_torch(step, 5))


def transformers_jit(root: Path, step: int) -> Moments:
    """The same by its just-in-time checkpoint: a sentinel lies in it until it is whole."""
    at = root / f"checkpoint-{step}"
    yield from put(at / "checkpoint-is-incomplete.txt", b"")
    yield from transformers(root, step)
    (at / "checkpoint-is-incomplete.txt").unlink()
    yield


def accelerate(root: Path, step: int) -> Moments:
    """`Accelerator.save_state`."""
    at = root / "checkpoints" / f"checkpoint_{step}"
    yield from put(at / "model.safetensors", by_safetensors(step))
    yield from put(at / "optimizer.bin", by_torch(step, 1))
    yield from put(at / "scheduler.bin", by_torch(step, 2))
    for rank in range(RANKS):
        yield from put(at / f"random_states_{rank}.pkl", by_torch(step, 3 + rank))
    yield from put(at / "custom_checkpoint_0.pkl", by_torch(step, 5))


def colossalai(root: Path, step: int) -> Moments:
    """Colossal-LLaMA's `save_checkpoint`. Its step begins anew in each epoch: of 20 steps here."""
    at = root / f"epoch-{step // 20}_step-{step % 20}"
    for folder in ("modeling", "optimizer"):
        name = f"{folder}-00001.bin"
        yield from put(at / folder / name, by_torch(step))
        yield from put(at / folder / f"{folder}.index.json", by_json(weight_map={"w": name}), every=True)
    yield from put(at / "lr_scheduler", by_torch(step, 2))
    yield from put(at / "running_states.json", by_json(step=step), every=True)


def composer(root: Path, step: int) -> Moments:
    """`CheckpointSaver`: the link is removed, then made again."""
    name = f"ep0-ba{step}-rank0.pt"
    yield from put(root / name, by_torch(step))
    link = root / "latest-rank0.pt"
    link.unlink(missing_ok=True)
    yield
    link.symlink_to(name)
    yield


def dcp(root: Path, step: int) -> Moments:
    """`dcp.save`: the metadata get their name once all shards are there."""
    at = root / f"step-{step}"
    shards = {f"__{rank}_0.distcp": by_torch(step, rank) for rank in range(RANKS)}
    for name, data in shards.items():
        yield from put(at / name, data)
    stored: dict[MetadataIndex, Any] = {
        MetadataIndex(name): _StorageInfo(name, 0, len(data)) for name, data in shards.items()
    }
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([16]), [])
    metadata = Metadata(dict.fromkeys(shards, tensor), storage_data=stored)
    yield from put(at / ".metadata.tmp", pickle.dumps(metadata))
    yield from rename(at / ".metadata.tmp", at / ".metadata")


def deepspeed(root: Path, step: int) -> Moments:
    """`save_checkpoint`: rank 0 writes `latest` with no barrier after the other ranks' files."""
    return _deepspeed(root, step, [_OPTIMIZER.format(0, 0)], [_OPTIMIZER.format(1, 0)])


def deepspeed_tensor(root: Path, step: int) -> Moments:
    """The same with two ranks of tensor parallelism: each has its files of the one data-parallel rank."""
    return _deepspeed(root, step, [_OPTIMIZER.format(0, 0)], [_MODEL.format(1), _OPTIMIZER.format(0, 1)])


def deepspeed_plain(root: Path, step: int) -> Moments:
    """The same without ZeRO: only the first data-parallel rank writes."""
    return _deepspeed(root, step, [], [])


_MODEL, _OPTIMIZER = "mp_rank_{:02d}_model_states.pt", "zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"


def _deepspeed(root: Path, step: int, first: Sequence[str], others: Sequence[str]) -> Moments:
    """The files of rank 0, `latest`, and those of the other ranks."""
    at = root / f"global_step{step}"
    for seed, name in enumerate([_MODEL.format(0), *first]):
        yield from put(at / name, by_torch(step, seed))
    yield from put(root / "latest", f"global_step{step}".encode(), every=True)
    for seed, name in enumerate(others, start=2):
        yield from put(at / name, by_torch(step, seed))


def detectron2(root: Path, step: int) -> Moments:
    """fvcore's `PeriodicCheckpointer`."""
    yield from put(root / f"model_{step:07d}.pth", by_torch(step))
    yield from put(root / "last_checkpoint", f"model_{step:07d}.pth".encode(), every=True)


def diffusers(root: Path, step: int) -> Moments:
    """A script of diffusers: a hook of `Accelerator.save_state` writes the weights. Rank 0 alone calls it."""
    at = root / f"checkpoint-{step}"
    for seed, folder in enumerate(("unet", "unet_ema")):
        yield from put(at / folder / "config.json", by_json(_class_name="UNet2DModel"))
        yield from put(at / folder / "diffusion_pytorch_model.safetensors", by_safetensors(step, seed))
    yield from put(at / "optimizer.bin", by_torch(step, 1))
    yield from put(at / "scheduler.bin", by_torch(step, 2))
    yield from put(at / "random_states_0.pkl", by_torch(step, 3))


def fairscale(root: Path, step: int) -> Moments:
    """A script's own `torch.save` of what rank 0 has consolidated."""
    yield from put(root / f"model_{step}.pt", by_torch(step))
    yield from put(root / f"optim_{step}.pt", by_torch(step, 1))


def horovod(root: Path, step: int) -> Moments:
    """Rank 0 writes a file and renames it."""
    yield from put(root / f"checkpoint-{step}.pt.tmp", by_torch(step))
    yield from rename(root / f"checkpoint-{step}.pt.tmp", root / f"checkpoint-{step}.pt")


def lightning(root: Path, step: int) -> Moments:
    """`ModelCheckpoint`: from memory into the file, as a copy where the temporary directory is another file system."""
    yield from put(root / "checkpoints" / f"epoch=0-step={step}.ckpt", by_torch(step))


def lightseq(root: Path, step: int) -> Moments:
    """fairseq's `torch_persistent_save`, and the copy of it that it restores."""
    yield from put(root / f"checkpoint_1_{step}.pt.tmp", by_torch(step))
    yield from rename(root / f"checkpoint_1_{step}.pt.tmp", root / f"checkpoint_1_{step}.pt")
    yield from put(root / "checkpoint_last.pt", by_torch(step))


def litgpt(root: Path, step: int) -> Moments:
    """`pretrain.save_checkpoint`, and what `finetune/full.py` adds; the configuration is a copy."""
    at = root / f"step-{step:08d}"
    yield from put(at / "lit_model.pth", by_torch(step))
    yield from put(at / "hyperparameters.yaml", b"train:\n  save_interval: 10\n")
    yield from put(at / "model_config.yaml", b"n_layer: 2\n")
    yield from put(at / "prompt_style.json", by_json(class_path="litgpt.prompts.Alpaca"))


def megatron(root: Path, step: int) -> Moments:
    """`save_checkpoint`: the tracker is written behind a barrier."""
    at = root / f"iter_{step:07d}"
    for rank in range(RANKS):
        yield from put(at / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", by_torch(step, rank))
    yield from put(root / "latest_checkpointed_iteration.txt", str(step).encode(), every=True)


def mmengine(root: Path, step: int) -> Moments:
    """`CheckpointHook`. The path is that of a working directory as the configuration has it."""
    yield from put(root / f"iter_{step}.pth", by_torch(step))
    yield from put(root / "last_checkpoint", f"work_dirs/a/iter_{step}.pth".encode(), every=True)


def nemo(root: Path, step: int) -> Moments:
    """`NeMoModelCheckpoint`: a marker lies beside it until it is whole."""
    at = root / "checkpoints" / f"gpt--step={step}"
    marker = at.with_name(f"{at.name}-unfinished")
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    yield
    for rank in range(RANKS):
        yield from put(at / "weights" / f"__{rank}_0.distcp", by_torch(step, rank))
    yield from put(at / "weights" / "common.pt", by_torch(step, 3))
    yield from put(at / "weights" / "metadata.json", by_json(backend="torch_dist"), every=True)
    marker.unlink()
    yield


def nnscaler(root: Path, step: int) -> Moments:
    """Each rank writes its file, and a link to it."""
    for rank in range(RANKS):
        yield from put(root / f"0-{step:04d}" / f"{rank}.ckpt", by_torch(step, rank))
        link = root / "last" / f"{rank}.ckpt"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        yield
        link.symlink_to(f"../0-{step:04d}/{rank}.ckpt")
        yield


def orbax(root: Path, step: int) -> Moments:
    """A directory gets its name when it is whole."""
    draft = root / f"{step}.orbax-checkpoint-tmp-{step}1"
    for name in ("d/0", "manifest.ocdbt", "_METADATA", "_CHECKPOINT_METADATA"):
        yield from put(draft / name, by_json(step=step, name=name))
    yield from rename(draft, root / str(step))


def paddlenlp(root: Path, step: int) -> Moments:
    """`Trainer`, with FLAG_LLM_PDC: the mark is the last file."""
    at = root / f"checkpoint-{step}"
    yield from put(at / "model_state.pdparams", by_pickle(step))
    yield from put(at / "optimizer.pdopt", by_pickle(step + 1))
    yield from put(at / "trainer_state.json", by_json(global_step=step))
    yield from put(at / "rng_state_0.pth", by_pickle(step))
    yield from put(at / ".checkpoint_done", b"")


def torch_save(root: Path, step: int) -> Moments:
    """A script that saves a file for each thing and step."""
    yield from put(root / f"model_{step}.pt", by_torch(step))
    yield from put(root / f"optimizer_{step}.pt", by_torch(step, 1))
    yield from put(root / f"random_{step}.pt", by_torch(step, 2))


def torch_save_one(root: Path, step: int) -> Moments:
    """A script that writes one file again and again, in place."""
    yield from put(root / "last.pt", by_torch(step))


def torch_save_renamed(root: Path, step: int) -> Moments:
    """The same, by a rename."""
    yield from put(root / "last.pt.tmp", by_torch(step))
    yield from rename(root / "last.pt.tmp", root / "last.pt")


def keras(root: Path, step: int) -> Moments:
    """`BackupAndRestore._save_model`."""
    weights, metadata = root / "latest.weights.h5", root / "training_metadata.json"
    for path in (weights, metadata):
        if path.exists():
            yield from put(path.with_name(f"_{path.name}"), path.read_bytes())
    yield from put(weights, by_hdf5(step))
    os.utime(weights, (step, step))  # the clock of a file system may tick seldom
    yield
    yield from put(metadata, by_json(epoch=step, batch=0), every=True)
    os.utime(metadata, (step, step))


def skorch(root: Path, step: int) -> Moments:
    """`Checkpoint.save_model`."""
    for number, name in enumerate(("criterion.pt", "optimizer.pt", "params.pt")):
        yield from put(root / name, by_torch(step, number))
        os.utime(root / name, (step, step))  # the clock of a file system may tick seldom
    yield from put(root / "history.json", by_json(epoch=step), every=True)
    os.utime(root / "history.json", (step, step))


def stable_baselines3(root: Path, step: int) -> Moments:
    """`CheckpointCallback`, with a replay buffer and `VecNormalize`."""
    yield from put(root / f"rl_model_{step}_steps.zip", by_torch(step))
    yield from put(root / f"rl_model_replay_buffer_{step}_steps.pkl", by_pickle(step))
    yield from put(root / f"rl_model_vecnormalize_{step}_steps.pkl", by_pickle(step + 1))


def timm(root: Path, step: int) -> Moments:
    """`CheckpointSaver.save_checkpoint`."""
    last = root / "last.pth.tar"
    yield from put(root / "args.yaml", b"model: resnet\n")
    yield from put(root / "tmp.pth.tar", by_torch(step))
    last.unlink(missing_ok=True)
    yield
    yield from rename(root / "tmp.pth.tar", last)
    (root / f"checkpoint-{step}.pth.tar").hardlink_to(last)
    yield


def verl(root: Path, step: int) -> Moments:
    """`SFTTrainer`'s checkpoint handler: rank 0 writes the tracker, with no barrier after the other rank's files."""
    at = root / f"global_step_{step}"
    for rank in range(RANKS):
        for seed, kind in enumerate(("model", "optim", "extra_state")):
            yield from put(at / f"{kind}_world_size_{RANKS}_rank_{rank}.pt", by_torch(step, 3 * rank + seed))
    yield from put(at / "huggingface" / "config.json", by_json(hidden_size=8))
    yield from put(at / "data_0.pt", by_torch(step, 6))
    tracker = root / "latest_checkpointed_iteration.txt"
    yield from put(tracker.with_name(f"{tracker.name}.tmp"), str(step).encode())
    yield from rename(tracker.with_name(f"{tracker.name}.tmp"), tracker)
    yield from put(at / "data_1.pt", by_torch(step, 7))


def fastai(root: Path, step: int) -> Moments:
    """`SaveModelCallback(every_epoch=True)`."""
    yield from put(root / "models" / f"model_{step}.pth", by_torch(step))


LAYOUTS: dict[str, tuple[str, Layout]] = {
    "transformers": ("transformers", transformers),
    "transformers-jit": ("transformers", transformers_jit),
    "mindnlp": ("mindnlp", transformers),
    "accelerate": ("accelerate", accelerate),
    "colossalai": ("colossalai", colossalai),
    "composer": ("composer", composer),
    "dcp": ("dcp", dcp),
    "deepspeed": ("deepspeed", deepspeed),
    "deepspeed-tensor": ("deepspeed", deepspeed_tensor),
    "deepspeed-plain": ("deepspeed", deepspeed_plain),
    "detectron2": ("detectron2", detectron2),
    "diffusers": ("diffusers", diffusers),
    "fairscale": ("fairscale", fairscale),
    "fastai": ("fastai", fastai),
    "horovod": ("horovod", horovod),
    "keras": ("keras", keras),
    "lightning": ("lightning", lightning),
    "lightseq": ("lightseq", lightseq),
    "litgpt": ("litgpt", litgpt),
    "megatron": ("megatron", megatron),
    "mmengine": ("mmengine", mmengine),
    "nemo": ("nemo", nemo),
    "nnscaler": ("nnscaler", nnscaler),
    "orbax": ("orbax", orbax),
    "paddlenlp": ("paddlenlp", paddlenlp),
    "skorch": ("skorch", skorch),
    "stable-baselines3": ("stable-baselines3", stable_baselines3),
    "timm": ("timm", timm),
    "torch-save": ("torch-save", torch_save),
    "torch-save-one": ("torch-save-one", torch_save_one),
    "torch-save-renamed": ("torch-save-one", torch_save_renamed),
    "verl": ("verl", verl),
}
"""The writers, by name, each with its adapter. Alpa has no mark at all, and is only taken by a quiet time."""


def contents(root: Path, paths: list[str]) -> dict[str, bytes]:
    """The bytes of these files."""
    return {path: (root / path).read_bytes() for path in paths}


def everything(root: Path) -> dict[str, bytes]:
    """The bytes of all files below a directory; of a link, where it leads."""
    found = {}
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            found[str(path.relative_to(root))] = bytes(path.readlink()) if path.is_symlink() else path.read_bytes()
    return found
