"""A snapshot whose copy is late holds what was true at its boundary, or is not sealed.

The thread is played by one that copies at the last moment: when somebody waits for it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.core import tree
from harness.core.messages import GenerationInfo, Sealed
from harness.errors import StateError
from harness.ipc.slots import Slot, SlotState
from harness.trainer.boundary import Boundary
from harness.trainer.copy import to_slot
from harness.trainer.ranks import ALONE
from harness.trainer.saving import Saving
from harness.trainer.staging.overlap import VALIDATIONS, Overlap, before_updates
from harness.trainer.staging.stager import Stager, read_tensors
from harness.trainer.state import capture

WIDE = 256  # its weights are large enough to be copied late


class PlayedLink:
    """Whoever the Stager asks for slots: one, granted again after each seal."""

    slot_error = None
    rank = ALONE
    sequence = 0

    def __init__(self) -> None:
        self.generation = GenerationInfo(1, "", "")
        self.slot: Slot | None = None
        self.sealed: list[Sealed] = []

    def ask_slots(self, size: int, prepare: Callable[[Slot], None] | None = None) -> None:
        self.slot = Slot.create(size)
        if prepare is not None:
            prepare(self.slot)

    def granted(self, used: int, sealed: int) -> tuple[int, Slot] | None:
        grant = len(self.sealed) + 1
        return None if self.slot is None or grant == used else (grant, self.slot)

    def index_of(self, slot: Slot) -> int:
        return 0

    def send(self, message: Sealed) -> None:
        assert isinstance(message, Sealed)
        self.sealed.append(message)


class LastMoment(Executor):
    """Runs what it was given when somebody waits for the result."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        class Waited(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                if not self.done():
                    try:
                        self.set_result(fn(*args, **kwargs))
                    except OSError as err:
                        self.set_exception(err)
                return super().result(timeout)

        return Waited()


class Training:
    """A model, its optimizer, and snapshots of them."""

    def __init__(
        self, optimizer: Callable[[Any], torch.optim.Optimizer], executor: Executor | None, device: str
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Linear(WIDE, WIDE)).to(device)
        self.device = device
        self.optimizer = optimizer(self.model.parameters())
        self.states = {"model": self.model, "optimizer": self.optimizer}
        self.link, self.said, self.step = PlayedLink(), list[str](), 0
        self.overlap = Overlap(self.said.append, executor or LastMoment())
        self.stager = Stager(
            self.link,  # type: ignore[arg-type]
            self.states,
            lambda sure, found=None: capture.capture(self.states, found=found),
            lambda step, captured: {"states": captured.tree},
            self.overlap,
        )
        self.settled: list[bool] = []
        self.hook = before_updates(self.before_step)

    def before_step(self) -> None:
        self.settled.append(self.stager.settle(self.step, updating=True))

    def run(self, update: Callable[[], object] | None = None) -> None:
        """One step, up to its boundary."""
        self.model(torch.randn(8, WIDE, device=self.device)).square().mean().backward()
        (update or self.optimizer.step)()
        self.optimizer.zero_grad()
        self.step += 1

    def prove(self) -> None:
        """Up to where the next snapshot is copied late."""
        for _ in range(VALIDATIONS):
            assert self.stager.stage(self.step, overlap=True)
            self.run()

    def live(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in capture.capture(self.states).tensors.items()}

    def stored(self) -> dict[str, Tensor]:
        """The tensors of the sealed snapshot."""
        assert self.link.slot is not None
        record = self.link.slot.record()
        assert record is not None
        return {name: tensor.clone() for name, tensor in read_tensors(self.link.slot, record).items()}


@contextlib.contextmanager
def trained_with(
    optimizer: Callable[[Any], torch.optim.Optimizer], executor: Executor | None = None, device: str = "cpu"
) -> Iterator[Training]:
    """A training with a slot, at its first boundary."""
    made = Training(optimizer, executor, device)
    try:
        made.run()
        made.stager.plan(made.step)
        yield made
    finally:
        made.hook.remove()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.fixture(params=["last moment", "thread"])
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    with trained_with(adamw, LastMoment() if request.param == "last moment" else None) as made:
        yield made


@pytest.fixture
def late_training() -> Iterator[Training]:
    with trained_with(adamw, LastMoment()) as made:
        yield made


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_late_copy_holds_what_was_true_at_its_boundary(training: Training) -> None:
    training.prove()
    at_boundary = training.live()

    training.stager.stage(training.step, overlap=True)
    begun = training.link.slot is not None and training.link.slot.state
    training.run()

    assert begun is SlotState.FILLING  # nothing is sealed before everything is copied
    assert training.stager.sealed_step == training.step - 1
    assert same(training.stored(), at_boundary)
    assert not same(training.live(), at_boundary)
    assert training.overlap.on
    assert len(training.said) == 1
    assert "overlap is on" in training.said[0]


def test_buffers_and_small_state_are_of_the_boundary_too(training: Training) -> None:
    training.prove()
    mean = training.model[1].running_mean.clone()  # type: ignore[union-attr, operator]
    training.optimizer.param_groups[0]["lr"] = 0.5

    training.stager.stage(training.step, overlap=True)
    training.optimizer.param_groups[0]["lr"] = 0.25  # a scheduler, after the boundary
    training.run()

    assert torch.equal(training.stored()["model/1.running_mean"], mean)
    assert training.link.slot is not None
    assert (record := training.link.slot.record()) is not None
    assert tree.loads(record.state.encode())["states"]["optimizer"]["state"]["param_groups"][0]["lr"] == 0.5


OPTIMIZERS = {
    "adamw": adamw,
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "sgd with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_of_torch_announces_its_step(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    with trained_with(optimizer, LastMoment()) as training:
        training.prove()
        at_boundary = training.live()
        training.stager.stage(training.step, overlap=True)
        training.run()

        assert same(training.stored(), at_boundary)
        assert training.overlap.on
        assert not same(training.live(), at_boundary)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_optimizer_announces_its_step(late_training: Training) -> None:
    training = late_training
    compiled = torch.compile(lambda: training.optimizer.step(), backend="eager")
    for _ in range(VALIDATIONS):
        training.stager.stage(training.step, overlap=True)
        training.run(compiled)
    at_boundary = training.live()
    training.stager.stage(training.step, overlap=True)
    training.run(compiled)

    assert same(training.stored(), at_boundary)
    assert training.overlap.on


def test_an_optimizer_that_is_compiled_as_one_graph_is_refused_at_once(late_training: Training) -> None:
    """And not by the first wait, which would end a training that had run so far."""
    training = late_training
    with pytest.raises(torch._dynamo.exc.Unsupported, match="about_to_step"):
        training.run(torch.compile(lambda: training.optimizer.step(), backend="eager", fullgraph=True))


def test_a_step_that_a_cuda_graph_records_is_none(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    training.prove()
    training.stager.stage(training.step, overlap=True)
    waited = len(training.settled)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    training.run(lambda: Foreign(training.optimizer).step() or training.optimizer.step())

    assert len(training.settled) == waited
    assert training.stager.settle(training.step) is False  # it was one after all


def test_the_first_snapshots_are_copied_at_the_boundary_and_compared(training: Training) -> None:
    for nth in range(VALIDATIONS):
        assert training.overlap.validating
        at_boundary = training.live()

        assert training.stager.stage(training.step, overlap=True)

        assert training.stager.sealed_step == training.step  # at once
        assert same(training.stored(), at_boundary)
        training.run()
        assert len(training.link.sealed) == nth + 1  # and not once more
    assert not training.overlap.validating


def test_a_snapshot_that_no_optimizer_s_step_followed_proves_nothing(training: Training) -> None:
    for _ in range(VALIDATIONS):
        training.stager.stage(training.step, overlap=True)
        training.stager.settle(training.step)
        training.step += 1  # a step that a GradScaler skipped

    assert training.overlap.validating
    assert training.overlap.on


# What goes past the hook ---------------------------------------------------------------------------------------------


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param -= 0.1


def through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


class Foreign:
    """An optimizer that is none of torch's, over parameters that one of torch's has as well."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        for group in self.inner.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"])


def moments(optimizer: torch.optim.Optimizer) -> None:
    for values in optimizer.state.values():
        values["exp_avg"].data.zero_()


PAST: dict[str, Callable[[Training], None]] = {
    "a hand-written update": lambda training: in_place(training.model),
    "one through .data": lambda training: through_data(training.model),
    "a foreign optimizer": lambda training: Foreign(training.optimizer).step(),
    "the optimizer's state": lambda training: moments(training.optimizer),
}


@pytest.mark.parametrize("write", PAST.values(), ids=PAST)
@pytest.mark.parametrize("then_steps", [True, False], ids=["then a step of torch's", "and no hook at all"])
def test_a_write_past_the_hook_is_found_by_the_first_snapshots(
    write: Callable[[Training], None], then_steps: bool, training: Training
) -> None:
    at_boundary = training.live()
    training.stager.stage(training.step, overlap=True)

    training.model(torch.randn(8, WIDE)).square().mean().backward()
    write(training)
    if then_steps:
        training.optimizer.step()
    training.step += 1
    training.stager.settle(training.step)

    assert not training.overlap.on
    assert ["overlap is OFF" in line for line in training.said] == [True]
    assert same(training.stored(), at_boundary)


@pytest.mark.parametrize("write", [in_place, lambda model: model.load_state_dict(model.state_dict())])
def test_a_write_under_a_late_copy_voids_the_snapshot(
    write: Callable[[nn.Module], object], late_training: Training
) -> None:
    """It was torn: what is sealed is the one before, and then one that is copied at its boundary."""
    training = late_training
    training.prove()
    sealed = training.stager.sealed_step
    training.stager.stage(training.step, overlap=True)

    write(training.model)
    training.run()

    assert training.settled[-1] is False
    assert training.stager.sealed_step == sealed
    assert len(training.link.sealed) == VALIDATIONS
    assert training.link.slot is not None
    assert training.link.slot.state is SlotState.FILLING
    assert not training.overlap.on
    assert "overlap is OFF" in training.said[-1]

    at_boundary = training.live()
    assert training.stager.stage(training.step, overlap=True)  # the same grant, at the next boundary
    assert training.stager.sealed_step == training.step
    assert same(training.stored(), at_boundary)


def test_a_step_that_was_counted_without_a_hook_has_every_byte_compared(late_training: Training) -> None:
    """As by a CUDA graph that is replayed from some step on: no version tells of it."""
    training = late_training
    training.prove()
    training.stager.stage(training.step, overlap=True)
    training.stager._pending.work.wait()  # type: ignore[union-attr]

    training.run(lambda: Foreign(training.optimizer).step())

    assert training.stager.settle(training.step) is False
    assert len(training.link.sealed) == VALIDATIONS
    assert not training.overlap.on


def test_a_step_past_the_hook_that_the_whole_copy_came_after_is_found(late_training: Training) -> None:
    """The copy equals what is there, byte for byte, and is not what was true at the boundary."""
    training = late_training
    training.prove()
    training.stager.stage(training.step, overlap=True)

    training.run(lambda: Foreign(training.optimizer).step())  # and only then the thread has its turn

    assert training.stager.settle(training.step) is False
    assert len(training.link.sealed) == VALIDATIONS
    assert not training.overlap.on


def test_weights_that_are_swapped_while_they_are_copied_and_swapped_back_are_found(late_training: Training) -> None:
    """As for a validation, through `.data`: no version tells of it, and at the next step everything is as it was."""
    training = late_training
    training.prove()
    training.stager.stage(training.step, overlap=True)

    kept = [param.detach().clone() for param in training.model.parameters()]
    through_data(training.model)
    training.stager._pending.work.wait()  # type: ignore[union-attr]
    for param, before in zip(training.model.parameters(), kept, strict=True):
        param.data.copy_(before)
    training.run()

    assert training.settled[-1] is False
    assert len(training.link.sealed) == VALIDATIONS
    assert not training.overlap.on
    assert "model/0.weight changed" in training.said[-1]


@pytest.mark.parametrize("proved", [True, False])
def test_memory_that_is_taken_from_a_tensor_is_not_read(proved: bool, training: Training) -> None:
    """Its address was asked for when it was copied: that was the end of the process."""
    if proved:
        training.prove()
    at_boundary = training.live()
    training.stager.stage(training.step, overlap=True)
    if training.stager._pending is not None:
        weight = training.model[0].weight
        assert isinstance(weight, Tensor)
        weight.untyped_storage().resize_(0)

    assert training.stager.settle(training.step) is not proved  # the first ones were copied before
    assert not training.overlap.on
    assert proved or same(training.stored(), at_boundary)


def test_a_skipped_step_is_no_reason(late_training: Training) -> None:
    training = late_training
    training.prove()
    at_boundary = training.live()
    training.stager.stage(training.step, overlap=True)

    training.run(lambda: None)  # the GradScaler saw an infinity
    assert training.stager.settle(training.step) is True

    assert {name for name, tensor in training.stored().items() if not torch.equal(tensor, at_boundary[name])} == set()
    assert training.stager.sealed_step == training.step - 1
    assert training.overlap.on


def test_a_nan_is_equal_to_itself(late_training: Training) -> None:
    training = late_training
    with torch.no_grad():
        training.model[0].weight.fill_(torch.nan)  # type: ignore[union-attr, operator]

    training.prove()

    assert training.overlap.on
    assert not training.overlap.validating


# In between ----------------------------------------------------------------------------------------------------------


def test_leaving_waits_for_the_copy_and_seals_it(training: Training) -> None:
    training.prove()
    at_boundary = training.live()
    training.stager.stage(training.step, overlap=True)

    assert training.stager.settle(training.step)

    assert training.stager.sealed_step == training.step
    assert same(training.stored(), at_boundary)


def test_the_next_snapshot_waits_for_the_one_before(training: Training) -> None:
    training.prove()
    training.stager.stage(training.step, overlap=True)

    assert training.stager.stage(training.step)  # the end of the loop, at the same step

    assert training.stager.sealed_step == training.step
    assert len(training.link.sealed) == VALIDATIONS + 1


def test_what_the_copy_took_is_told_apart_from_what_the_loop_waited(late_training: Training) -> None:
    training = late_training
    training.prove()
    training.stager.stage(training.step, overlap=True)
    training.run()

    told = training.link.sealed[-1]
    assert told.step == training.step - 1
    assert told.stall_s > 0
    assert told.copy_s > 0
    assert training.link.sealed[0].stall_s == training.link.sealed[0].copy_s


def test_ctrl_c_while_waiting_leaves_the_slot_to_the_thread(late_training: Training) -> None:
    training = late_training
    training.prove()
    at_boundary = training.live()
    training.stager.stage(training.step, overlap=True)
    pending = training.stager._pending
    assert pending is not None

    def interrupted(timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    result, pending.work.result.result = pending.work.result.result, interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        training.stager.settle(training.step)
    pending.work.result.result = result  # type: ignore[method-assign]

    assert training.stager.pending  # nobody fills the slot as long as the thread may write to it
    assert training.stager.settle(training.step)
    assert same(training.stored(), at_boundary)


def test_a_failed_copy_is_raised_and_seals_nothing(late_training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("the device is gone")

    training = late_training
    training.prove()
    monkeypatch.setattr("harness.trainer.staging.overlap._copy", fails)
    training.stager.stage(training.step, overlap=True)

    with pytest.raises(OSError, match="the device is gone"):
        training.run()

    assert len(training.link.sealed) == VALIDATIONS
    assert not training.stager.pending
    monkeypatch.undo()
    assert training.stager.stage(training.step)


@pytest.mark.parametrize("comes_to_nothing", [False, RuntimeError("out of memory"), KeyboardInterrupt()])
def test_what_was_asked_for_and_came_to_nothing_is_taken_at_the_next_boundary(
    comes_to_nothing: bool | BaseException,
) -> None:
    """A loop that lives with the error was never saved again: the agent waited for the seal, and the loop for it."""

    class Settling:
        def settle(self, step: int, *, updating: bool) -> bool:
            if isinstance(comes_to_nothing, BaseException):
                raise comes_to_nothing
            return comes_to_nothing

    nobody: Any = None
    stager: Any = Settling()
    boundary = Boundary(accumulate=None, sees_optimizers=True)
    boundary.step, boundary.next_due = 5, 9

    with contextlib.suppress(RuntimeError, KeyboardInterrupt):
        Saving(nobody, stager, boundary, print).settle(updating=True)

    assert (boundary.overdue, boundary.next_due) == (True, 6)


def test_a_slot_that_cannot_be_pinned_ends_no_thread_where_warnings_are_errors(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cudaHostRegister of 4096 bytes: error 1")

    monkeypatch.setattr("harness.trainer.copy.to_slot.pin", refuse)
    assert training.link.slot is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.stager._pin(torch.device("cuda:0"), training.link.slot)


def test_no_snapshot_is_taken_where_a_copy_would_go_astray(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise to_slot.MemoryTaken("cudaHostRegister of 4096 bytes: error 712")

    monkeypatch.setattr("harness.trainer.copy.to_slot.pin", refuse)
    assert training.link.slot is not None
    training.stager._pin(torch.device("cuda:0"), training.link.slot)

    with pytest.raises(StateError, match="without being unregistered"):
        training.stager.stage(training.step)


def test_a_slot_that_cannot_be_pinned_is_told_once(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cudaHostRegister of 4096 bytes: error 1")

    monkeypatch.setattr("harness.trainer.copy.to_slot.pin", refuse)
    assert training.link.slot is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            training.stager._pin(torch.device("cuda:0"), training.link.slot)

    assert ["not pinned" in str(one.message) for one in told] == [True]
    assert training.stager.stage(training.step)


# What may be late ----------------------------------------------------------------------------------------------------


def names_of_late(states: dict[str, object]) -> set[str]:
    tensors = capture.capture(states).tensors
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    return {late.name for late in Overlap(print, LastMoment()).choose(states, tensors, targets)}


def test_only_what_a_torch_optimizer_owns_is_late() -> None:
    model, ema = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
    model.register_buffer("table", torch.ones(WIDE, WIDE))
    frozen = nn.Linear(WIDE, WIDE).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()

    late = names_of_late({"model": model, "ema": ema, "frozen": frozen, "optimizer": optimizer})

    assert late == {"model/weight", "optimizer/state/0/exp_avg", "optimizer/state/0/exp_avg_sq"}


def test_a_tensor_that_is_no_single_block_is_not_late() -> None:
    conv = nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert names_of_late({"conv": conv, "optimizer": torch.optim.SGD(conv.parameters())}) == set()


def test_a_buffer_that_begins_where_a_parameter_does_is_not_late() -> None:
    flat = torch.zeros(2 * WIDE, WIDE)
    model = nn.Linear(WIDE, WIDE, bias=False)
    model.weight = nn.Parameter(flat[:WIDE])
    other = nn.Module()
    other.register_buffer("all", flat)

    assert names_of_late({"other": other, "optimizer": torch.optim.SGD(model.parameters())}) == set()


def test_tied_weights_are_late_once() -> None:
    model = nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False))
    model[1].weight = model[0].weight

    assert names_of_late({"model": model, "optimizer": torch.optim.SGD(model.parameters())}) == {"model/0.weight"}


def test_an_overlap_that_has_nothing_to_do_says_so() -> None:
    model, said = nn.Linear(WIDE, WIDE), list[str]()
    states: dict[str, object] = {"model": model}
    tensors = capture.capture(states).tensors

    for _ in range(2):
        Overlap(said.append, LastMoment()).choose(states, tensors, tensors)

    assert ["overlap is OFF" in line for line in said] == [True, True]
