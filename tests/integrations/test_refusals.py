"""What an integration would not continue exactly is refused, with the remedy. Agents are played."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.optimization import get_constant_schedule
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from harness.errors import ConfigError, StateError
from harness.integrations import lightning as for_lightning
from harness.integrations import lightning_fit
from harness.integrations import transformers as for_transformers
from harness.integrations.frozen import Trainable
from harness.trainer import opening
from tests.support.played_agent import PlayedLink, no_checkpointer

as_it_was = pytest.fixture(autouse=True)(no_checkpointer)
pytestmark = pytest.mark.filterwarnings("ignore")  # they are the frameworks' own


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedLink]:
    made = PlayedLink()
    monkeypatch.setattr(opening, "open_link", lambda flags: made)
    yield made
    made.close()


# ---- transformers ----------------------------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield {"input_ids": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}


ROWS = [{"input_ids": torch.zeros(4, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}] * 8


def hf_trainer(folder: Path, data: Any = ROWS, optimizer: Any = None, **options: Any) -> Trainer:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=7, n_positions=4, n_embd=8, n_layer=1, n_head=1))
    defaults = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "max_steps": 2, "save_strategy": "no"}
    schedule = get_constant_schedule(torch.optim.SGD(model.parameters(), lr=0.1))
    return Trainer(
        model=model,
        args=TrainingArguments(**(defaults | {"disable_tqdm": True} | options)),
        train_dataset=data,
        eval_dataset=ROWS,
        optimizers=(None, None) if optimizer is None else (optimizer, schedule),
        callbacks=[for_transformers.HarnessCallback()],
    )


BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (BEST | {"save_steps": 1}, r"HarnessCallback\(keeps_output_dir=True\)"),
        ({"auto_find_batch_size": True}, "set the batch size that fits"),
    ],
)
def test_options_of_a_trainer(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        hf_trainer(tmp_path, **options).train()


def test_a_trainer_s_own_resume(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path)
    trainer.save_model(str(tmp_path))
    trainer.state.save_to_json(str(tmp_path / "trainer_state.json"))
    with pytest.raises(ConfigError, match=r"call train\(\) without it"):
        trainer.train(resume_from_checkpoint=str(tmp_path))


def test_data_whose_position_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="IterableDataset"):
        hf_trainer(tmp_path, Endless()).train()


def test_optimizers_of_single_layers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out `_layerwise`"):
        hf_trainer(tmp_path, optimizer=LayerWiseDummyOptimizer(optimizer_dict={})).train()


def test_a_callback_that_a_trainer_gets_later(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path)
    trainer.callback_handler.callbacks = []
    trainer.add_callback(for_transformers.HarnessCallback())
    with pytest.raises(ConfigError, match=r"attach\(trainer\)"):
        trainer.train()


@pytest.mark.parametrize(("there", "refused"), [([], True), ([4], True), ([6], False)])
def test_a_best_checkpoint_that_is_gone_counts_only_if_no_later_one_was_better(
    there: list[int], refused: bool, tmp_path: Path
) -> None:
    """The trainer deletes the best one when it has a better one, which a resume finds again."""
    for step in there:
        (tmp_path / f"checkpoint-{step}").mkdir()
    trainer = hf_trainer(tmp_path, **BEST, save_steps=1)
    trainer.state.global_step = 5
    attached = for_transformers._Attached(trainer, {}, keeps_output_dir=True)
    if refused:
        with pytest.raises(StateError, match="start it where its output_dir is"):
            attached._check_best(str(tmp_path / "checkpoint-3"))
    else:
        attached._check_best(str(tmp_path / "checkpoint-3"))


def test_a_base_that_is_unfrozen_later() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    trained = Trainable(model)
    assert list(trained.state_dict()) == ["1.weight", "1.bias"]
    model[0].requires_grad_(True)
    with pytest.raises(StateError, match=r"0\.weight is trained now"):
        trained.state_dict()


# ---- Lightning -------------------------------------------------------------------------------------------------------


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = next(iter(batch.values())) if isinstance(batch, dict) else batch
        return self.net(x).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(count, 2)), 2)


def pl_trainer(folder: Path, *callbacks: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    defaults = quiet | {"max_epochs": 1, "enable_checkpointing": False, "default_root_dir": folder}
    return pl.Trainer(**(defaults | options), callbacks=[*callbacks, for_lightning.HarnessCallback()])


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lightning_callbacks.StochasticWeightAveraging(0.1), "StochasticWeightAveraging .* use WeightAveraging"),
        (lightning_callbacks.LearningRateFinder(), "LearningRateFinder .* in a program of its own"),
        (lightning_callbacks.BatchSizeFinder(), "BatchSizeFinder .* in a program of its own"),
    ],
)
def test_callbacks_that_change_the_training_where_a_resume_does_not_come_by(
    callback: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        pl_trainer(tmp_path, callback).fit(Module(), loader())


@pytest.mark.parametrize("shows", [None, "state_dict", "on_save_checkpoint"])
def test_a_callback_that_counts_and_does_not_show_it(
    shows: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(pl.Callback):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

    if shows is not None:
        setattr(Counting, shows, lambda self, *args: {"batches": self.batches})
    told: list[str] = []
    monkeypatch.setattr(lightning_fit, "warn", told.append)
    pl_trainer(tmp_path, Counting(), max_epochs=4).fit(Module(), loader())
    words = "Counting.batches changes, and a resume resets it: give the callback state_dict() and load_state_dict()"
    assert told == ([words] if shows is None else [])


def test_a_fit_s_own_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"call fit\(\) without it"):
        pl_trainer(tmp_path).fit(Module(), loader(), ckpt_path=str(tmp_path / "a.ckpt"))


def test_a_second_fit(tmp_path: Path) -> None:
    trainer = pl_trainer(tmp_path)
    trainer.fit(Module(), loader())
    with pytest.raises(ConfigError, match="a second time in this program"):
        trainer.fit(Module(), loader())


class Positioned(Endless):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(2),)] * 64)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("limit", [None, 4])
def test_a_loader_without_a_length_without_a_limit(limit: int | None, tmp_path: Path) -> None:
    """With one, the trainer fetches no batch ahead."""
    expected = pytest.raises(ConfigError, match="limit_train_batches") if limit is None else contextlib.nullcontext()
    with expected:
        pl_trainer(tmp_path, limit_train_batches=limit).fit(Module(), StatefulDataLoader(Positioned(), 2))


def test_loaders_of_which_one_ends_earlier_and_is_left_out_then(tmp_path: Path) -> None:
    combined = CombinedLoader({"long": loader(8), "short": loader(4)}, "max_size")
    with pytest.raises(ConfigError, match="use 'max_size_cycle' or 'min_size'"):
        pl_trainer(tmp_path).fit(Module(), combined)
