"""What Accelerate has prepared is given as it is, or by the Accelerator that has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.errors import StateError
from harness.trainer.state.kinds import flatten
from harness.trainer.state.prepared import expanded

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def test_an_accelerator_stands_for_all_that_it_has_prepared(accelerator: Any) -> None:
    model, optimizer, scheduler = parts()
    kept = nn.Linear(1, 1)
    accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(kept)

    found = flatten(expanded({"accelerator": accelerator}))

    assert found.pop("accelerator.accumulation") is not None
    assert found == {
        "accelerator.model": model,
        "accelerator.optimizer": optimizer,
        "accelerator.scheduler": scheduler,
        "accelerator.registered": kept,
    }


def test_several_models_are_numbered(accelerator: Any) -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    accelerator.prepare(one, other)
    assert {name: state for name, state in flatten(expanded({"a": accelerator})).items() if "model" in name} == {
        "a.model.0": one,
        "a.model.1": other,
    }


def test_prepared_objects_are_what_is_inside_of_them(accelerator: Any) -> None:
    model, optimizer, scheduler = parts()
    made = accelerator.prepare(model, optimizer, scheduler)

    found = expanded({"model": made[0], "both": {"optimizer": made[1], "schedulers": [made[2]]}, "plain": optimizer})

    assert found == {"model": model, "both": {"optimizer": optimizer, "schedulers": [scheduler]}, "plain": optimizer}


def test_the_count_of_accumulated_batches_is_kept(accelerator: Any) -> None:
    accelerator.prepare(nn.Linear(1, 1))
    state = flatten(expanded({"a": accelerator}))["a.accumulation"]
    accelerator.step = 3
    kept = state.state_dict()  # type: ignore[attr-defined]
    accelerator.step = 0
    state.load_state_dict(kept)  # type: ignore[attr-defined]
    assert accelerator.step == 3


def test_an_accelerator_that_has_prepared_nothing_is_refused(accelerator: Any) -> None:
    with pytest.raises(StateError, match="prepared no model yet"):
        expanded({"accelerator": accelerator})
