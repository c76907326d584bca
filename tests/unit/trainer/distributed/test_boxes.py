"""Which part of a whole tensor each rank of a mesh holds; every rank is played in turn, and none talks to another."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.errors import StateError
from harness.trainer.distributed.boxes import Box, box_of, is_dtensor, like, local_of
from harness.trainer.state.capture import capture


@contextlib.contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """As this rank of a group in which no other is there."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def boxes(mesh: Sequence[int], placements: Sequence[Any], shape: Sequence[int]) -> list[Box]:
    """The box of every rank of the mesh, in order."""
    world = torch.Size(mesh).numel()
    found = []
    for rank in range(world):
        with as_rank(rank, world):
            tensor = dtensor.zeros(*shape, device_mesh=init_device_mesh("cpu", tuple(mesh)), placements=placements)
            found.append(box_of(tensor, ["w"]))
            assert found[-1].shape == tuple(local_of(tensor).shape)
    return found


CASES = [
    ((4,), [Shard(0)], (8, 3), 1),
    ((4,), [Shard(0)], (10, 3), 1),
    ((4,), [Shard(0)], (3, 2), 1),
    ((4,), [Shard(1)], (3, 10), 1),
    ((4,), [Replicate()], (5,), 4),
    ((2, 2), [Shard(0), Shard(0)], (10, 3), 1),
    ((2, 2), [Shard(0), Shard(1)], (5, 7), 1),
    ((2, 2), [Replicate(), Shard(0)], (5, 2), 2),
    ((2, 3), [Shard(1), Shard(0)], (7, 5), 1),
]


@pytest.mark.parametrize(
    ("mesh", "placements", "shape", "times"), CASES, ids=lambda value: str(value).replace("[", "(")
)
def test_every_element_is_held_by_as_many_ranks_as_the_placements_say(
    mesh: Sequence[int], placements: Sequence[Any], shape: Sequence[int], times: int
) -> None:
    held = Counter[tuple[int, ...]]()
    for box in boxes(mesh, placements, shape):
        assert box.whole == tuple(shape)
        grid = torch.zeros(box.shape).nonzero() if 0 in box.shape else torch.ones(box.shape).nonzero()
        held.update(tuple(int(a) + b for a, b in zip(index, box.offset, strict=True)) for index in grid)
    assert len(held) == torch.Size(shape).numel()
    assert set(held.values()) == {times}


def test_a_part_that_is_a_sum_yet_to_be_made_is_refused_by_name() -> None:
    with as_rank(0, 2):
        tensor = dtensor.zeros(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Partial()])
        with pytest.raises(StateError, match=r"model.*partial sum.*redistribute"):
            box_of(tensor, ["model", "w"])


def test_a_strided_part_with_holes_is_refused_and_one_without_is_a_box() -> None:
    """Tensor parallelism, and then `fully_shard` over what each rank has of it."""
    strided = pytest.importorskip("torch.distributed.tensor.placement_types")._StridedShard
    found = boxes((2, 2), [strided(0, split_factor=2), Shard(0)], (8, 3))
    assert sorted(box.offset[0] for box in found) == [0, 2, 4, 6]
    with pytest.raises(StateError, match="not one block"):
        boxes((2,), [strided(0, split_factor=2)], (8, 3))


def test_an_optimizer_s_state_has_the_parameters_names_also_behind_an_evaluation() -> None:
    """Which leaves the outermost module with parameters that the optimizer does not have, until the next backward."""
    with as_rank(0, 2):
        net = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
        fully_shard(net[0], mesh=(mesh := init_device_mesh("cpu", (2,))))
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            net.eval()(torch.ones(1, 4))
        given = {id(param) for param in optimizer.param_groups[0]["params"]}
        assert any(id(param) not in given for param in net.parameters())
        found = capture({"model": net, "optimizer": optimizer}, alone=False).tensors
    names = [f"optimizer/state/model/{name}/momentum_buffer" for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    assert [name for name in found if name.startswith("optimizer")] == names


def test_what_two_boxes_have_in_common_is_told_for_both() -> None:
    box = Box((10, 4), (2, 1), (5, 3))
    both = box.meets((4, 0), (6, 2))
    assert both is not None
    assert both.here == (slice(2, 5), slice(0, 1))
    assert both.there == (slice(0, 3), slice(1, 2))
    assert box.meets((7, 0), (3, 4)) is None


def test_a_tensor_made_like_another_has_its_placements_and_the_given_memory() -> None:
    with as_rank(1, 2):
        tensor = dtensor.zeros(5, 2, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        local = torch.ones_like(local_of(tensor))
        made = like(tensor, local)
        assert is_dtensor(made)
        assert (made.shape, made.placements) == (tensor.shape, tensor.placements)
        assert local_of(made).data_ptr() == local.data_ptr()
    assert not is_dtensor(local)
