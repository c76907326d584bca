"""What our threads do while the training records a CUDA graph does not spoil it. Needs a GPU; says so without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from harness.ipc.slots import Slot
from harness.trainer.copy import to_slot
from harness.trainer.staging.overlap import Deferred, Overlap, _copy
from harness.trainer.state.gradients import Habit, Watched

pytestmark = pytest.mark.gpu


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.create(1 << 22)
    yield made
    made.close()


def record_beside(work: Callable[[], None]) -> torch.Tensor:
    """Record a graph, in the mode that forbids most, while another thread does `work`; what its replay computes."""
    given, graph = torch.zeros(64, device="cuda"), torch.cuda.CUDAGraph()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as err:  # noqa: BLE001  shown by the test
            failed.append(err)

    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        result = given + 1
        beside = threading.Thread(target=run)
        beside.start()
        beside.join()
        result = result * 2
    assert not failed, failed
    given.fill_(3)
    graph.replay()
    return result.cpu()


def test_a_slot_can_be_pinned_and_unpinned(slot: Slot) -> None:
    assert (record_beside(lambda: to_slot.pin(slot.buffer, torch.device("cuda:0"))()) == 8).all()


def test_a_slot_that_cannot_be_pinned_leaves_no_error_to_the_next_call(slot: Slot) -> None:
    device = torch.device("cuda:0")
    unpin = to_slot.pin(memoryview(slot.buffer)[len(slot.buffer) // 2 :], device)

    with pytest.raises(to_slot.MemoryTaken, match="cudaHostRegister"):
        to_slot.pin(slot.buffer, device)

    assert float(torch.ones(8, device=device).sum()) == 8
    unpin()


def test_a_step_can_be_recorded_whole_while_its_gradients_are_watched() -> None:
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    watched, given, graph = Watched(optimizer), torch.randn(4, 8, device="cuda"), torch.cuda.CUDAGraph()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(given).square().mean().backward()
        optimizer.step()
        watched.stepped(0)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    before = model.weight.clone()
    graph.replay()

    assert not torch.equal(model.weight, before)
    assert watched.habit is Habit.UNKNOWN
    assert watched.are_read(sure=True)


def test_a_late_copy_can_be_made(slot: Slot) -> None:
    live = torch.arange(1 << 16, dtype=torch.float32, device="cuda")
    target = torch.frombuffer(slot.buffer, dtype=torch.float32)[: live.numel()]
    overlap = Overlap(lambda text: None)
    deferred = (Deferred("live", target, live, live._version, live.data_ptr()),)
    for _ in range(2):
        overlap.note_valid(deferred)
    work = overlap.begin(deferred)
    work.wait()  # its stream is there
    target.zero_()
    ready = {live.device: torch.cuda.current_stream().record_event()}

    def copy() -> None:
        assert overlap._run(_copy, deferred, ready)[1] is None

    assert (record_beside(copy) == 8).all()
    assert torch.equal(target, live.cpu())
