"""Lightning's fit: the boundaries of `Trainer.fit`, what it knows beside its model, the way to a snapshot's place.

Owns what the callbacks for `lightning` and for `pytorch_lightning` share, which are the same code under two names. So
it imports neither: it meets a trainer, and takes what it needs from the package that the trainer is of.

    fit ─▶ what is resumed? ─▶ loggers, callbacks, datamodule ─▶ each on_fit_start ─▶ model, optimizers ─▶ loops
    each batch with a step, its validation, its schedulers ─▶ a boundary

Some methods of the one trainer's loops and connectors are wrapped; `_NEEDED` lists them. They are private, and as they
are here since Lightning 2.5.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Unpack

import torch
from torch import nn

from harness.config.settings import is_off
from harness.errors import ConfigError
from harness.integrations.counts import Counts, Looks, pack, put_times_back, take_times, unpack
from harness.integrations.lightning_progress import (
    Rows,
    continue_logger,
    module_of,
    progress_of,
    restore_results,
    results_of,
    set_progress,
    version_of,
    with_paths,
    without_paths,
)
from harness.trainer.driven import Driven, Options, Resumed, check_options
from harness.trainer.state.rng import capture_moment, restore_rng
from harness.trainer.voice import warn

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "fit_loop": (
        "run",
        "setup_data",
        "reset",
        "on_advance_end",
        "on_run_end",
        "_load_combined_loader_states",
        "_restart_stage",
        "_combined_loader",
        "_data_fetcher",
        "_last_train_dl_reload_epoch",
    ),
    "fit_loop.epoch_loop": (
        "reset",
        "on_run_start",
        "on_advance_end",
        "on_iteration_done",
        "_batches_that_stepped",
        "_restarting",
        "_results",
        "_should_check_val_fx",
        "_skip_next_val",
    ),
    "_checkpoint_connector": ("_restore_modules_and_callbacks", "restore_training_state"),
    "_signal_connector": ("register_signal_handlers",),
    "_logger_connector": ("_first_loop_iter", "_current_fx", "_callback_metrics", "_logged_metrics"),
}
_REFUSED = {
    "DeepSpeedStrategy": "DeepSpeed keeps the state of this training",
    "FSDPStrategy": "the sharded state of FSDP's first version cannot be taken apart",
}
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "changes the schedule where an epoch begins, which a resume in the middle of it does "
    "not come to: use WeightAveraging",
    "LearningRateFinder": "trains before the training: find the rate in a program of its own, and leave it out here",
    "BatchSizeFinder": "trains before the training: find the size in a program of its own, and leave it out here",
}
_SAVED = ("current_score", "_last_global_step_saved", "_last_checkpoint_saved")
"""What a `ModelCheckpoint` goes on with, and does not restore by itself."""
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class Fit:
    """Saves a `Trainer.fit`, and resumes it after an interruption, on any machine.

        trainer = Trainer(max_epochs=10, callbacks=[HarnessCallback()])
        trainer.fit(model, loader)

    A snapshot has the model, the optimizers, the schedulers, the precision's scaler, the progress of all loops, what
    callbacks, the module and the datamodule add to a checkpoint, the values that `self.log` is summing, the place in
    the data, and all random numbers. An interruption leaves `fit()` by SystemExit(75), after the trainer's own
    teardown, once the newest snapshot is durable. The same program, started again, goes on behind the last step.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        """Do nothing yet.

        Args:
            **options: those of `Checkpointer`: `overlap`, `settle_ddp`, and, without `harness run`, `run`, `store`,
                `local`, `every_s`, `every_steps`, `fresh`, `continue_`.

        Raises:
            TypeError: there is no such option.
        """
        check_options(options)
        self._options = options
        self._fit: _Fit | None = None
        self._log: Any = None

    @property
    def log(self) -> Any:
        """The `log` of the module that is trained."""
        return self._log

    @log.setter
    def log(self, log: Any) -> None:
        """Get the module's `log`, as every callback does: the first that it hears of a trainer, before any hook."""
        self._log = log
        trainer = log.__self__.trainer
        if trainer.state.fn.value != "fit" or is_off(os.environ):
            return
        if self._fit is not None:
            raise ConfigError(
                "fit() is called a second time in this program, and the harness resumes one: give each fit a program "
                "of its own"
            )
        self._fit = _Fit(trainer.fit_loop.trainer, self._options)

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """Leave a long validation, if an interruption demands it."""
        if self._fit is not None and not trainer.sanity_checking:
            self._fit.safe_point()


class _Fit:
    """One fit, and its training."""

    def __init__(self, trainer: Any, options: Options) -> None:
        _check(trainer)
        self._trainer = trainer
        self._driven = Driven(options, self._progress)
        self._driven.begin_call()
        self._resumed: Resumed | None = self._driven.resumed
        self._step = 0 if self._resumed is None else self._resumed.step
        self._trains = self._finished = self._at_validation = False
        self._sampled = 0  # the epoch of which a sampler of several ranks has drawn the order
        self._counts: list[Counts] = []
        self._looks = Looks(warn, "give the callback state_dict() and load_state_dict()")
        self._early: Any = None
        """The random states before loaders were iterated over that are not followed yet; `None` if there are none."""
        self._call: Any = sys.modules[f"{type(trainer).__module__.rpartition('.')[0]}.call"]
        loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        _wrap(trainer._checkpoint_connector, "_restore_modules_and_callbacks", self._restore_callbacks)
        _wrap(trainer._checkpoint_connector, "restore_training_state", self._begins)
        _wrap(trainer._signal_connector, "register_signal_handlers", lambda theirs: None)  # the harness has SIGTERM
        _wrap(trainer, "_run_sanity_check", lambda theirs: theirs() if self._resumed is None else None)
        for owner, name in (
            (loop, "setup_data"),
            (loop, "_load_combined_loader_states"),
            (loop, "reset"),
            (loop, "run"),
            (loop, "on_run_end"),
            (epoch_loop, "on_run_start"),
            (epoch_loop, "on_advance_end"),
        ):
            _wrap(owner, name, getattr(self, f"_{name.strip('_')}"))
        _wrap(epoch_loop, "reset", self._reset_epoch)
        _wrap(loop, "on_advance_end", self._epoch_ends)
        self._rows = [Rows(logger) for logger in trainer.loggers]
        if (own := self._own) is not None:
            for logger, rows, place in zip(trainer.loggers, self._rows, own["places"]["loggers"], strict=False):
                continue_logger(logger, rows, own["logged"], place, writes=trainer.is_global_zero)
        if self._driven.has_begun_before:
            _let_write_again(trainer.callbacks)

    @property
    def _own(self) -> Any:
        """The progress of the snapshot, until the first batch behind it; `None` without one, and afterwards."""
        return None if self._resumed is None else self._resumed.own

    # ---- before the loops -------------------------------------------------------------------------------------------

    def _restore_callbacks(self, theirs: Callable[..., Any], checkpoint_path: Any = None, *args: Any) -> Any:
        """Give the callbacks and the datamodule what they had, where the trainer does that with a checkpoint."""
        if self._finished:  # a test or a validation behind fit()
            return theirs(checkpoint_path, *args)
        if checkpoint_path is not None:
            raise ConfigError(
                "ckpt_path goes back to a checkpoint of the trainer's own, and the harness goes on behind the last "
                "step by itself: call fit() without it"
            )
        theirs(checkpoint_path, *args)
        if (own := self._own) is None:
            return None
        trainer, call = self._trainer, self._call
        checkpoint = with_paths(own["checkpoint"], own["places"]["paths"])
        checkpoint.setdefault("state_dict", trainer.strategy.lightning_module_state_dict())
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
        if trainer.datamodule is not None and own["datamodule"]:
            call._call_lightning_datamodule_hook(trainer, "load_state_dict", own["datamodule"])
        call._call_callbacks_on_load_checkpoint(trainer, checkpoint)
        call._call_callbacks_load_state_dict(trainer, checkpoint)
        saved = with_paths(own.get("saved", []), own["places"]["paths"])  # older snapshots have none
        for callback, values in zip(trainer.checkpoint_callbacks, saved, strict=False):
            vars(callback).update(values)
        return None

    def _begins(self, theirs: Callable[..., Any]) -> None:
        """Everything is made: restore it, or begin.

        This is where the trainer restores its optimizers from a checkpoint: behind `on_fit_start` of all callbacks,
        which may change them (`BaseFinetuning` does), in whatever order the callbacks are.
        """
        theirs()
        if self._finished:  # a test or a validation behind fit()
            return
        trainer, driven, loop = self._trainer, self._driven, self._trainer.fit_loop
        self._counts = list(self._counted())
        for counts in self._counts:
            counts.begin()
        driven.begin(self._states())
        driven.restore()
        self._trains = True
        if (own := self._own) is not None:
            set_progress(loop, own["loops"])
            trainer.should_stop = trainer.should_stop or own["should_stop"]  # a Timer's time may be over
            self._sampled = own.get("sampled", 0)
        if self._early is not None:  # configure_optimizers has asked how many steps there will be
            now = capture_moment()
            restore_rng(self._early)
            self._load_combined_loader_states(lambda: None)
            iter(loop._data_fetcher)
            restore_rng(now)

    def _counted(self) -> Iterator[Counts]:
        """Yield the program's own counts: those of its module, and of its datamodule."""
        module, datamodule = self._trainer.lightning_module, self._trainer.datamodule
        yield Counts(module, _base_of(module, "LightningModule"), warn, vars(nn.Module()))
        if datamodule is not None:
            yield Counts(datamodule, _base_of(datamodule, "LightningDataModule"), warn)

    def _silent(self) -> Iterator[Any]:
        """Yield the program's own callbacks that add nothing to a checkpoint."""
        for callback in self._trainer.callbacks:
            base: Any = _base_of(callback, "Callback")
            own = type(callback).__module__.partition(".")[0] not in (_package_of(self._trainer), "harness")
            if own and all(
                getattr(type(callback), name) is getattr(base, name) for name in ("state_dict", "on_save_checkpoint")
            ):
                yield callback

    def _states(self) -> dict[str, Any]:
        trainer = self._trainer
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        found = {"model": [trainer.model], "optimizer": trainer.optimizers, "scheduler": schedulers}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        states = {name: value[0] if len(value) == 1 else list(value) for name, value in found.items() if value}
        return states if scaler is None else {**states, "scaler": scaler}

    # ---- methods of the loops ---------------------------------------------------------------------------------------

    def _setup_data(self, theirs: Callable[..., Any]) -> None:
        """Loaders are made, and iterated over for the first time."""
        if not self._trains and self._trainer.fit_loop._combined_loader is None:
            self._early = capture_moment()
        theirs()

    def _load_combined_loader_states(self, theirs: Callable[..., Any]) -> None:
        """Loaders are made: follow them."""
        if not self._trains:
            return
        self._early = None
        loop = self._trainer.fit_loop
        loaders = loop._combined_loader.flattened
        if len(loaders) > 1 and loop._combined_loader._mode == "max_size":
            raise ConfigError(
                "CombinedLoader(mode='max_size') goes on without a loader that has ended, and a resume would begin it "
                "again: use 'max_size_cycle' or 'min_size'"
            )
        for number, loader in enumerate(loaders):
            self._driven.follow(loader, f"train.{number}" if len(loaders) > 1 else "train")
            if self._own is not None:  # the trainer does it later, and a sampler of several ranks draws by its epoch
                epoch = self._own.get("sampled", loop.epoch_progress.current.processed)  # older snapshots have none
                module_of(loop)._set_sampler_epoch(loader, epoch)

    def _reset(self, theirs: Callable[..., Any]) -> None:
        """The loop over epochs begins: in the middle of one, after a resume."""
        if self._own is None:
            theirs()
            return
        loop = self._trainer.fit_loop
        torch.set_grad_enabled(True)
        loop._restart_stage = module_of(loop).RestartStage.RESTARTED_MID_EPOCH
        loop._resuming_from_checkpoint = True  # its iterator is the one that continues

    def _reset_epoch(self, theirs: Callable[..., Any]) -> None:
        """The loop over batches begins: in the middle of an epoch, its counts stay."""
        if self._own is None:
            theirs()

    def _on_run_start(self, theirs: Callable[..., Any], fetcher: Any) -> None:
        """The first batch comes next; after a resume, the one behind the snapshot."""
        trainer, epoch_loop, driven = self._trainer, self._trainer.fit_loop.epoch_loop, self._driven
        own = self._own
        self._sampled = trainer.fit_loop.epoch_progress.current.processed
        restarting, epoch_loop._restarting = epoch_loop._restarting, own is not None  # else 2.5 makes another iterator
        theirs(fetcher)
        epoch_loop._restarting = restarting
        if fetcher.length is None and getattr(fetcher, "prefetch_batches", False):
            raise ConfigError(
                "a training loader has no length, so the trainer fetches one batch ahead of the training: give the "
                "dataset a length, or the Trainer a limit_train_batches"
            )
        if own is None:
            return
        trainer.fit_loop._last_train_dl_reload_epoch = own["reloaded"]
        self._continue(own)
        if (iterator := getattr(fetcher.combined_loader, "_iterator", None)) is not None:
            iterator._idx = epoch_loop.batch_progress.current.ready
        resumed, self._resumed = self._resumed, None
        assert resumed is not None, "it has a progress"
        driven.settle_random()
        if resumed.at == "evaluating":
            self._at_validation = True
            epoch_loop.on_advance_end(fetcher)
            epoch_loop.on_iteration_done()

    def _continue(self, own: Any) -> None:
        """Give the trainer and the program what hooks at the begin of a training set, or refuse to find there.

        These are the program's own counts, the batches of a step (which `GradientAccumulationScheduler` changes, and
        does not let anything else set), the values that were logged, and those that are being summed over the epoch.
        """
        if "counts" in own:  # older snapshots have none
            put_times_back(own["counts"], own["places"]["times"])
            for counts, values in zip(self._counts, unpack(own["counts"]), strict=False):
                counts.restore(values)
        trainer, connector = self._trainer, self._trainer._logger_connector
        trainer.accumulate_grad_batches = own["accumulate"]
        for name in _METRICS:
            getattr(connector, name).update(own["metrics"][name])
        connector._first_loop_iter, connector._current_fx = own["first"], own["fx"]
        restore_results(trainer, trainer.fit_loop.epoch_loop._results, own["results"])

    def _on_advance_end(self, theirs: Callable[..., Any], fetcher: Any) -> None:
        """The end of a batch: what the trainer does there, and behind a step a boundary."""
        epoch_loop, driven = self._trainer.fit_loop.epoch_loop, self._driven
        again, self._at_validation = self._at_validation, False
        stepped = again or driven.training.boundary.optimizer_stepped
        self._step += stepped and not again
        if epoch_loop._should_check_val_fx(fetcher) and not epoch_loop._skip_next_val:
            with driven.validation(self._step, resumable=stepped):
                theirs(fetcher)
        else:
            theirs(fetcher)
        if stepped:
            self._looks.look(self._silent())
            driven.boundary(self._step)

    def _epoch_ends(self, theirs: Callable[..., Any]) -> None:
        """A pass over the data is over."""
        if self._trains:
            self._driven.epoch_ended(self._trainer.current_epoch)
        theirs()

    def _run(self, theirs: Callable[..., Any]) -> None:
        """The loop over epochs, and its end."""
        loop, resumed = self._trainer.fit_loop, self._resumed
        if resumed is None:
            theirs()
        else:
            loop.setup_data()
            if loop.max_batches and loop.done:
                self._run_out(resumed)  # the trainer's own would return at once
            else:
                theirs()
        self._finish()

    def _run_out(self, resumed: Resumed) -> None:
        """What was still to come when there was no further batch: the end of that epoch, and of the training."""
        loop = self._trainer.fit_loop
        loop.reset()
        loop.on_run_start()
        if resumed.at == "end":
            self._continue(resumed.own)
            self._resumed = None
            self._driven.settle_random()
        else:
            loop.on_advance_start()
            loop.advance()
            loop.on_advance_end()
            loop.on_iteration_done()
        loop._restarting = False
        loop.on_run_end()

    def _on_run_end(self, theirs: Callable[..., Any]) -> None:
        """The loop is over: its last snapshot, before anything else is done."""
        self._finish()
        theirs()

    def _finish(self) -> None:
        if not self._finished:
            self._finished, self._trains = True, False
            self._driven.finish(self._step)
            self._driven.end()

    def safe_point(self) -> None:
        """Leave, if an interruption demands it."""
        if self._trains:
            self._driven.safe_point()

    # ---- what a snapshot has ----------------------------------------------------------------------------------------

    def _progress(self) -> dict[str, Any]:
        trainer, connector = self._trainer, self._trainer._logger_connector
        logged = trainer.fit_loop.epoch_loop._batches_that_stepped
        datamodule = trainer.datamodule
        paths, folders = list[str](), self._folders()
        saved = [
            {name: vars(each)[name] for name in _SAVED if name in vars(each)} for each in trainer.checkpoint_callbacks
        ]
        counts = pack([each.changed() for each in self._counts], trainer.strategy.root_device)
        return {
            "loops": progress_of(trainer.fit_loop),
            "checkpoint": without_paths(self._checkpoint(), paths, folders),
            "saved": without_paths(saved, paths, folders),
            "places": {
                "paths": paths,
                "times": list(take_times(counts)),
                "loggers": [
                    [type(logger).__name__, version_of(logger), rows.of(logged)]
                    for logger, rows in zip(trainer.loggers, self._rows, strict=True)
                ],
            },
            "datamodule": {} if datamodule is None else self._datamodule(),
            "logged": logged,
            "metrics": {name: dict(getattr(connector, name)) for name in _METRICS},
            "results": results_of(trainer.fit_loop.epoch_loop._results),
            "first": connector._first_loop_iter,
            "fx": connector._current_fx,
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
            "sampled": self._sampled,
            "counts": counts,
        }

    def _checkpoint(self) -> dict[str, Any]:
        """Return what callbacks and the module add to a checkpoint. What a snapshot has anyway is left out."""
        trainer, call = self._trainer, self._call
        weights = trainer.strategy.lightning_module_state_dict()
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": _release_of(trainer),
            "state_dict": weights,
        }
        checkpoint["callbacks"] = call._call_callbacks_state_dict(trainer)
        call._call_callbacks_on_save_checkpoint(trainer, checkpoint)
        call._call_lightning_module_hook(trainer, "on_save_checkpoint", checkpoint)
        if checkpoint.get("state_dict") is weights:
            del checkpoint["state_dict"]
        return checkpoint

    def _folders(self) -> set[str]:
        """Return the folders that the trainer writes to."""
        folders = [self._trainer.default_root_dir, *(logger.save_dir for logger in self._trainer.loggers)]
        folders += [getattr(callback, "dirpath", None) for callback in self._trainer.checkpoint_callbacks]
        return {str(folder) for folder in folders if folder}

    def _datamodule(self) -> Any:
        return self._call._call_lightning_datamodule_hook(self._trainer, "state_dict") or {}


def _check(trainer: Any) -> None:
    """Raise ConfigError for a version or a strategy that is not supported."""
    for path, names in _NEEDED.items():
        owner = functools.reduce(getattr, path.split("."), trainer)
        if missing := [name for name in names if not hasattr(owner, name)]:
            raise ConfigError(
                f"{_package_of(trainer)} {_release_of(trainer)} has no {path}.{missing[0]}: it is older than 2.5, or "
                "too new for this version of the harness"
            )
    for callback in trainer.callbacks:
        for base in type(callback).__mro__:
            if base.__name__ in _REFUSED_CALLBACKS and base.__module__.startswith(_package_of(trainer)):
                raise ConfigError(f"{type(callback).__name__} {_REFUSED_CALLBACKS[base.__name__]}")
    strategy = trainer.strategy
    kind = type(strategy).__name__
    if kind in _REFUSED:
        raise ConfigError(
            f"{_REFUSED[kind]}: use directory mode, which takes the trainer's checkpoints, or strategy='ddp'"
        )
    environment = getattr(strategy, "cluster_environment", None)
    external = environment is None or environment.creates_processes_externally
    if trainer.world_size > 1 and not external:
        raise ConfigError(
            "the Trainer starts its own processes, and the harness cannot tell them apart: start the program by "
            "`torchrun --standalone --nproc-per-node N`, and leave strategy and devices as they are"
        )


def _package_of(trainer: Any) -> str:
    """Return the name of the package that it is of."""
    return type(trainer).__module__.partition(".")[0]


def _release_of(trainer: Any) -> str:
    """Return the version of that package."""
    return str(sys.modules[_package_of(trainer)].__version__)


def _base_of(value: Any, name: str) -> type:
    """Return the class of that name of which it is; its own if there is none."""
    return next((kind for kind in type(value).__mro__ if kind.__name__ == name), type(value))


def _let_write_again(callbacks: Iterable[Any]) -> None:
    """Have LightningCLI write its configuration where an earlier start of the run has: it takes that for another run's.

    A logger that continues has the directory of that start.
    """
    for callback in callbacks:
        if _base_of(callback, "SaveConfigCallback").__name__ == "SaveConfigCallback":
            callback.overwrite = True


def _wrap(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def method(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    setattr(owner, name, method)
