"""The callbacks of a `Trainer` of transformers: their states, where TensorBoard's writes, and those that hide a state.

Owns the form of these in a snapshot. `transformers.py` knows when they are taken and restored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from harness import requirements
from harness.errors import StateError
from harness.integrations.counts import Looks
from harness.trainer.voice import warn

with requirements.needed("transformers"):
    from transformers.trainer_callback import ExportableState


class Callbacks:
    """The states of a trainer's callbacks, as far as they show them."""

    def __init__(self, trainer: Any, ours: type) -> None:
        """Look at nothing yet.

        Args:
            trainer: whose callbacks they are.
            ours: the class of the one that is not looked at.
        """
        self._trainer, self._ours = trainer, ours
        self._looks = Looks(warn, "make the callback an ExportableState, as transformers' EarlyStoppingCallback is")

    @property
    def _all(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if not isinstance(each, self._ours)]

    def states(self) -> list[list[Any]]:
        """Return name and attributes of each that is an `ExportableState`, in order."""
        shown = [each for each in self._all if isinstance(each, ExportableState)]
        return [[type(each).__name__, plain(each.state()["attributes"])] for each in shown]

    def restore(self, states: list[list[Any]]) -> None:
        """Give them their attributes back. Raises StateError if they are not those of the snapshot."""
        shown = [each for each in self._all if isinstance(each, ExportableState)]
        names, now = [name for name, _ in states], [type(each).__name__ for each in shown]
        if names != now:
            raise StateError(f"the trainer's callbacks with a state were {names}, and are {now}: use the same ones")
        for callback, (_, attributes) in zip(shown, states, strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)

    @property
    def _tensorboard(self) -> Any:
        return next((each for each in self._all if type(each).__name__ == "TensorBoardCallback"), None)

    @property
    def logging_dir(self) -> str | None:
        """Where TensorBoard's callback writes; `None` if there is none."""
        return None if self._tensorboard is None else self._tensorboard.logging_dir

    def continue_logs(self, logging_dir: str | None, step: int) -> None:
        """Have TensorBoard's callback write on where it did, without the steps behind this one that come again."""
        callback = self._tensorboard
        if callback is None or callback.tb_writer is not None or callback._SummaryWriter is None:
            return
        made = callback._SummaryWriter

        def writer(**options: Any) -> Any:
            callback._SummaryWriter = made
            return made(purge_step=step + 1, **options)

        callback._SummaryWriter = writer
        callback.logging_dir = callback.logging_dir or logging_dir

    def look(self) -> None:
        """Warn, once, of a callback of the program's that changes attributes and shows no state."""
        self._looks.look(
            callback
            for callback in self._all
            if not isinstance(callback, ExportableState) and type(callback).__module__.split(".")[0] != "transformers"
        )


def plain(value: Any) -> Any:
    """Return a value as a trainer itself stores it: what JSON knows. Numbers of numpy and torch become Python's."""
    if type(value) in (int, float, str, bool, type(None)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, (float, int, str)):
        return next(kind(value) for kind in (float, int, str) if isinstance(value, kind))
    return json.loads(json.dumps(value, default=str))
