"""Late copies from a CUDA device into pinned slots. Needs a GPU; says so when there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from harness.ipc.slots import Slot
from harness.trainer.copy import to_slot
from tests.unit.trainer.staging.test_overlap import Training, adamw, in_place, same, through_data, trained_with

pytestmark = pytest.mark.gpu


@pytest.fixture
def training() -> Iterator[Training]:
    with trained_with(adamw, device="cuda") as made:
        yield made


def is_pinned(slot: Slot) -> bool:
    return bool(torch.frombuffer(slot.buffer, dtype=torch.uint8).is_pinned())


def test_a_slot_for_tensors_on_a_gpu_is_pinned_until_it_is_closed(training: Training) -> None:
    slot = training.link.slot
    assert slot is not None
    assert is_pinned(slot)

    other = Slot.create(1 << 20)
    unpin = to_slot.pin(other.buffer, torch.device("cuda:0"))
    unpin()
    assert not is_pinned(other)
    other.at_close(to_slot.pin(other.buffer, torch.device("cuda:0")))
    other.close()  # and the memory can be registered by somebody else
    again = Slot.create(1 << 20)
    again.at_close(to_slot.pin(again.buffer, torch.device("cuda:0")))
    again.close()


def test_a_snapshot_is_right_where_a_slot_was_dropped_without_being_closed(training: Training) -> None:
    assert training.stager.stage(training.step)
    assert same(training.stored(), {name: tensor.cpu() for name, tensor in training.live().items()})
    for _ in range(20):  # one of them is likely to lie where the one before did
        with trained_with(adamw, device="cuda") as other:
            assert other.stager.stage(other.step)
            assert other.link.slot is not None
            assert is_pinned(other.link.slot)
            assert same(other.stored(), {name: tensor.cpu() for name, tensor in other.live().items()})


def test_memory_that_was_unmapped_while_it_was_registered_is_registered_anew() -> None:
    device, size = torch.device("cuda:0"), 1 << 20
    stale = Slot.create(size)
    to_slot.pin(stale.buffer, device)
    address = torch.frombuffer(stale.buffer, dtype=torch.uint8).data_ptr()
    stale.close()
    slots = [Slot.create(size) for _ in range(8)]
    again = next(one for one in slots if torch.frombuffer(one.buffer, dtype=torch.uint8).data_ptr() == address)

    again.at_close(to_slot.pin(again.buffer, device))
    there = torch.frombuffer(again.buffer, dtype=torch.uint8)
    there.copy_(torch.full((size,), 7, dtype=torch.uint8, device=device), non_blocking=True)
    torch.cuda.synchronize()

    assert int(there.min()) == 7
    del there
    for one in slots:
        one.close()


def test_a_late_copy_holds_what_was_true_at_its_boundary(training: Training) -> None:
    training.prove()
    for _ in range(5):
        at_boundary = training.live()
        assert training.stager.stage(training.step, overlap=True)
        training.run()

        assert same(training.stored(), {name: tensor.cpu() for name, tensor in at_boundary.items()})
    assert training.overlap.on


def test_what_the_stream_was_given_before_the_boundary_comes_before_the_copy(training: Training) -> None:
    training.prove()
    block = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        block = block @ block / 4096  # the step itself is still waiting behind this when its boundary comes
    training.run()
    at_boundary = training.live()

    training.stager.stage(training.step, overlap=True)
    training.run()

    assert same(training.stored(), {name: tensor.cpu() for name, tensor in at_boundary.items()})


@pytest.mark.parametrize("write", [in_place, through_data])
def test_a_write_past_the_hook_is_found_by_the_first_snapshots(write: object, training: Training) -> None:
    at_boundary = {name: tensor.cpu() for name, tensor in training.live().items()}
    training.stager.stage(training.step, overlap=True)

    write(training.model)  # type: ignore[operator]
    training.run()

    assert not training.overlap.on
    assert same(training.stored(), at_boundary)


def test_a_replayed_cuda_graph_is_found() -> None:
    """It steps the optimizer without any hook, and no version counter tells of it."""
    with trained_with(lambda params: torch.optim.AdamW(params, lr=0.1, capturable=True), device="cuda") as training:
        static = torch.randn(8, 256, device="cuda")

        def step() -> None:
            training.model(static).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        at_boundary = {name: tensor.cpu() for name, tensor in training.live().items()}
        training.stager.stage(training.step, overlap=True)

        graph.replay()
        training.step += 1
        training.stager.settle(training.step)

        assert not training.overlap.on
        assert same(training.stored(), at_boundary)


def test_a_snapshot_is_right_where_the_layout_changes_while_its_copy_has_begun(training: Training) -> None:
    assert training.stager.stage(training.step)
    training.model.register_buffer("late", torch.ones(3, device="cuda"))
    training.model[0].bias = torch.nn.Parameter(torch.randn(256, device="cuda", dtype=torch.float64))
    del training.optimizer.state[next(iter(training.optimizer.state))]["exp_avg"]
    training.step += 1

    staged = training.stager.stage(training.step)
    if not staged:
        assert training.stager.stage(training.step)

    assert same(training.stored(), {name: tensor.cpu() for name, tensor in training.live().items()})
