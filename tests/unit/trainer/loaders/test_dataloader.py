from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset, _utils
from torchdata.stateful_dataloader import StatefulDataLoader

from harness.core import tree
from harness.errors import StateError
from harness.trainer.loaders.generators import generators_in
from harness.trainer.loaders.hook import switch
from harness.trainer.loaders.instrument import instrument
from tests.support.loaders import (
    BATCH,
    BATCHES,
    SAMPLERS,
    SIZE,
    Augmented,
    Batched,
    Chunked,
    Meddling,
    Reporting,
    capture_rng,
    make_loader,
    mark_dataset,
    restore_rng,
    seed_all,
    train,
)
from tests.support.patience import HANG_S

BETWEEN_EPOCHS = BATCHES + 1
STOPS = [(epoch, handed) for epoch in (0, 1) for handed in (0, 1, 3, BATCHES, BETWEEN_EPOCHS)]
ROOT = Path(__file__).parents[4]

# The loaders of torchdata and torch are used as they are, and so are their warnings.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def instrumented(loader: Any, **options: Any) -> Any:
    return instrument(loader, "loader", capture_rng, restore_rng, **options)


# ------------------------------------------------------------------------------------------ goes on with the next batch


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_resumed_iteration_goes_on_as_if_nothing_had_happened(sampler: str) -> None:
    unbroken, _ = train(lambda: make_loader(sampler), epochs=3)
    for stop in STOPS:
        before, snapshot = train(lambda: make_loader(sampler), epochs=3, stop=stop)
        after, _ = train(lambda: make_loader(sampler), epochs=3, resume=snapshot)
        assert before + after == unbroken, stop


@pytest.mark.parametrize(
    ("workers", "sampler", "stops"),
    [
        ("2 workers", "shuffle", [(0, 3), (1, 0), (1, BATCHES)]),
        ("2 workers", "generator", [(1, 1), (1, BETWEEN_EPOCHS)]),
        ("2 workers", "distributed", [(1, 3)]),
        ("2 workers", "lazy", [(0, 1), (1, 3)]),
        ("2 workers", "eager", [(1, 3)]),
        ("2 persistent workers", "shuffle", [(0, 0), (0, BETWEEN_EPOCHS), (1, 1), (1, BATCHES)]),
        ("2 persistent workers", "weighted", [(1, 3)]),
        ("2 persistent workers", "subset", [(0, 3)]),
        ("2 persistent workers", "batch sampler", [(1, 3)]),
        ("2 persistent workers", "lazy", [(0, BATCHES), (1, 3)]),
        ("2 persistent workers", "sequential", [(1, 3)]),
    ],
)
def test_a_resumed_iteration_with_workers_goes_on_as_if_nothing_had_happened(
    workers: str, sampler: str, stops: list[tuple[int, int]]
) -> None:
    unbroken, _ = train(lambda: make_loader(sampler, workers), epochs=3)
    for stop in stops:
        before, snapshot = train(lambda: make_loader(sampler, workers), epochs=3, stop=stop)
        after, _ = train(lambda: make_loader(sampler, workers), epochs=3, resume=snapshot)
        assert before + after == unbroken, stop


@pytest.mark.parametrize("workers", ["0 workers", "2 persistent workers"])
def test_resuming_twice_is_as_exact_as_once(workers: str) -> None:
    unbroken, _ = train(lambda: make_loader("shuffle", workers), epochs=3)
    one, first = train(lambda: make_loader("shuffle", workers), epochs=3, stop=(1, 2))
    two, second = train(lambda: make_loader("shuffle", workers), epochs=3, stop=(1, 4), resume=first)
    three, _ = train(lambda: make_loader("shuffle", workers), epochs=3, resume=second)
    assert one + two + three == unbroken


@pytest.mark.parametrize("stop", [1, 3, BATCHES])
@pytest.mark.parametrize(
    ("sampler", "workers"),
    [
        *((sampler, "0 workers") for sampler in SAMPLERS),
        ("shuffle", "2 workers"),
        ("generator", "2 persistent workers"),
    ],
)
def test_the_last_batch_is_handed_out_again(sampler: str, workers: str, stop: int) -> None:
    """Twice restored: before that batch, whose body leads to a place in it, and at that place."""

    def work(batches: Any) -> list[Any]:
        return [(batch, torch.rand(()).item(), random.random()) for batch in batches]

    seed_all(1)
    first = instrumented(make_loader(sampler, workers))
    work(first.iterate())
    iterator = first.iterate()
    for _ in range(stop - 1):
        next(iterator)
        torch.rand(())
    moment = first.moment()
    last = next(iterator), torch.rand(5).tolist()
    position, rng = first.position(), capture_rng()
    unbroken = work(iterator) + work(first.iterate())

    seed_all(2)
    again = instrumented(make_loader(sampler, workers))
    again.restore(position, rng)
    restore_rng(rng)
    iterator = again.iterate(moment)
    assert (next(iterator), torch.rand(5).tolist()) == last

    torch.rand(3)
    again.restore(position, rng)
    restore_rng(rng)
    assert again.position() == position
    assert work(iterator) + work(again.iterate()) == unbroken


@pytest.mark.parametrize("stop", [0, 1, 3, BATCHES, BETWEEN_EPOCHS])
@pytest.mark.parametrize(("sampler", "workers"), [(each, "0 workers") for each in SAMPLERS] + [("lazy", "2 workers")])
def test_an_iterator_that_is_begun_before_the_restore_continues(sampler: str, workers: str, stop: int) -> None:
    def rest(loader: Any, iterator: Any) -> list[Any]:
        return [*iterator, *loader.iterate(), capture_rng()]

    seed_all(1)
    first = instrumented(make_loader(sampler, workers))
    iterator = first.iterate()
    for _ in range(stop):
        next(iterator, None)
    position, rng = first.position(), capture_rng()
    unbroken = rest(first, iterator)

    seed_all(2)
    again = instrumented(make_loader(sampler, workers))
    iterator = again.iterate()
    again.restore(position, rng)
    restore_rng(rng)
    assert again.position() == position
    assert rest(again, iterator) == unbroken


def test_a_position_survives_being_taken_before_the_next_batch_is_asked_for() -> None:
    _, snapshot = train(lambda: make_loader("shuffle"), epochs=1, stop=(0, 3))
    assert snapshot is not None
    resumed = instrumented(make_loader("shuffle"))
    resumed.restore(snapshot.position, snapshot.rng)
    assert resumed.position() == snapshot.position
    resumed.iterate()
    again = instrumented(make_loader("shuffle"))
    again.restore(snapshot.position, snapshot.rng)
    iterator = again.iterate()
    assert again.position() == snapshot.position
    del iterator


@pytest.mark.parametrize("workers", ["0 workers", "2 persistent workers"])
def test_an_epoch_that_is_left_early_is_over(workers: str) -> None:
    def make() -> Any:
        return make_loader("shuffle", workers)

    unbroken, _ = train(make, epochs=3, leave_after=2)
    before, between = train(make, epochs=3, leave_after=2, stop=(0, BETWEEN_EPOCHS))
    after, _ = train(make, epochs=3, leave_after=2, resume=between)
    assert between is not None
    assert between.position["epoch"] is None
    assert before + after == unbroken
    before, middle = train(make, epochs=3, leave_after=2, stop=(1, 1))
    after, _ = train(make, epochs=3, leave_after=2, resume=middle)
    assert before + after == unbroken


def test_skipped_data_is_never_read() -> None:
    _, snapshot = train(lambda: make_loader("shuffle"), epochs=1, stop=(0, 4))
    dataset = Augmented()
    records, _ = train(lambda: make_loader("shuffle", dataset=dataset), epochs=1, resume=snapshot)
    assert dataset.reads == [item[0] for _, batch, _ in records for item in batch]
    assert len(dataset.reads) == SIZE - 4 * BATCH


def test_workers_never_read_skipped_data(tmp_path: Path) -> None:
    class Logged(Augmented):
        def __getitem__(self, index: int) -> Any:
            with (tmp_path / "reads").open("a") as file:
                file.write(f"{index}\n")
            return super().__getitem__(index)

    _, snapshot = train(lambda: make_loader("sequential", "2 persistent workers"), epochs=2, stop=(1, 4))
    train(lambda: make_loader("sequential", "2 persistent workers", dataset=Logged()), epochs=2, resume=snapshot)
    reads = Counter((tmp_path / "reads").read_text().split())
    assert reads == Counter(str(index) for index in range(4 * BATCH, SIZE))


def test_taking_a_position_draws_nothing() -> None:
    loader = instrumented(make_loader("lazy"))
    iterator = loader.iterate()
    next(iterator)
    before = capture_rng(), loader.position()
    assert (capture_rng(), loader.position()) == before


def test_a_shuffle_drawn_after_another_loader_started_is_replayed() -> None:
    def run(stop: int | None, resume: Any) -> tuple[list[Any], Any]:
        seed_all(3 if resume is None else 4)
        first, second = (instrumented(make_loader("shuffle")) for _ in range(2))
        if resume is not None:
            first.restore(resume[0], resume[2])
            second.restore(resume[1], resume[2])
        records: list[Any] = []
        for pair in zip(first.iterate(), second.iterate(), strict=True):
            records.append((pair, torch.rand(()).item()))
            if len(records) == stop:
                return records, (first.position(), second.position(), capture_rng())
        return records, None

    unbroken, _ = run(None, None)
    before, snapshot = run(2, None)
    after, _ = run(None, snapshot)
    assert before + after == unbroken


# ------------------------------------------------------------------------------------------------------- ordinary loops


@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
def test_an_ordinary_loop_is_counted_and_resumed(workers: str) -> None:
    def run(stop: int | None, resume: Any) -> tuple[list[Any], Any]:
        seed_all(3 if resume is None else 4)
        loader = make_loader("shuffle", workers)
        hooked = instrumented(loader)
        hooked.hook_iter(lambda it: it.iterate())
        if resume is not None:
            hooked.restore(*resume)
        records: list[Any] = []
        for index, (batch, _) in enumerate(zip(loader, range(100), strict=False)):
            records.append((batch, torch.rand(()).item()))
            if index + 1 == stop:
                return records, (hooked.position(), capture_rng())
        return records, None

    unbroken, _ = run(None, None)
    before, snapshot = run(2, None)
    after, _ = run(None, snapshot)
    assert len(unbroken) == BATCHES
    assert before + after == unbroken


def test_an_instrumented_loader_looks_like_itself() -> None:
    loader = make_loader("distributed")
    kind, dataset, batch_sampler, sampler = type(loader), loader.dataset, loader.batch_sampler, loader.sampler
    it = instrumented(loader)
    assert isinstance(loader, kind)
    assert (loader.dataset, loader.batch_sampler, loader.sampler) == (dataset, batch_sampler, sampler)
    assert len(loader) == len(it.iterate()) == BATCHES  # type: ignore[arg-type]
    assert type(loader).__name__ == "DataLoader"
    assert instrumented(loader) is it


def test_an_iteration_outside_of_the_harness_is_torch_s_own() -> None:
    seed_all(3)
    plain = list(make_loader("shuffle"))
    loader = make_loader("shuffle")
    it = instrumented(loader)
    seed_all(3)
    assert list(loader) == plain
    assert it.position()["epoch"] is None


def test_with_no_workers_nothing_changes_for_the_training() -> None:
    torchs = make_loader("shuffle")
    seed_all(3)
    plain = [(batch, torch.rand(()).item()) for _ in range(2) for batch in torchs]
    loader = instrumented(make_loader("shuffle"))
    seed_all(3)
    assert [(batch, torch.rand(()).item()) for _ in range(2) for batch in loader.iterate()] == plain


# -------------------------------------------------------------------------------------------------------------- workers


def test_every_batch_and_every_epoch_has_random_numbers_of_its_own() -> None:
    records, _ = train(lambda: make_loader("sequential", "2 persistent workers", dataset=Batched()), epochs=2)
    numbers = [number for _, batch, _ in records for item in batch for number in item[1:]]
    assert len(set(numbers)) == len(numbers) == 2 * SIZE * 4


def test_epochs_differ_even_where_nothing_draws_between_them_and_a_resume_knows_which_is_next() -> None:
    def start() -> Any:
        seed_all(3)
        return instrumented(make_loader("sequential", "2 persistent workers"))

    it = start()
    epochs = [list(it.iterate()), list(it.iterate())]
    snapshot = it.position(), capture_rng()
    epochs.append(list(it.iterate()))
    assert len({repr(epoch) for epoch in epochs}) == 3
    resumed = start()
    resumed.restore(*snapshot)
    restore_rng(snapshot[1])
    assert list(resumed.iterate()) == epochs[2]


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """A program in a process group of its own."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_draw_the_same(method: str) -> None:
    def run(context: str) -> list[Any]:
        seed_all(3)
        loader = make_loader("shuffle", "2 workers", num_workers=1, multiprocessing_context=context)
        return list(instrumented(loader).iterate())

    assert run(method) == run("fork")


def test_a_fork_server_that_a_loader_has_started_hands_no_blocked_signal_on() -> None:
    script = """
        import multiprocessing, signal
        from tests.support.loaders import make_loader, capture_rng, restore_rng
        from harness.trainer.loaders.instrument import instrument

        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            lock = context.Lock()  # starts the resource tracker, which would lift the mask
            loader = make_loader("shuffle", "2 workers", multiprocessing_context=context)
            next(instrument(loader, "it", capture_rng, restore_rng).iterate())
            process = context.Process(target=signal.pause)
            process.start()
            process.terminate()
            process.join()
            print(process.exitcode)
    """
    done = run_script(script)
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n"), done.stderr


def test_a_worker_is_shown_the_user_s_dataset_and_runs_the_user_s_init() -> None:
    loader = DataLoader(Reporting(), batch_size=2, num_workers=2, worker_init_fn=mark_dataset)
    batches = list(instrumented(loader).iterate())
    assert batches == [["Reporting True 0"] * 2, ["Reporting True 1"] * 2]
    assert loader.worker_init_fn is mark_dataset


def test_seeding_of_workers_can_be_declined() -> None:
    seed_all(3)
    plain = list(make_loader("shuffle", "2 workers"))
    seed_all(3)
    assert list(instrumented(make_loader("shuffle", "2 workers"), seed_workers=False).iterate()) == plain


def test_workers_survive_the_first_sigterm_and_any_sigint_and_no_second_sigterm() -> None:
    loader = make_loader("sequential", "2 persistent workers", dataset=Augmented(200))
    iterator = instrumented(loader).iterate()
    workers = loader._iterator._workers  # type: ignore[union-attr, attr-defined]
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)
        os.kill(worker.pid, signal.SIGTERM)
    for _ in range(30):
        next(iterator)
    assert all(worker.is_alive() for worker in workers)
    with contextlib.suppress(RuntimeError):  # torch's handler of SIGCHLD may say so before join does
        os.kill(workers[0].pid, signal.SIGTERM)
        workers[0].join(HANG_S)
    workers[0].join(HANG_S)
    assert workers[0].exitcode == -signal.SIGTERM


@pytest.mark.parametrize("signalled", [False, True])
def test_a_trainer_with_workers_alive_exits_at_once(signalled: bool) -> None:
    script = f"""
        import os, signal, sys
        from harness.trainer.loaders.instrument import instrument
        from tests.support.loaders import make_loader, capture_rng, restore_rng
        persistent, ordinary = make_loader("shuffle", "2 persistent workers"), make_loader("shuffle", "2 workers")
        iterators = [instrument(it, "it", capture_rng, restore_rng).iterate() for it in (persistent, ordinary)]
        for iterator in iterators:
            next(iterator)
        if {signalled}:
            signal.signal(signal.SIGTERM, lambda *_: None)
            os.killpg(0, signal.SIGTERM)
        for iterator in iterators:
            next(iterator)
        from torch.utils.data import _utils
        _utils.MP_STATUS_CHECK_INTERVAL = {HANG_S}  # what torch waits for a worker that does not end
        sys.exit(75)
    """
    done = run_script(script)
    assert (done.returncode, done.stderr) == (75, "")


# ---------------------------------------------------------------------------------------------------------- other kinds


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [(0, 0), (0, 3), (1, 2), (1, BATCHES), (0, BETWEEN_EPOCHS)])
def test_a_loader_with_its_own_state_is_used_as_it_is(workers: int, stop: tuple[int, int]) -> None:
    def run(stop: tuple[int, int] | None, resume: Any) -> tuple[list[Any], Any]:
        seed_all(3 if resume is None else 4)
        loader = StatefulDataLoader(range(SIZE), batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=list)
        it = instrumented(loader)
        it.hook_iter(lambda it: it.iterate())
        first, handed = 0, 0
        if resume is not None:
            first, handed, position, rng = resume
            it.restore(position, rng)
            restore_rng(rng)
        records: list[Any] = []
        for epoch in range(first, 3):
            iterator = iter(loader)
            if (epoch, handed) == stop and not resume:
                return records, (epoch, 0, it.position(), capture_rng())
            for batch in iterator:
                handed += 1
                records.append((epoch, batch, torch.rand(()).item()))
                if (epoch, handed) == stop:
                    return records, (epoch, handed, it.position(), capture_rng())
            del iterator
            handed = 0
            if stop == (epoch, BETWEEN_EPOCHS):
                return records, (epoch + 1, 0, it.position(), capture_rng())
        return records, None

    unbroken, _ = run(None, None)
    before, snapshot = run(stop, None)
    after, _ = run(None, snapshot)
    assert before + after == unbroken


def test_a_position_survives_being_stored() -> None:
    stateful = StatefulDataLoader(range(SIZE), batch_size=BATCH, shuffle=True)
    for loader in (make_loader("lazy"), make_loader("generator"), stateful, [1, 2]):
        it = instrumented(loader)
        iterator = it.iterate()
        next(iterator)
        position = it.position()
        assert tree.same(tree.loads(tree.dumps(position)), position)


def test_a_sequence_is_resumed_by_index() -> None:
    batches = [torch.tensor(float(number)) for number in range(5)]
    it = instrumented(batches)
    iterator = it.iterate()
    assert [next(iterator).item(), next(iterator).item()] == [0.0, 1.0]
    assert it.position() == {"kind": "sequence", "handed": 2}
    seed_all(8)
    snapshot, expected = (it.position(), capture_rng()), torch.rand(())
    resumed = instrumented(batches)
    resumed.restore(*snapshot)
    rest = resumed.iterate()
    assert torch.rand(()) == expected
    assert [batch.item() for batch in rest] == [2.0, 3.0, 4.0]
    assert len(list(resumed.iterate())) == 5
    with pytest.raises(StateError, match=r"ckpt\.batches"):
        resumed.hook_iter(lambda it: it.iterate())


# ------------------------------------------------------------------------------------------------------------- refusals


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Endless(DataLoader[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from super().__iter__()


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: DataLoader(Stream()), "StatefulDataLoader"),
        (lambda: DataLoader(Augmented(), batch_size=None), "give batch_size"),
        (lambda: DataLoader(Augmented(), num_workers=1, in_order=False), "remove in_order=False"),
        (lambda: Endless(Augmented()), "give it state_dict"),
        (lambda: iter([1]), r"use ckpt\.steps"),
        (lambda: 5, r"wrap it in one of them"),
        (lambda: SimpleNamespace(batch_sampler=None), "use the DataLoader that is inside of it"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_remedy(make: Any, remedy: str) -> None:
    with pytest.raises(StateError, match=remedy):
        instrumented(make())


@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
def test_a_sampler_that_draws_from_the_global_rng_at_every_batch_is_refused(workers: str) -> None:
    it = instrumented(DataLoader(Augmented(), sampler=Meddling(), num_workers=int(workers[0])))
    with pytest.raises(StateError, match=r"Meddling.*generator of its own"):
        list(it.iterate())


@pytest.mark.parametrize("workers", ["0 workers", "2 workers"])
def test_a_sampler_that_draws_a_chunk_at_a_time_is_refused_at_its_second_one(workers: str) -> None:
    it = instrumented(DataLoader(Augmented(), sampler=Chunked(), batch_size=BATCH, num_workers=int(workers[0])))
    with pytest.raises(StateError, match=r"Chunked.*between batches"):
        list(it.iterate())
    assert it.position()["epoch"] is None or it.position()["epoch"]["handed"] > 1


@pytest.mark.parametrize("sampler", [RandomSampler, SequentialSampler])
def test_torch_s_own_samplers_are_not_watched(sampler: Any) -> None:
    order = instrumented(DataLoader(Augmented(), sampler=sampler(Augmented())))._order
    assert order._draws_at_once


def test_a_loader_that_shows_another_class_than_its_own_is_followed() -> None:
    class Showing(DataLoader[Any]):
        @property
        def __class__(self) -> Any:
            return DataLoader

    unbroken, _ = train(lambda: Showing(Augmented(), collate_fn=list), epochs=2)
    before, snapshot = train(lambda: Showing(Augmented(), collate_fn=list), epochs=2, stop=(0, 2))
    after, _ = train(lambda: Showing(Augmented(), collate_fn=list), epochs=2, resume=snapshot)
    assert before + after == unbroken


def test_a_loader_whose_class_cannot_be_changed_is_refused() -> None:
    class Slotted(DataLoader[Any]):
        __slots__ = ("more",)

    loader = Slotted(Augmented())
    with pytest.raises(StateError, match=r"Slotted cannot be followed"):
        switch(loader, DataLoader)


def test_changed_data_is_refused_at_resume() -> None:
    _, snapshot = train(lambda: make_loader("shuffle"), epochs=1, stop=(0, 3))
    with pytest.raises(StateError, match="other batches than before"):
        train(lambda: make_loader("shuffle", dataset=Augmented(SIZE + 1)), epochs=1, resume=snapshot)
    _, snapshot = train(lambda: make_loader("sequential"), epochs=1, stop=(0, 5))
    with pytest.raises(StateError, match=r"had given 5 batches.*has 2 now"):
        train(lambda: make_loader("sequential", dataset=Augmented(8)), epochs=1, resume=snapshot)


def test_a_position_of_another_kind_of_loader_is_refused() -> None:
    with pytest.raises(StateError, match="another kind of loader"):
        instrumented(make_loader("shuffle")).restore(instrumented([1]).position(), capture_rng())


def test_two_iterations_at_once_have_no_position() -> None:
    it = instrumented(make_loader("shuffle"))
    first, second = it.iterate(), it.iterate()
    next(first)
    with pytest.raises(StateError, match="2 iterations of loader are under way"):
        it.position()
    del second
    assert it.position()["epoch"]["handed"] == 1


def test_a_generator_that_is_made_too_late_is_refused() -> None:
    _, snapshot = train(lambda: make_loader("generator"), epochs=1, stop=(0, 3))
    with pytest.raises(StateError, match=r"loader\.generator"):
        train(lambda: make_loader("shuffle"), epochs=1, resume=snapshot)


def test_a_batch_that_fails_counts_as_handed_out() -> None:
    class Hole(Augmented):
        def __getitem__(self, index: int) -> Any:
            if index == 5:
                raise OSError("hole")
            return index

    it = instrumented(make_loader("sequential", dataset=Hole()))
    iterator = it.iterate()
    next(iterator)
    with pytest.raises(OSError, match="hole"):
        next(iterator)
    resumed = instrumented(make_loader("sequential", dataset=Hole()))
    resumed.restore(it.position(), capture_rng())
    assert next(resumed.iterate()) == next(iterator) == [8, 9, 10, 11]


# ----------------------------------------------------------------------------------------------------------- generators


def test_generators_are_found_where_people_keep_them() -> None:
    class Transform:
        def __init__(self) -> None:
            self.rng = random.Random(1)

    subset = torch.utils.data.Subset(Augmented(), range(4))
    subset.dataset.transform = [Transform()]  # type: ignore[attr-defined]
    shared = torch.Generator()
    roots = {"generator": shared, "sampler": subset, "again": shared, "legacy": np.random.RandomState(1)}
    assert set(generators_in(roots)) == {
        "generator",
        "legacy",
        "sampler.dataset.own",
        "sampler.dataset.transform[0].rng",
    }
    assert generators_in({"dataset": [Transform() for _ in range(1000)]}) == {}
    assert generators_in({"dataset": TensorDataset(torch.zeros(3))}) == {}


def test_a_dropped_loader_takes_its_workers_along_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", HANG_S)  # what torch waits for a worker that does not end
    gc.disable()
    try:
        loader = make_loader("shuffle", "2 persistent workers")
        it = instrumented(loader)
        next(it.iterate())
        workers = loader._iterator._workers  # type: ignore[union-attr, attr-defined]
        del it, loader
        assert [worker.is_alive() for worker in workers] == [False, False]
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        gc.enable()


def test_a_loader_outlives_its_instruments_and_can_be_instrumented_again() -> None:
    loader = make_loader("shuffle")
    it = instrumented(loader)
    it.hook_iter(lambda it: it.iterate())
    del it
    gc.collect()
    assert len(list(loader)) == BATCHES
    again = instrumented(loader)
    iterator = again.iterate()
    next(iterator)
    assert again.position()["epoch"]["handed"] == 1
    assert len(type(loader).__mro__) == len(DataLoader.__mro__) + 2
