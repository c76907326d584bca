"""What a snapshot of Lightning's fit has beside tensors. Whole trainings are tests/integrations."""

from __future__ import annotations

import copy
import itertools
import types
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.integrations.lightning_progress import Rows, continue_logger, with_paths, without_paths

STRINGS = st.sampled_from(["", "min", "val/loss", "/a/last.ckpt", "/a/b/epoch=1.ckpt", "/"])
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), STRINGS),
    lambda inner: st.one_of(
        st.lists(inner),
        st.tuples(inner, inner),
        st.dictionaries(STRINGS, inner),
        st.dictionaries(STRINGS, inner).map(OrderedDict),
    ),
)


@given(VALUES)
def test_paths_that_are_taken_out_come_back(value: object) -> None:
    paths = list[str]()
    before = copy.deepcopy(value)
    without = without_paths(value, paths)
    assert value == before
    assert not any(path in repr(without) for path in paths if len(path) > 1)
    found = with_paths(without, paths)
    assert (found, repr(found)) == (value, repr(value))


def test_relative_paths_are_those_in_the_folders_of_the_trainer() -> None:
    paths = list[str]()
    state = {"dirpath": "runs/version_0", "best": "runs/version_0/a.ckpt", "monitor": "runs_of/loss", "mode": "min"}
    without = without_paths(state, paths, ["runs"])
    assert paths == ["runs/version_0", "runs/version_0/a.ckpt"]
    assert (without["monitor"], without["mode"]) == ("runs_of/loss", "min")
    assert with_paths(without, paths) == state


def test_the_paths_of_a_model_checkpoint_are_taken_out_of_keys_and_values() -> None:
    paths = list[str]()
    state = {"monitor": "val/loss", "best": "/run/best.ckpt", "kept": {"/run/best.ckpt": 1.0, "/run/last.ckpt": 2.0}}
    without = without_paths(state, paths)
    assert paths == ["/run/best.ckpt", "/run/last.ckpt"]
    other = without_paths({**state, "best": "/x/best.ckpt", "kept": {"/x/best.ckpt": 1.0, "/x/last.ckpt": 2.0}}, [])
    assert without == other


# ---- loggers --------------------------------------------------------------------------------------------------------


class CSVLogger:
    """One of Lightning: it numbers its folder, and deletes the file that it finds there."""

    def __init__(self, root: Path | str) -> None:
        self._root = root
        self._version: int | None = None
        self._experiment: types.SimpleNamespace | None = None

    @property
    def save_dir(self) -> str:
        return str(self._root)

    @property
    def log_dir(self) -> str:
        return f"{self._root}/version_{self._version}"

    @property
    def experiment(self) -> types.SimpleNamespace:
        if self._experiment is None:
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)
            Path(self.log_dir, "metrics.csv").unlink(missing_ok=True)
            self._experiment = types.SimpleNamespace(metrics_keys=[])
        return self._experiment

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Log nothing."""


HEADER = "loss,step"
ROWS = ["1.0,0", "0.5,1", ",1", "0.25,2"]
"""Steps 0 to 2; step 1 has two rows, the second of a validation."""


def continued(root: Path, step: int, *rows: int, file: str | None = "metrics.csv") -> tuple[dict[str, list[str]], Rows]:
    """Return the files of a logger that has gone on, and its count."""
    folder = root / "version_3"
    folder.mkdir()
    if file is not None:
        (folder / file).write_text("\n".join([HEADER, *ROWS, ""]))
    logger = CSVLogger(root)
    counted = Rows(logger)
    continue_logger(logger, counted, step, ["CSVLogger", 3, *rows], writes=True)
    assert logger.experiment.metrics_keys == ([] if file is None else ["loss", "step"])
    return {path.name: path.read_text().splitlines() for path in folder.iterdir()}, counted


@pytest.mark.parametrize(
    ("step", "rows", "kept"),
    [(1, [1], ROWS[:2]), (1, [2], ROWS[:3]), (1, [0], ROWS[:1]), (1, [], ROWS[:1]), (2, [0], ROWS[:3])],
    ids=["before the validation", "behind it", "before the step", "an older snapshot", "another step"],
)
def test_a_csv_file_goes_on_at_the_snapshot_and_what_comes_again_is_kept_beside_it(
    step: int, rows: list[int], kept: list[str], tmp_path: Path
) -> None:
    files, counted = continued(tmp_path, step, *rows)
    assert files == {"metrics.csv": [HEADER, *kept], f"metrics.before-step-{step}.csv": [HEADER, *ROWS]}
    assert counted.of(step) == sum(rows)


def test_a_csv_file_of_which_nothing_comes_again_is_alone(tmp_path: Path) -> None:
    files, _ = continued(tmp_path, 3, 0)
    assert files == {"metrics.csv": [HEADER, *ROWS]}


def test_a_row_that_a_kill_has_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "version_3"
    folder.mkdir()
    (folder / "metrics.csv").write_text("\n".join([HEADER, *ROWS, "0.1"]))
    logger = CSVLogger(tmp_path)
    continue_logger(logger, Rows(logger), 9, ["CSVLogger", 3, 0], writes=True)
    assert (folder / "metrics.csv").read_text().splitlines() == [HEADER, *ROWS]
    assert (folder / "metrics.before-step-9.csv").exists()


def test_on_a_new_machine_there_is_no_csv_file_yet(tmp_path: Path) -> None:
    files, _ = continued(tmp_path, 3, 0, file=None)
    assert files == {}


def test_a_start_that_was_killed_while_it_cut_the_csv_file_off_has_lost_nothing(tmp_path: Path) -> None:
    files, _ = continued(tmp_path, 2, 0, file="metrics.before-step-2.csv")
    assert files == {"metrics.csv": [HEADER, *ROWS[:3]], "metrics.before-step-2.csv": [HEADER, *ROWS]}


@pytest.mark.parametrize("killed_at", [1, 2])
def test_wherever_a_start_is_killed_no_row_of_the_csv_file_is_lost(
    killed_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "version_3"
    folder.mkdir()
    (folder / "metrics.csv").write_text("\n".join([HEADER, *ROWS, ""]))
    rename, renamed = Path.rename, itertools.count(1)

    def rename_or_die(path: Path, target: Path) -> Path:
        if next(renamed) == killed_at:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_or_die)
    logger = CSVLogger(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        continue_logger(logger, Rows(logger), 2, ["CSVLogger", 3, 0], writes=True)
    for _ in range(2):  # and again at the same step, when nothing comes again
        logger = CSVLogger(tmp_path)
        continue_logger(logger, Rows(logger), 2, ["CSVLogger", 3, 0], writes=True)
        assert (folder / "metrics.csv").read_text().splitlines() == [HEADER, *ROWS[:3]]
        assert (folder / "metrics.before-step-2.csv").read_text().splitlines() == [HEADER, *ROWS]


def test_a_logger_that_is_in_use_before_fit_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = CSVLogger(tmp_path)
    logger._experiment = types.SimpleNamespace()
    continue_logger(logger, Rows(logger), 1, ["CSVLogger", 3, 0], writes=True)
    assert logger._version is None
    assert "it was in use before fit()" in capsys.readouterr().err


def test_a_logger_that_writes_elsewhere_begins_anew_and_deletes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    logger = CSVLogger("s3://bucket")
    continue_logger(logger, Rows(logger), 1, ["CSVLogger", 3, 0], writes=True)
    assert (logger._version, logger._experiment) == (None, None)
    assert "its directory is not a local one" in capsys.readouterr().err


def test_another_kind_of_logger_is_left_alone(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    continue_logger(logger, Rows(logger), 1, ["TensorBoardLogger", 3, 0], writes=True)
    assert (logger._version, logger._experiment) == (None, None)


def test_rows_of_the_newest_step_are_counted(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    counted = Rows(logger)
    for step in (0, 1, 1, None):
        logger.log_metrics({"loss": 1.0}, step)
    logger.log_metrics(metrics={"loss": 1.0}, step=1)
    assert [counted.of(step) for step in (0, 1, 2)] == [0, 3, 0]
