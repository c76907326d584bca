"""A loader that Accelerate has prepared goes on with the very next batch, though it fetches one ahead."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from harness.errors import StateError
from harness.trainer.loaders.instrument import instrument
from tests.support.loaders import BATCHES, SAMPLERS, Augmented, capture_rng, make_loader, restore_rng, seed_all, train

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

BETWEEN_EPOCHS = BATCHES + 1
STOPS = [(epoch, handed) for epoch in (0, 1) for handed in (0, 1, 3, BATCHES - 1, BATCHES, BETWEEN_EPOCHS)]


def prepared(sampler: str, workers: str = "0 workers", **options: Any) -> Callable[[], Any]:
    """Makes a prepared loader."""
    return lambda: accelerate.Accelerator(cpu=True).prepare(make_loader(sampler, workers, **options))


def instrumented(loader: Any) -> Any:
    return instrument(loader, "loader", capture_rng, restore_rng)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_resumed_iteration_goes_on_as_if_nothing_had_happened(sampler: str) -> None:
    unbroken, _ = train(prepared(sampler), epochs=3)
    for stop in STOPS:
        before, snapshot = train(prepared(sampler), epochs=3, stop=stop)
        after, _ = train(prepared(sampler), epochs=3, resume=snapshot)
        assert before + after == unbroken, stop


@pytest.mark.parametrize(
    ("workers", "sampler", "stops"),
    [
        ("2 workers", "shuffle", [(0, 3), (1, 0), (1, BATCHES)]),
        ("2 workers", "generator", [(1, 1), (1, BETWEEN_EPOCHS)]),
        ("2 persistent workers", "shuffle", [(0, BATCHES - 1), (1, BATCHES)]),
        ("2 persistent workers", "lazy", [(1, 3)]),
    ],
)
def test_a_resumed_iteration_with_workers_goes_on_as_if_nothing_had_happened(
    workers: str, sampler: str, stops: list[tuple[int, int]]
) -> None:
    unbroken, _ = train(prepared(sampler, workers), epochs=3)
    for stop in stops:
        before, snapshot = train(prepared(sampler, workers), epochs=3, stop=stop)
        after, _ = train(prepared(sampler, workers), epochs=3, resume=snapshot)
        assert before + after == unbroken, stop


def test_resuming_twice_is_as_exact_as_once() -> None:
    unbroken, _ = train(prepared("shuffle"), epochs=3)
    one, first = train(prepared("shuffle"), epochs=3, stop=(1, 2))
    two, second = train(prepared("shuffle"), epochs=3, stop=(1, 4), resume=first)
    three, _ = train(prepared("shuffle"), epochs=3, resume=second)
    assert one + two + three == unbroken


def test_it_hands_out_what_accelerate_hands_out() -> None:
    seed_all(1)
    loader = prepared("shuffle")()
    theirs = [list(loader) for _ in range(2)]
    seed_all(1)
    ours_of = instrumented(prepared("shuffle")())
    ours = [list(ours_of.iterate()) for _ in range(2)]
    assert ours == theirs


def test_accelerate_knows_the_last_batch_as_ever() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader = accelerator.prepare(make_loader("sequential"))
    ends = [accelerator.gradient_state.end_of_dataloader for _ in instrumented(loader).iterate()]
    assert ends == [False] * (BATCHES - 1) + [True]

    _, snapshot = train(prepared("sequential"), epochs=1, stop=(0, BATCHES - 2))
    assert snapshot is not None
    loader = accelerator.prepare(make_loader("sequential"))
    again = instrumented(loader)
    again.restore(snapshot.position, snapshot.rng)
    assert [accelerator.gradient_state.end_of_dataloader for _ in again.iterate()] == [False, True]


def test_a_plain_loop_over_it_is_redirected() -> None:
    loader = prepared("shuffle")()
    made = instrumented(loader)
    asked: list[Any] = []

    def on_iter(found: Any) -> Any:
        asked.append(found)
        return found.iterate()

    made.hook_iter(on_iter)
    assert len(list(loader)) == BATCHES
    assert asked == [made]
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert instrumented(loader) is made


def test_a_loop_that_was_left_is_not_under_way_any_more() -> None:
    made = instrumented(prepared("shuffle")())
    gc.disable()  # it is gone without a collection
    try:
        for _ in range(3):
            for _ in made.iterate():
                break
            assert not made.position()["under_way"]
    finally:
        gc.enable()


def test_two_iterations_at_once_are_refused() -> None:
    made = instrumented(prepared("shuffle")())
    one, other = made.iterate(), made.iterate()
    next(one), next(other)
    with pytest.raises(StateError, match="2 iterations of loader are under way"):
        made.position()


def test_a_batch_drawn_before_the_restore_is_refused() -> None:
    _, snapshot = train(prepared("shuffle"), epochs=1, stop=(0, 3))
    assert snapshot is not None
    made = instrumented(prepared("shuffle")())
    batches = made.iterate()
    next(batches)
    with pytest.raises(StateError, match="before the snapshot was restored"):
        made.restore(snapshot.position, snapshot.rng)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def test_what_cannot_be_followed_is_refused_with_the_remedy() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    dispatching = accelerate.data_loader.prepare_data_loader(
        make_loader("shuffle"), dispatch_batches=True, put_on_device=True
    )
    with pytest.raises(StateError, match="dispatch_batches=False"):
        instrumented(dispatching)
    stateful = accelerate.data_loader.prepare_data_loader(make_loader("shuffle"), use_stateful_dataloader=True)
    with pytest.raises(StateError, match="use_stateful_dataloader"):
        instrumented(stateful)
    skipping = accelerate.skip_first_batches(accelerator.prepare(make_loader("shuffle")), 2)
    if skipping.skip_batches:
        with pytest.raises(StateError, match="skip_first_batches"):
            instrumented(skipping)
    stream = accelerate.data_loader.prepare_data_loader(torch.utils.data.DataLoader(Stream()), dispatch_batches=False)
    with pytest.raises(StateError, match="IterableDataset"):
        instrumented(stream)


def test_a_snapshot_of_a_plain_loader_is_not_one_of_a_prepared_one() -> None:
    _, snapshot = train(lambda: make_loader("shuffle"), epochs=1, stop=(0, 3))
    assert snapshot is not None
    with pytest.raises(StateError, match="another kind of loader"):
        instrumented(prepared("shuffle")()).restore(snapshot.position, snapshot.rng)


def test_reads_are_not_repeated_but_for_the_batch_ahead() -> None:
    _, snapshot = train(prepared("sequential"), epochs=1, stop=(0, 3))
    assert snapshot is not None
    dataset = Augmented()
    made = instrumented(prepared("sequential", dataset=dataset)())
    made.restore(snapshot.position, snapshot.rng)
    list(made.iterate())
    assert dataset.reads == list(range(12, 22))
