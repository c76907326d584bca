"""What is in no state_dict comes back: flags, gradients, buffers that are not persistent, groups that were added."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from harness.core import tree
from harness.errors import StateError
from harness.trainer.state import gradients
from harness.trainer.state.capture import Captured, capture
from harness.trainer.state.gradients import Habit
from harness.trainer.state.restore import restore
from harness.trainer.state.unlisted import Unlisted
from tests.support.broken_off import Life, check_goes_on, rows
from tests.support.played_agent import no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)


class Counting(nn.Module):
    """A module with tensors that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.count = torch.zeros(())
        self.mean = torch.zeros(())
        self.last: Tensor | None = None
        self.constant = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x * self.constant)
        return self.last


class Program:
    """A model and its optimizer, as a script makes them."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.states: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.warned: list[str] = []
        self.watch()

    def watch(self) -> None:
        """The Checkpointer is made."""
        self.unlisted = Unlisted(self.states, self.warned.append)
        for optimizer in self.states.values():
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_post_hook(lambda stepped, *_: self.unlisted.gradients.stepped(stepped, 0))
        self.unlisted.begin()

    def backward(self) -> None:
        self.model(torch.ones(2, 3)).sum().backward()

    def step(self, zero: Callable[[], None] = lambda: None) -> None:
        self.backward()
        self.optimizer.step()
        zero()

    def capture(self, *, sure: bool = True) -> Captured:
        return capture(self.states, self.unlisted, sure=sure)

    def restore(self, captured: Captured) -> None:
        """As another process does: the small state was JSON meanwhile."""
        stored = {name: tensor.detach().clone() for name, tensor in captured.tensors.items()}
        restore(self.states, tree.loads(tree.dumps(captured.tree)), stored, self.unlisted)

    @property
    def grads(self) -> list[Tensor | None]:
        return [param.grad for param in self.model.parameters()]


def stored_grads(captured: Captured) -> list[str]:
    return [name for name in captured.tensors if name.endswith("/grad")]


# ---- requires_grad --------------------------------------------------------------------------------------------------


def flags(program: Program) -> list[bool]:
    return [param.requires_grad for param in program.model.parameters()]


def test_flags_that_have_changed_come_back() -> None:
    before, after = Program(), Program()
    before.model[0].requires_grad_(False)

    after.restore(before.capture())

    assert flags(after) == [False, False, True, True]


def test_flags_that_have_not_changed_are_the_programs_own() -> None:
    """The user has edited the script, and freezes a layer from now on."""
    before = Program()
    frozen = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 1))
    after = Program(frozen)

    after.restore(before.capture())

    assert flags(after) == [False, False, True, True]


def test_a_flag_that_code_on_the_way_has_changed_is_as_it_was_at_the_beginning() -> None:
    before, after = Program(), Program()
    after.model[0].requires_grad_(False)

    after.restore(before.capture())

    assert flags(after) == [True] * 4


def test_a_flag_that_has_changed_back_is_still_stored() -> None:
    """In the next life it may differ on the way."""
    program = Program()
    program.model[0].requires_grad_(False)
    program.capture()
    program.model[0].requires_grad_(True)

    assert program.capture().tree["model"]["requires_grad"] == {"0.weight": True, "0.bias": True}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_flag_that_changes_inside_ddp_is_refused_with_the_remedy() -> None:
    program = Program(DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))))
    program.capture()
    program.model.module[0].requires_grad_(False)

    with pytest.raises(StateError, match=r"requires_grad of 0\.bias has changed .* learning rate of 0"):
        program.capture()


# ---- training mode --------------------------------------------------------------------------------------------------


def modes(module: nn.Module) -> list[bool]:
    return [child.training for child in module.modules()]


def test_a_module_that_was_put_into_evaluation_mode_comes_back_so() -> None:
    before, after = Program(), Program()
    before.model[1].eval()
    after.model.eval()  # on the way

    after.restore(before.capture())

    assert modes(after.model) == [True, True, False]


def test_modes_that_have_not_changed_are_the_programs_own() -> None:
    before = Program()
    after = Program(nn.Sequential(nn.Linear(3, 4).eval(), nn.Linear(4, 1)))

    after.restore(before.capture())

    assert modes(after.model) == [True, False, True]


def test_modes_are_kept_by_names_without_those_of_wrappers() -> None:
    before, after = Program(nn.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))), Program()
    before.model.module[0].eval()

    after.restore(before.capture())

    assert modes(after.model) == [True, False, True]


def test_modes_are_stored_by_the_path_of_each_module() -> None:
    program = Program()
    program.model.eval()

    assert program.capture().tree["model"]["training"] == {"": False, "0": False, "1": False}


def test_a_snapshot_of_an_older_version_changes_no_mode() -> None:
    before, after = Program(), Program()
    captured = before.capture()
    del captured.tree["model"]["training"]
    after.model.eval()

    after.restore(captured)

    assert modes(after.model) == [False, False, False]


def test_a_norm_that_was_frozen_or_thawed_by_its_statistics_comes_back_so() -> None:
    def made() -> Program:
        program = Program(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
        program.model[1].track_running_stats = False  # as BaseFinetuning of Lightning freezes
        program.watch()
        return program

    before, after = made(), made()
    before.model[0].track_running_stats, before.model[1].track_running_stats = False, True
    after.model[2].track_running_stats = False  # on the way

    after.restore(before.capture())

    assert [norm.track_running_stats for norm in after.model] == [False, True, True]


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_training_that_stays_in_evaluation_mode_goes_on_in_it(evaluated: bool) -> None:
    def program(life: Life) -> Any:
        batches = DataLoader(rows(12), batch_size=4, shuffle=True)
        ckpt = life.begin()
        for epoch in ckpt.epochs(3):
            for (x,) in ckpt.batches(batches):
                life.step(x)
                if evaluated and life.ckpt.batch == 1:
                    with ckpt.evaluating():
                        life.model.eval()
            if epoch == 0:
                life.model[1].eval()
            elif evaluated:
                life.model.train()
        return life.outcome

    check_goes_on(program, (1, 2, 3, 4, 5, 8))


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_a_group_that_was_added_is_added_again() -> None:
    def grow(program: Program) -> None:
        added = program.states["head"] = nn.Linear(1, 1)
        program.watch()
        program.optimizer.add_param_group({"params": list(added.parameters()), "lr": 0.5})

    before, after = Program(), Program()
    grow(before)
    after.states["head"] = nn.Linear(1, 1)
    after.watch()

    after.restore(before.capture())

    assert [len(group["params"]) for group in after.optimizer.param_groups] == [4, 2]
    assert after.optimizer.param_groups[1]["lr"] == 0.5
    assert after.optimizer.param_groups[1]["params"][0] is after.states["head"].weight


def test_a_group_that_the_program_has_added_by_itself_is_not_added_twice() -> None:
    before, after = Program(), Program()
    for program in (before, after):
        program.states["head"] = nn.Linear(1, 1)
        program.watch()
        program.optimizer.add_param_group({"params": list(program.states["head"].parameters())})

    after.restore(before.capture())

    assert len(after.optimizer.param_groups) == 2


def test_a_group_that_could_not_be_added_again_is_refused_at_once() -> None:
    program = Program()
    program.optimizer.add_param_group({"params": list(nn.Linear(1, 1).parameters())})

    with pytest.raises(StateError, match=r"param_groups\[1\] was added during the training.*give that module"):
        program.capture()


def test_a_group_that_was_there_before_the_training_need_not_be_known() -> None:
    program = Program()
    program.optimizer.add_param_group({"params": list(nn.Linear(1, 1).parameters())})
    program.watch()

    assert program.capture().tree["optimizer"]["groups"] == 2


# ---- gradients ------------------------------------------------------------------------------------------------------


def dropped(program: Program) -> None:
    program.optimizer.zero_grad()


def zeroed(program: Program) -> None:
    program.optimizer.zero_grad(set_to_none=False)


def kept(program: Program) -> None: ...


def halved(program: Program) -> None:
    for grad in program.grads:
        assert grad is not None
        grad.mul_(0.5)


@pytest.mark.parametrize(
    ("treat", "habit"),
    [(dropped, Habit.DROPPED), (zeroed, Habit.ZEROED), (kept, Habit.KEPT), (halved, Habit.KEPT)],
)
def test_what_a_program_does_with_its_gradients_is_known_after_two_steps(
    treat: Callable[[Program], None], habit: Habit
) -> None:
    program = Program()
    for _ in range(2):
        program.step()
        treat(program)

    watched = program.unlisted.gradients.of(program.optimizer)
    assert watched is not None
    assert watched.habit is habit


@pytest.mark.parametrize("treat", [dropped, zeroed, kept, halved])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("treated", [True, False])
def test_the_next_step_finds_the_gradients_that_it_would_have_found(
    treat: Callable[[Program], None], steps: int, treated: bool
) -> None:
    """The boundary comes after the program has treated them, or before."""
    before, after = Program(), Program()
    for step in range(steps):
        before.step()
        if treated or step < steps - 1:
            treat(before)

    after.restore(before.capture())
    for program in (before, after):
        if not treated and treat is not halved:
            treat(program)
        program.backward()

    assert all(torch.equal(a, b) for a, b in zip(before.grads, after.grads, strict=True))  # type: ignore[arg-type]


def test_consumed_gradients_are_not_stored() -> None:
    program = Program()
    for _ in range(2):
        program.optimizer.zero_grad()
        program.step()

    captured = program.capture()

    assert stored_grads(captured) == []
    assert "zero_grads" not in captured.tree["model"]


def test_a_layout_counts_no_gradients_of_which_nothing_is_known_yet() -> None:
    program = Program()
    program.step()

    assert stored_grads(program.capture(sure=False)) == []
    assert len(stored_grads(program.capture(sure=True))) == 4


def test_pending_gradients_are_stored_and_pending_again() -> None:
    before, after = Program(), Program()
    before.step(before.optimizer.zero_grad)
    before.backward()

    after.restore(before.capture())

    assert all(torch.equal(a, b) for a, b in zip(before.grads, after.grads, strict=True))  # type: ignore[arg-type]
    assert len(stored_grads(after.capture())) == 4


def test_gradients_that_the_start_has_made_by_itself_are_gone() -> None:
    before, after = Program(), Program()
    before.step(before.optimizer.zero_grad)
    after.backward()

    after.restore(before.capture())

    assert after.grads == [None] * 4


def test_gradients_that_are_views_of_a_bucket_stay_views() -> None:
    """DistributedDataParallel has made them so."""
    before, after = Program(), Program()
    before.backward()
    after.backward()
    buckets = after.grads

    after.restore(before.capture())

    assert all(a is b for a, b in zip(after.grads, buckets, strict=True))


def test_a_pending_sparse_gradient_is_told_once() -> None:
    program = Program(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    program.model(torch.tensor([1])).sum().backward()

    program.capture()
    program.capture()

    assert len(program.warned) == 1
    assert "not bit-identical" in program.warned[0]


def test_gradients_of_parameters_that_are_used_in_turns_wait_for_a_slow_optimizer() -> None:
    """Experts: in most batches, those that are watched have none."""

    def program(life: Life) -> Any:
        gate = nn.Linear(4, 4)
        experts = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))
        quick, slow = (torch.optim.SGD(module.parameters(), lr=0.05) for module in (gate, experts))
        ckpt = life.begin_with(gate=gate, experts=experts, quick=quick, slow=slow)
        for step in ckpt.steps(14):
            life.is_alive()
            used = range(4) if step % 4 == 3 else [1 + step % 2]
            hidden = gate(torch.randn(4, 4))
            quick.zero_grad()
            sum(experts[each](hidden).square().mean() for each in used).backward()  # type: ignore[union-attr]
            quick.step()
            if step % 4 == 3:
                slow.step()
                slow.zero_grad()
        return dict(experts.state_dict())

    check_goes_on(program, (2, 5, 6, 7, 9, 10, 13, (5, 9)))


def test_consumed_gradients_of_a_slow_optimizer_are_stored_until_it_is_known_that_they_are() -> None:
    program = Program()
    program.optimizer._optimizer_step_post_hooks.clear()  # the test itself tells of the steps
    stored = []
    for step in range(12):
        if step % 4 == 0:
            program.optimizer.zero_grad()
            program.backward()
            program.optimizer.step()
            program.unlisted.gradients.stepped(program.optimizer, step)
        program.unlisted.gradients.completed = step + 1
        stored.append(len(stored_grads(program.capture())))

    assert stored == [4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0]


def test_no_gradient_is_noted_of_an_optimizer_that_steps_at_each_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost time with each parameter."""
    program = Program()
    program.optimizer._optimizer_step_post_hooks.clear()
    monkeypatch.setattr(gradients._Consumed, "note", lambda _: pytest.fail("noted"))
    for step in range(4):
        program.optimizer.zero_grad()
        program.backward()
        program.optimizer.step()
        program.unlisted.gradients.stepped(program.optimizer, step)


def test_watching_leaves_nothing_behind() -> None:
    program = Program()
    program.step()
    program.unlisted.remove()
    program.optimizer.zero_grad()
    program.backward()

    watched = program.unlisted.gradients.of(program.optimizer)
    assert watched is not None
    assert not watched.pending


# ---- buffers that are not persistent --------------------------------------------------------------------------------


class Rotary(nn.Module):
    """A table that is computed once, and a cache that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("cache", torch.zeros(4), persistent=False)


def write(model: Rotary) -> None:
    model.cache.add_(1)


def replace(model: Rotary) -> None:
    model.cache = torch.ones(4)


def enlarge(model: Rotary) -> None:
    model.cache = torch.arange(9.0)


def register(model: Rotary) -> None:
    model.register_buffer("late", torch.arange(3.0), persistent=False)


def write_to_data(model: Rotary) -> None:
    model.cache.data.add_(1)


def move_in_data(model: Rotary) -> None:
    model.table.data.copy_(torch.roll(model.table, 1))


@pytest.mark.parametrize("change", [write, replace, enlarge, register, write_to_data, move_in_data])
def test_a_buffer_that_has_changed_comes_back(change: Callable[[Rotary], None]) -> None:
    before, after = Rotary(), Rotary()
    program, resumed = Program(before), Program(after)
    change(before)

    resumed.restore(program.capture())

    live = dict(after.named_buffers())
    assert all(torch.equal(buffer, live[name]) for name, buffer in before.named_buffers())
    assert set(after.state_dict()) == {"weight"}


@pytest.mark.parametrize("size", [0, 1, 7, 64, 200_003])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64])
def test_a_buffer_of_any_size_that_is_written_to_through_its_data_is_noticed(size: int, dtype: torch.dtype) -> None:
    model = Rotary()
    model.register_buffer("odd", torch.ones(size + 1).to(dtype)[1:], persistent=False)
    program = Program(model)
    assert "buffers" not in program.capture().tree["model"]

    model.odd.data[-1:].mul_(2)

    assert program.capture().tree["model"].get("buffers", {}).keys() == ({"odd"} if size else set())


def test_a_buffer_that_never_changes_is_not_stored() -> None:
    model = Rotary()
    program = Program(model)
    write(model)

    assert set(program.capture().tree["model"]["buffers"]) == {"cache"}


def test_what_has_changed_once_is_stored_in_every_later_life() -> None:
    lives = [Rotary() for _ in range(3)]
    programs = [Program(model) for model in lives]
    write(lives[0])

    for one, next_one in itertools.pairwise(programs):
        next_one.restore(one.capture())

    assert torch.equal(lives[2].cache, torch.ones(4))


# ---- older snapshots ------------------------------------------------------------------------------------------------


def test_a_snapshot_of_an_older_version_changes_nothing_of_it() -> None:
    before, after = Program(), Program()
    after.model[0].requires_grad_(False)

    after.restore(capture(before.states))

    assert flags(after) == [False, False, True, True]


# ---- tensors that are plain attributes ------------------------------------------------------------------------------


def count_in_place(module: Counting) -> None:
    module.count += 1


def replace_the_mean(module: Counting) -> None:
    module.mean = module.mean * 0.9 + 1


@pytest.mark.parametrize(("change", "name"), [(count_in_place, "count"), (replace_the_mean, "mean")])
def test_a_tensor_that_is_a_plain_attribute_and_changes_is_told_once(
    change: Callable[[Counting], None], name: str
) -> None:
    module = Counting()
    program = Program(nn.Sequential(module))
    for _ in range(3):
        program.step()
        change(module)
        program.capture()

    (told,) = program.warned
    assert f"model.0.{name} is a tensor that changes" in told


def test_what_stays_as_it_is_and_what_each_step_makes_anew_is_not_told() -> None:
    program = Program(Counting())
    for _ in range(3):
        program.step()
        program.capture()

    assert program.warned == []
