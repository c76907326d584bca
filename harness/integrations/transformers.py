"""Transformers: `Trainer(…, callbacks=[HarnessCallback()])` survives an interruption, and goes on bit for bit.

Owns where a `Trainer` has its boundaries, what it knows besides its model and optimizer, and how it comes to the place
of a snapshot. `trainer/driven.py` has the rest.

    Trainer.__init__ ─▶ attached          train ─▶ what is resumed? ─▶ epochs and batches before that are not run
    on_train_begin ─▶ restored            each step, its log, evaluation and save ─▶ a boundary

The events of a callback are not enough for that, so some methods of the one trainer object are wrapped, which
`_WRAPPED` lists. They are private, and the same since transformers 5.4; if one is missing, `attach` raises ConfigError.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch

from harness import requirements
from harness.config.settings import is_off
from harness.errors import ConfigError, StateError
from harness.integrations.counts import Counts, pack, put_times_back, take_times, unpack
from harness.integrations.frozen import Trainable, has_frozen_base
from harness.integrations.restored import Restored
from harness.integrations.transformers_callbacks import Callbacks, plain
from harness.trainer.driven import Driven, Options, Resumed, check_options
from harness.trainer.state.prepared import unwrapped
from harness.trainer.voice import say, warn

with requirements.needed("transformers"):
    import transformers
    import transformers.trainer
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import IntervalStrategy, TrainOutput, sort_checkpoints

_WRAPPED = (
    "_inner_training_loop",
    "_init_training_state",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_finalize_training",
    "_load_rng_state",
)
_NUMBERS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
"""What a trainer counts besides its state, as far as this version has it."""
_FROM_ARGUMENTS = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size")
"""What a `TrainerState` has of the arguments: a new start may have others, such as more epochs."""
_trainer: Any = transformers.trainer  # for what it imports, and does not export
_STOPS = ("should_training_stop", "should_epoch_stop")
_SNAPSHOT = "harness snapshot"
"""Stands where a trainer expects the path of the checkpoint that it resumes."""


class HarnessCallback(TrainerCallback):
    """Saves a `Trainer`'s training, and resumes it after an interruption, on any machine.

        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[HarnessCallback()])
        trainer.train()

    A snapshot has the model (of PEFT: the adapters), the optimizer, the scheduler, the gradient scaler, `TrainerState`,
    the states of callbacks that are `ExportableState`, the place in the data, and all random numbers. An interruption
    leaves `train()` by SystemExit(75) once the newest snapshot is durable, so no line after it runs on a half-trained
    model. The same program, started again, goes on behind the last step.
    """

    def __init__(self, *, keeps_output_dir: bool = False, **options: Unpack[Options]) -> None:
        """Do nothing yet.

        Args:
            keeps_output_dir: `output_dir` outlives the machine, so that the best checkpoint is there in a new start.
            **options: those of `Checkpointer`: `overlap`, `settle_ddp`, and, without `harness run`, `run`, `store`,
                `local`, `every_s`, `every_steps`, `fresh`, `continue_`.

        Raises:
            TypeError: there is no such option.
        """
        check_options(options)
        self._keeps_output_dir, self._options = keeps_output_dir, options
        self._attached: _Attached | None = None

    # ---- events of a Trainer ----------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the trainer that is being made. A callback is not told which it is."""
        trainer = _trainer_around(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the training, or begin it."""
        if is_off(os.environ):
            return
        if self._attached is None:
            raise ConfigError(
                "this HarnessCallback was added to a Trainer that was there already: give it as callbacks=[…] when the "
                "Trainer is made, or call harness.integrations.transformers.attach(trainer) instead"
            )
        self._attached.train_begins()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave a long evaluation, if an interruption demands it."""
        if self._attached is not None:
            self._attached.safe_point()

    def attach(self, trainer: Any) -> None:
        """See `attach`."""
        if is_off(os.environ) or self._attached is not None:
            return
        _check_version(trainer)
        _switch_off_jit(trainer)
        self._attached = _Attached(trainer, self._options, keeps_output_dir=self._keeps_output_dir)


def attach(trainer: Any, **options: Any) -> HarnessCallback:
    """Attach the harness to a `Trainer` that is there already; return its callback.

    Args:
        trainer: a `transformers.Trainer`, before its `train()`.
        **options: see `HarnessCallback`.

    Raises:
        ConfigError: this version of transformers is not supported.
    """
    callback = HarnessCallback(**options)
    trainer.add_callback(callback)
    callback.attach(trainer)
    return callback


def _trainer_around(callback: TrainerCallback) -> Any:
    """Return the trainer whose constructor is being executed around this call; `None` if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(found, Trainer) and any(each is callback for each in found.callback_handler.callbacks):
            return found
        frame = frame.f_back
    return None


def _check_version(trainer: Any) -> None:
    missing = [name for name in _WRAPPED if not callable(getattr(trainer, name, None))]
    if missing:
        raise ConfigError(
            f"transformers {transformers.__version__} has no {', '.join(missing)}: it is older than 5.4, or too new "
            "for this version of the harness"
        )


def _switch_off_jit(trainer: Any) -> None:
    """Take the trainer's own checkpoint on SIGTERM out: both would answer the same signal."""
    handler = trainer.callback_handler
    for callback in [each for each in handler.callbacks if type(each).__name__ == "JITCheckpointCallback"]:
        manager = callback.jit_manager
        if manager is not None and manager._original_sigterm_handler is not None:
            signal.signal(signal.SIGTERM, manager._original_sigterm_handler)
        handler.callbacks.remove(callback)
        say("enable_jit_checkpoint is off: the harness saves the training on SIGTERM, and goes on behind the last step")


class _Attached:
    """One trainer, and its training."""

    def __init__(self, trainer: Any, options: Options, *, keeps_output_dir: bool) -> None:
        self._trainer = trainer
        self._options, self._keeps_output_dir = options, keeps_output_dir
        self._driven: Driven | None = None
        self._earlier: list[dict[str, Any]] = []  # what the calls of `train` before this one have returned
        self._before = 0  # steps of those calls
        self._trains = self._skips_evaluation = False
        self._updates_of_epoch = 0
        self._base: int | None = None
        self._arguments: dict[str, Any] = {}
        self._restored: tuple[Restored, Any] | None = None
        """The states as they were restored, and the progress that belongs to them, until the next batch comes."""
        self._place = _Place()
        self._watched = Callbacks(trainer, HarnessCallback)
        self._counts = Counts(trainer, Trainer, warn)
        for name in _WRAPPED:
            theirs, ours = getattr(trainer, name), getattr(self, name.removeprefix("_"))
            setattr(trainer, name, _wrapped(theirs, ours))

    @property
    def driven(self) -> Driven:
        assert self._driven is not None, "it is made as the training begins"
        return self._driven

    @property
    def _resumed(self) -> Resumed | None:
        """The snapshot, in the call of `train` in which it was taken, until it is restored."""
        return self.driven.resumed if self.driven.is_resumed_here and not self._trains else None

    @property
    def _step(self) -> int:
        return self._before + int(self._trainer.state.global_step)

    # ---- methods of the trainer -------------------------------------------------------------------------------------

    def inner_training_loop(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One call of `train`."""
        self._check(_bound(theirs, args, kwargs))
        if self._driven is None:
            self._driven = Driven(self._options, self._progress)
            if self._driven.resumed is not None:
                own = self._driven.resumed.own
                put_times_back(own, (own.get("places") or {}).get("times", []))  # older snapshots have none
                self._earlier, self._before = list(own["earlier"]), own["before"]
        driven = self._driven
        if driven.begin_call():
            return self._call_again(driven.call)
        if not driven.is_resumed_here and driven.call == 1:
            self._earlier, self._before = [], 0
        self._trains = False
        if (resumed := self._resumed) is not None:
            places = resumed.own.get("places") or {}  # older snapshots have none
            self._watched.continue_logs(places.get("logging_dir"), resumed.step - self._before)
        try:
            output = theirs(*args, **kwargs)
        except SystemExit:
            self._tear_down()
            raise
        finally:
            self._trains = False
            self._evaluates_on_start()
        self._earlier.append({"step": output.global_step, "loss": output.training_loss, "metrics": output.metrics})
        self._before += output.global_step
        driven.end()
        return output

    def _call_again(self, call: int) -> Any:
        """Return what a call of `train` has returned that is over already."""
        earlier = self._earlier[call - 1]
        say(f"train() number {call} of this program is over; what follows it sees the model as it was interrupted")
        self.driven.lend({"model": self._model(self._trainer.model)})
        self._leave_train()
        return TrainOutput(earlier["step"], earlier["loss"], dict(earlier["metrics"]))

    def init_training_state(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The trainer's state begins: put it back, and return the epoch and the batches of it that are trained."""
        epochs, batches = theirs(*args, **kwargs)
        self._arguments = {name: getattr(self._trainer.state, name, None) for name in _FROM_ARGUMENTS}
        resumed = self._resumed
        if resumed is None:
            self._place = _Place()
            return epochs, batches
        own, trainer = resumed.own, self._trainer
        self._continue_state(own)
        self._check_best(own["state"].get("best_model_checkpoint"))
        self._place = _Place(**own["place"], is_resumed=True)
        if resumed.at == "end":
            return _bound(theirs, args, kwargs)["num_train_epochs"], 0
        return self._place.epoch, self._place.updates * trainer.args.gradient_accumulation_steps

    def train_begins(self) -> None:
        """Everything is made: restore it, or begin."""
        trainer, driven, resumed = self._trainer, self.driven, self._resumed
        if type(unwrapped(trainer.optimizer)).__name__ == "LayerWiseDummyOptimizer":
            raise ConfigError(f"optim={trainer.args.optim!r} has an optimizer for each layer: leave out `_layerwise`")
        states = self._states()
        self._base = states["model"].base_sum() if isinstance(states["model"], Trainable) else None
        if resumed is not None and resumed.own["base"] != self._base:
            raise StateError("the model under the adapters is not the one that this run was begun with: load that one")
        self._counts.begin()
        driven.begin(states)
        driven.follow(trainer.callback_handler.train_dataloader)
        driven.restore()
        self._trains = True
        if resumed is None:
            return
        self._continue_counts(resumed.own)
        optimizer, scheduler = unwrapped(trainer.optimizer), unwrapped(trainer.lr_scheduler)
        self._restored = Restored(trainer.model_wrapped, optimizer, scheduler), resumed.own
        if trainer.args.eval_on_start:
            trainer.args.eval_on_start = False  # it was done by the first start
            self._skips_evaluation = True

    def _continue_state(self, own: Any) -> None:
        # Older snapshots have the arguments there.
        state = {name: value for name, value in own["state"].items() if name not in _FROM_ARGUMENTS}
        for name, value in (state | own.get("arguments", {})).items():
            setattr(self._trainer.state, name, copy.deepcopy(value))

    def _continue_counts(self, own: Any) -> None:
        """Give the trainer, its callbacks and its subclass what they have counted."""
        trainer = self._trainer
        for name, value in own["numbers"].items():
            setattr(trainer, name, value)
        trainer._tr_loss = own["loss"].to(trainer._tr_loss.device)
        self._watched.restore(own["callbacks"])
        if own.get("counts") is not None:  # older snapshots have none
            self._counts.restore(unpack(own["counts"]))

    def _put_back(self) -> None:
        """Undo what callbacks did behind the restored states.

        The trainer calls `on_train_begin` and, in the middle of an epoch, `on_epoch_begin` in each process: some set
        what only the process has, such as the epoch of a dataset. What they change of a snapshot was changed before it.
        """
        if self._restored is None:
            return
        (restored, own), self._restored = self._restored, None
        self._continue_state(own)
        self._continue_counts(own)
        if not restored.put_back():
            warn(
                "a callback writes to the model or to the state of the optimizer as the training or an epoch begins, "
                "and has done so again behind the snapshot: what follows is not as in an unbroken run. Let it do so in "
                "on_epoch_end or on_step_begin, which are not called again"
            )

    def run_epoch(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One pass over the data, or the rest of it."""
        call = _bound(theirs, args, kwargs)
        place, trainer = self._place, self._trainer
        self._evaluates_on_start()
        self._updates_of_epoch = call["num_update_steps_per_epoch"]
        if not place.is_resumed:
            self._place = _Place(epoch=call["epoch"])
            found = theirs(*args, **kwargs)
            self.driven.epoch_ended(call["epoch"])
            return found
        self._put_back()
        place.is_resumed = False
        control = trainer.control
        if place.at_evaluation:
            self._evaluate_again(call)
        else:
            for name in _STOPS:
                setattr(control, name, place.control.get(name, False))
        call["resume_from_checkpoint"] = _SNAPSHOT
        if any(getattr(control, name) for name in _STOPS):
            call["num_update_steps_per_epoch"] = place.updates  # no further step: the end of the pass comes next
        with self._where_it_was(call["train_dataloader"]):
            found = theirs(**call)
        self.driven.epoch_ended(call["epoch"])
        return found

    @contextlib.contextmanager
    def _where_it_was(self, loader: Any) -> Iterator[None]:
        """Context manager in which the trainer skips no batch of a loader, which continues by itself where it was."""
        args, skip = self._trainer.args, _trainer.skip_first_batches
        ignores, args.ignore_data_skip = args.ignore_data_skip, False  # else it would count from the pass's begin
        _trainer.skip_first_batches = lambda given, count=0: given if given is loader else skip(given, count)
        try:
            yield
        finally:
            _trainer.skip_first_batches, args.ignore_data_skip = skip, ignores

    def _evaluate_again(self, call: Mapping[str, Any]) -> None:
        """Log, evaluate and save as at the end of the step at whose evaluation the snapshot was taken."""
        trainer, place = self._trainer, self._place
        for name, value in place.control.items():
            setattr(trainer.control, name, value)
        place.updates -= 1  # it is counted again
        with self.driven.redo():
            trainer._maybe_log_save_evaluate(
                trainer._tr_loss,
                place.grad_norm,
                call["model"],
                call["trial"],
                call["epoch"],
                call["ignore_keys_for_eval"],
                call["start_time"],
                learning_rate=place.learning_rate,
            )

    def _evaluates_on_start(self) -> None:
        """Set the trainer's option back that the resumed call did without."""
        if self._skips_evaluation:
            self._trainer.args.eval_on_start, self._skips_evaluation = True, False

    def load_rng_state(self, theirs: Callable[..., Any], checkpoint: Any) -> Any:
        """The random states: those of a snapshot are in place."""
        return None if checkpoint == _SNAPSHOT else theirs(checkpoint)

    def maybe_log_save_evaluate(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The end of a step, or of an epoch: what the trainer does there, and behind a step a boundary."""
        if not self._trains:
            return theirs(*args, **kwargs)
        trainer, place, call = self._trainer, self._place, _bound(theirs, args, kwargs)
        ends_step = place.last_step != trainer.state.global_step
        if ends_step:
            place.last_step = trainer.state.global_step
            place.updates += 1
            place.grad_norm, place.learning_rate = _number(call["grad_norm"]), _number(call["learning_rate"])
        elif call["grad_norm"] is None and call["learning_rate"] is None:  # the end of a pass without a step here
            call |= {"grad_norm": place.grad_norm, "learning_rate": place.learning_rate}
            args, kwargs = (), call
        place.control = trainer.control.state()["args"]
        if trainer.control.should_evaluate:
            place.at_evaluation = ends_step
            with self.driven.validation(self._step, resumable=ends_step):
                found = theirs(*args, **kwargs)
            place.at_evaluation = False
        else:
            found = theirs(*args, **kwargs)
        if ends_step:
            place.control = trainer.control.state()["args"]  # what callbacks have decided meanwhile
            is_last = place.updates == self._updates_of_epoch
            evaluates = is_last and trainer.args.eval_strategy == IntervalStrategy.EPOCH
            self._watched.look()
            self.driven.boundary(self._step, begins_validation=evaluates)
        return found

    def finalize_training(self, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The loop is over: its last snapshot, before the best model may be loaded."""
        self._put_back()
        self.driven.finish(self._step)
        self._trains = False
        return theirs(*args, **kwargs)

    def safe_point(self) -> None:
        """Leave, if an interruption demands it."""
        if self._trains:
            self.driven.safe_point()

    # ---- what a snapshot has ----------------------------------------------------------------------------------------

    def _states(self) -> dict[str, Any]:
        trainer = self._trainer
        states = {"model": self._model(trainer.model_wrapped), "optimizer": unwrapped(trainer.optimizer)}
        if trainer.lr_scheduler is not None:
            states["scheduler"] = unwrapped(trainer.lr_scheduler)
        scaler = trainer.accelerator.scaler
        return states if scaler is None else {**states, "scaler": scaler}

    def _model(self, model: Any) -> Any:
        return Trainable(model) if has_frozen_base(self._trainer.model) else model

    def _progress(self) -> dict[str, Any]:
        trainer, place = self._trainer, self._place
        state = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
        for name in ("stateful_callbacks", "is_local_process_zero", "is_world_process_zero"):
            del state[name]
        arguments = {name: state.pop(name) for name in _FROM_ARGUMENTS if name in state}
        own = {
            "state": plain(state),
            "arguments": plain({name: now for name, now in arguments.items() if now != self._arguments[name]}),
            "place": place.to_tree(),
            "numbers": {name: plain(getattr(trainer, name)) for name in _NUMBERS if hasattr(trainer, name)},
            "loss": trainer._tr_loss,
            "base": self._base,
            "callbacks": self._watched.states(),
            "counts": pack(self._counts.changed(), trainer.args.device) if self._counts.are_there else None,
            "earlier": plain(self._earlier),
            "before": self._before,
        }
        return own | {"places": {"logging_dir": self._watched.logging_dir, "times": list(take_times(own))}}

    # ---- what is refused --------------------------------------------------------------------------------------------

    def _check(self, call: Mapping[str, Any]) -> None:
        """Raise ConfigError for what would not be resumed as it was."""
        trainer = self._trainer
        args = trainer.args
        if call.get("resume_from_checkpoint") is not None:
            raise ConfigError(
                "resume_from_checkpoint goes back to a checkpoint of the trainer's own, and the harness goes on behind "
                "the last step by itself: call train() without it"
            )
        if call.get("trial") is not None:
            raise ConfigError("a hyperparameter search is many trainings: the harness resumes one. Leave it out here")
        if args.auto_find_batch_size:
            raise ConfigError("auto_find_batch_size starts the training over: set the batch size that fits")
        if trainer.is_deepspeed_enabled:
            raise ConfigError(
                "DeepSpeed keeps the state of this training: watch the checkpoints that it writes (harness run --watch)"
            )
        if args.load_best_model_at_end and not self._keeps_output_dir:
            raise ConfigError(
                "load_best_model_at_end reads a checkpoint in output_dir at the end, and a new machine does not have "
                "it: keep output_dir on a disk that outlives the machine, and say so by "
                "HarnessCallback(keeps_output_dir=True)"
            )

    def _check_best(self, best: str | None) -> None:
        trainer = self._trainer
        if best is None or not trainer.args.load_best_model_at_end or Path(best).is_dir():
            return
        # One that is gone because a later one was better is not needed: that one is found again.
        later = sort_checkpoints(output_dir=trainer.args.output_dir)
        if not any(_step_of(path) > trainer.state.global_step for path in later):
            raise StateError(
                f"the best checkpoint of this training, {best}, is not here: start it where its output_dir is, or "
                "without load_best_model_at_end"
            )

    def _tear_down(self) -> None:
        """Leave the trainer as its own end does; but for `on_train_end`, at which trackers upload the model."""
        self._leave_train()
        for callback in self._trainer.callback_handler.callbacks:
            writer = getattr(callback, "tb_writer", None)
            if writer is not None:
                writer.flush()

    def _leave_train(self) -> None:
        trainer = self._trainer
        trainer.is_in_train = False
        if trainer.neftune_noise_alpha is not None:
            _trainer.deactivate_neftune(trainer.model, trainer.neftune_hook_handle, trainer.accelerator)


@dataclasses.dataclass
class _Place:
    """Where the trainer is.

    Attributes:
        epoch: number of the pass over the data.
        updates: steps that it has made in this pass.
        at_evaluation: whether it is before what it logs, evaluates and saves at the end of that step.
        control: what it is about to do there; behind the step, whether it stops.
        grad_norm: of that step, for its log.
        learning_rate: likewise.
        is_resumed: whether the pass begins behind the batches of these steps.
        last_step: the last one whose end was reached.
    """

    epoch: int = 0
    updates: int = 0
    at_evaluation: bool = False
    control: dict[str, bool] = dataclasses.field(default_factory=dict)
    grad_norm: float | None = None
    learning_rate: float | None = None
    is_resumed: bool = False
    last_step: int = -1

    def to_tree(self) -> dict[str, Any]:
        """Return it as a snapshot keeps it: behind `at_evaluation`, the end of the step is still to come."""
        last_step = -1 if self.at_evaluation else self.last_step
        tree = {**vars(self), "control": dict(self.control), "last_step": last_step}
        del tree["is_resumed"]
        return tree


def _wrapped(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def method(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    return method


def _bound(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _step_of(checkpoint: str) -> int:
    """Return the step in the name of a trainer's own checkpoint; -1 if there is none."""
    found = re.match("checkpoint-([0-9]+)", Path(checkpoint).name)
    return -1 if found is None else int(found[1])


def _number(value: Any) -> float | None:
    return value.item() if isinstance(value, torch.Tensor) else value
