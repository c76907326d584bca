from __future__ import annotations

import inspect

import pytest

from harness import Checkpointer
from harness.trainer.driven import Options, check_options


def test_the_options_of_an_integration_are_those_of_a_checkpointer() -> None:
    assert Options.__annotations__.keys() <= inspect.signature(Checkpointer.__init__).parameters.keys()


def test_an_option_that_there_is_not_is_refused_as_in_any_call() -> None:
    check_options({"every_s": 10.0, "overlap": None})
    with pytest.raises(TypeError, match="'every_second'"):
        check_options({"every_second": 10.0})  # type: ignore[typeddict-unknown-key]
