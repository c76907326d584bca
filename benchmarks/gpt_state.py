"""The state of a GPT in training, of a size that is asked for: parameters and AdamW's moments, and nothing learned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, VOCABULARY, CONTEXT = 12, 8192, 1024


@dataclass(frozen=True)
class Size:
    """How large a state is, as an option has it: "2" is 2 GB in float32, "1bf16" is 1 GB in bfloat16."""

    gb: float
    dtype: torch.dtype = torch.float32

    @classmethod
    def parse(cls, text: str) -> Size:
        gb, bf16, _ = text.partition("bf16")
        return cls(float(gb), torch.bfloat16 if bf16 else torch.float32)

    def __str__(self) -> str:
        return f"{self.gb:g}" + ("bf16" if self.dtype is torch.bfloat16 else "")

    @property
    def words(self) -> str:
        return f"{self.gb:g} GB" + (" bf16" if self.dtype is torch.bfloat16 else "")


class Gpt(nn.Module):
    """GPT-2's parameters by GPT-2's shapes: 148 tensors, half of them small. It is never run."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in _shapes(width).items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))


@dataclass
class State:
    """A model and its optimizer, as they are after some steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tree(self) -> dict[str, Any]:
        """What a training script gives to torch.save; its tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of it by a name, for formats that have no trees."""
        return dict(named(self.tree(), ""))

    @torch.no_grad()
    def update(self) -> None:
        """Change every tensor in every piece, as a step of training does: no part of the state was saved before."""
        for tensor in self.tensors().values():
            tensor.mul_(1.01)

    def clear(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()


def gpt_state(size: Size, seed: int = 1) -> State:
    """A state of about `size`, the same at each call."""
    count = size.gb * 1e9 / size.dtype.itemsize / 3  # a parameter and two moments
    model = Gpt(_width(count), size.dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    block = torch.rand(1 << 20, generator=torch.Generator().manual_seed(seed)).to(size.dtype)
    for parameter in model.parameters():
        moments = {"exp_avg": torch.empty_like(parameter), "exp_avg_sq": torch.empty_like(parameter)}
        optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
        for tensor in (parameter.data, *moments.values()):
            _fill(tensor.view(-1), block)
    return State(model, optimizer)


def digest(state: State) -> float:
    """One number that tells whether everything is there: only a few elements of each tensor are read."""
    return math.fsum(
        float(tensor.reshape(-1)[:: max(1, tensor.numel() // 7)].double().sum()) for tensor in state.tensors().values()
    )


def _shapes(width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"wte": (VOCABULARY, width), "wpe": (CONTEXT, width)}
    for layer in range(LAYERS):
        for name, outputs, inputs in (("attn", 3, 1), ("proj", 1, 1), ("fc", 4, 1), ("out", 1, 4)):
            shapes[f"h{layer}_{name}_weight"] = (outputs * width, inputs * width)
            shapes[f"h{layer}_{name}_bias"] = (outputs * width,)
        for name in ("ln1", "ln2"):
            shapes[f"h{layer}_{name}_weight"] = shapes[f"h{layer}_{name}_bias"] = (width,)
    return {**shapes, "lnf_weight": (width,), "lnf_bias": (width,)}


def _width(count: float) -> int:
    """The width at which there are about `count` parameters: the root of 12·LAYERS·w² + (13·LAYERS + …)·w = count."""
    square, linear = 12 * LAYERS, 13 * LAYERS + VOCABULARY + CONTEXT + 2
    root = (math.sqrt(linear**2 + 4 * square * count) - linear) / (2 * square)
    return max(4, round(root / 4) * 4)


def _fill(flat: Tensor, block: Tensor) -> None:
    """The same numbers again and again: a generator's own speed would be most of the time."""
    for at in range(0, flat.numel(), block.numel()):
        part = flat[at : at + block.numel()]
        part.copy_(block[: part.numel()])


def named(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a tree of mappings, by its path."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named(inner, f"{prefix}/{key}" if prefix else str(key))
