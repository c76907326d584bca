"""What a program's own class counts comes back as it was, in the containers that are there; the rest is warned of."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from typing import Any

import pytest
import torch

from harness.integrations.counts import Counts, Looks, pack, put_times_back, take_times, unpack


class State:
    best: float | None = None


class Framework:
    def __init__(self) -> None:
        self.step, self.rate = 0, 1.0
        self.state = State()

    def evaluate(self, best: float) -> None:
        self.state.best = best

    def log(self) -> None:
        def add(rate: float) -> None:
            self.rate += rate

        add(1.0)
        self.logs += 1

    logs = 0

    @property
    def epoch(self) -> int:
        return 0

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = value


class Program(Framework):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.best: float | None = None
        self.sums: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.texts: Any = defaultdict(partial(deque, maxlen=2))
        self.window = deque([0.0], maxlen=3)
        self.buffer: Any = None
        self.weights = torch.ones(2)
        self.pair = (1, [2])
        self.constant = [1, {"a": 2}]
        self.rows: list[Any] = [0] * 20_000
        self.connected = False
        self.outputs: list[torch.Tensor] = []
        self.file = object()


@pytest.fixture
def warnings() -> list[str]:
    return []


def trained() -> Program:
    made = Program()
    made.step, made.tokens, made.best, made.pair, made.epoch = 3, 7, 0.5, (2, [3]), 1
    made.sums["train"]["loss"].append(1.5)
    made.texts["prompts"].extend(["b", "c"])
    made.window.append(1.0)
    made.buffer = [{"ids": torch.arange(3)}]
    return made


def begun(owner: Any, warnings: list[str]) -> Counts:
    made = Counts(owner, Framework, warnings.append)
    made.begin()
    return made


def test_what_has_changed_comes_back_in_the_containers_that_are_there(warnings: list[str]) -> None:
    owner = Program()
    counts = begun(owner, warnings)
    assert counts.changed() == {}
    vars(owner).update(vars(trained()))
    found = counts.changed()
    assert sorted(found) == ["best", "buffer", "pair", "sums", "texts", "tokens", "weights", "window"], (
        "and no constant"
    )

    other = Program()
    again = begun(other, warnings)
    inner, window = other.sums["train"], other.window
    again.restore(found)
    assert (other.step, other.tokens, other.best, other.pair) == (0, 7, 0.5, (2, [3]))
    assert other.sums["train"] is inner
    other.sums["train"]["new"].append(1)
    assert inner == {"loss": [1.5], "new": [1]}
    other.texts["prompts"].append("d")
    assert list(other.texts["prompts"]) == ["c", "d"]
    assert other.window is window
    assert list(window) == [0.0, 1.0]
    assert torch.equal(other.buffer[0]["ids"], torch.arange(3))
    assert warnings == []


def test_what_was_restored_is_stored_again_even_if_it_is_as_in_the_beginning(warnings: list[str]) -> None:
    owner = Program()
    counts = begun(owner, warnings)
    counts.restore({"tokens": 7})
    owner.tokens = 0
    assert counts.changed() == {"tokens": 0}


def test_a_copy_stays_as_it_is(warnings: list[str]) -> None:
    owner = Program()
    counts = begun(owner, warnings)
    owner.window.append(1.0)
    found = counts.changed()
    owner.window.append(2.0)
    assert found == {"window": deque([0.0, 1.0])}


def test_a_tensor_that_is_written_to_has_changed(warnings: list[str]) -> None:
    owner = Program()
    counts = begun(owner, warnings)
    owner.weights.add_(1)
    assert list(counts.changed()) == ["weights"]


def test_a_name_that_the_framework_assigns_of_another_object_or_the_program_assigns_too_is_the_program_s(
    warnings: list[str],
) -> None:
    class Own(Program):
        def count(self, step: int) -> None:
            self.step = step

    plain, own = Program(), Own()
    for owner in (plain, own):
        counts = begun(owner, warnings)
        owner.best, owner.step = 0.5, 3
        owner.log()
        assert counts.changed() == ({"best": 0.5} if owner is plain else {"best": 0.5, "step": 3})


def made_at_first_use() -> dict[str, Any]:
    inner: Any = defaultdict(list, loss=[1.5])
    return {
        "window": deque([1.0, 2.0], maxlen=2),
        "sums": inner,
        "counts": Counter({"b": 2, "a": 1}),
        "order": OrderedDict(b=1, a=2),
        "both": {"train": (deque([torch.ones(1)], 3), defaultdict(int, {"a": 1})), "eval": [defaultdict(None, a=1.0)]},
    }


def test_what_is_made_at_first_use_comes_back_as_the_container_that_it_was(warnings: list[str]) -> None:
    owner, other = Program(), Program()
    counts, again = begun(owner, warnings), begun(other, warnings)
    made = made_at_first_use()
    for name, value in made.items():
        setattr(owner, f"own_{name}", value)
    again.restore(unpack(pack(counts.changed(), torch.device("cpu"))))
    for name, value in made.items():
        found = getattr(other, f"own_{name}")
        assert repr(found) == repr(value)
        assert found is not value
    assert warnings == []


def test_the_same_items_in_another_container_are_a_change(warnings: list[str]) -> None:
    owner = Program()
    counts = begun(owner, warnings)
    owner.window = deque(owner.window, maxlen=5)
    owner.sums = {"train": Counter(), "eval": owner.sums["eval"]}
    found = counts.changed()
    assert repr(found) == (
        "{'sums': {'train': Counter(), 'eval': defaultdict(<class 'list'>, {})}, 'window': deque([0.0], maxlen=5)}"
    )
    other = Program()
    begun(other, warnings).restore(found)
    assert repr((other.sums, other.window)) == repr((owner.sums, owner.window))


class Named(dict[str, int]):
    """A dict of the program's own."""


@pytest.mark.parametrize("value", [defaultdict(lambda: 1), {"train": [Named()]}], ids=["defaultdict", "Named"])
def test_a_container_that_a_resume_could_not_make_is_warned_of_once(value: Any, warnings: list[str]) -> None:
    owner = Program()
    counts = begun(owner, warnings)
    owner.buffer = value
    assert counts.changed() == {}
    assert counts.changed() == {}
    assert len(warnings) == 1
    assert "Program.buffer changes, and a resume resets it: it has a" in warnings[0]


def test_a_container_of_any_kind_that_is_there_as_the_training_begins_is_filled(warnings: list[str]) -> None:
    owner, other = Program(), Program()
    for each in (owner, other):
        each.buffer = Named(a=1)
        each.pair = defaultdict(lambda: defaultdict(lambda: 1))  # type: ignore[assignment]
    counts, again = begun(owner, warnings), begun(other, warnings)
    owner.buffer["b"] = 2
    owner.pair["a"]["b"] += 1  # type: ignore[index]
    again.restore(unpack(pack(counts.changed(), torch.device("cpu"))))
    assert type(other.buffer) is Named
    assert other.buffer == {"a": 1, "b": 2}
    assert other.pair["a"]["b"] + other.pair["a"]["c"] == 3  # type: ignore[index]
    assert warnings == []


def test_what_an_older_snapshot_has_comes_back_as_ever(warnings: list[str]) -> None:
    """It has lists for deques."""
    owner = Program()
    counts = begun(owner, warnings)
    window = owner.window
    counts.restore({"window": [1.0, 2.0], "own": [3.0]})
    assert owner.window is window
    assert list(window) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("connected", True),
        ("outputs", [torch.ones(1, requires_grad=True)]),
        ("rows", [0] * 20_001),
        ("outputs", ["a" * 300_000] * 4),
    ],
)
def test_what_changes_and_cannot_be_stored_is_warned_of_once(name: str, value: Any, warnings: list[str]) -> None:
    owner = Program()
    counts = begun(owner, warnings)
    setattr(owner, name, value)
    assert counts.changed() == {}
    assert counts.changed() == {}
    assert len(warnings) == 1
    assert warnings[0].startswith(f"Program.{name} changes, and a resume resets it")


def test_the_framework_s_own_class_counts_nothing(warnings: list[str]) -> None:
    owner: Any = Framework()
    counts = begun(owner, warnings)
    owner.anything = 1
    assert counts.changed() == {}


TENSORS = [
    torch.tensor(True),
    torch.tensor([[1 + 2j, 3]]).conj(),
    torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
    torch.zeros(0, 4),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.ones(3, dtype=torch.float8_e4m3fn),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: str(tensor.dtype))
def test_a_tensor_that_is_packed_comes_back(tensor: torch.Tensor) -> None:
    values = {"first": torch.ones(1, dtype=torch.uint8), "list": [(tensor, 1), {"text": None}]}
    found = unpack(pack(values, torch.device("cpu")))
    (back, one), rest = found["list"]
    assert (back.dtype, back.shape, one, rest) == (tensor.dtype, tensor.shape, 1, {"text": None})
    assert back.float().equal(tensor.float()) if back.dtype.itemsize == 1 else torch.equal(back, tensor)


def test_a_list_that_grows_has_tensors_of_the_same_sizes() -> None:
    cpu = torch.device("cpu")
    sizes = {tuple(map(len, pack([torch.ones(1)] * count, cpu)["packed"])) for count in range(0, 1000, 100)}
    assert sizes == {(4096,)}
    assert [len(each) for each in pack([torch.ones(1025)], cpu)["packed"]] == [8192]


def test_times_are_taken_out_and_put_back() -> None:
    tree = {"a": [{"start_time": 1.0, "loss": 2.0}], "step_time": [1.0, 2.0], "time": "noon", "times": 1.0}
    packed = pack({"own_time": deque([1.0], 2), "load_time": defaultdict(list, time=[1.0])}, torch.device("cpu"))
    tree["packed"] = packed["values"]
    times = list(take_times(tree))
    emptied = tree.pop("packed")
    assert tree == {"a": [{"start_time": None, "loss": 2.0}], "step_time": None, "time": "noon", "times": 1.0}
    assert "1.0" not in repr(emptied)
    tree["packed"] = emptied
    put_times_back(tree, times)
    assert unpack(packed) == {"own_time": deque([1.0]), "load_time": {"time": [1.0]}}
    assert tree["a"] == [{"start_time": 1.0, "loss": 2.0}]
    assert tree["step_time"] == [1.0, 2.0]


def test_an_object_that_changes_in_its_first_steps_is_warned_of_once(warnings: list[str]) -> None:
    changing, still = Program(), Framework()
    looks = Looks(warnings.append, "show it")
    for step in range(5):
        changing.tokens = step
        looks.look([still, changing])
    assert warnings == ["Program.tokens changes, and a resume resets it: show it"]
