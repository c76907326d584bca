"""What a rehearsal says."""

from __future__ import annotations

from harness.core.rehearsal import Record
from harness.rehearse.compare import Difference, Observed
from harness.rehearse.verdict import Verdict

SEEN = Observed(step=40, batches=40, finished=False)
DIFFERENT = Difference(14, "state", "optimizer.state.3.exp_avg (and 2 more)")


def test_without_an_interruption_identical_is_never_said() -> None:
    verdict = Verdict((), SEEN)

    assert not verdict.identical
    assert "not interrupted" in verdict.summary


def test_an_identical_program() -> None:
    verdict = Verdict(("7", "13 (in a validation)", "20 (the end of an epoch)"), SEEN)

    assert verdict.identical
    assert verdict.lines == [
        "bit-identical at step 40 after interruptions at steps 7, 13 (in a validation) and 20 (the end of an epoch)"
    ]


def test_a_difference_names_what_and_the_usual_causes() -> None:
    lines = Verdict(("7",), SEEN, DIFFERENT).lines

    assert "optimizer.state.3.exp_avg (and 2 more) differs first, after step 14" in lines[0]
    assert "ckpt.extra" in lines[2]


def test_a_program_that_differs_from_itself_is_not_the_resumes_fault() -> None:
    lines = Verdict(("7",), SEEN, DIFFERENT, DIFFERENT).lines

    assert "differs from itself" in lines[0]
    assert not any("ckpt.extra" in line for line in lines)


def test_what_was_not_shown_and_what_was_written_is_said() -> None:
    verdict = Verdict(("7",), SEEN, missing=("a validation",), unseen=("batches",), files=("final.pt",))

    assert verdict.lines[0].startswith("the passes wrote")
    assert verdict.lines[1] == "  final.pt"
    assert verdict.lines[-2:] == ["not reached: a validation", "not observed: batches"]


def test_a_record_fits_the_same_program_with_other_folders() -> None:
    record = Record(True, ("7",), 40, ("python", "train.py#aa", "--out={out}/x", "--lr", "0.1"))

    assert record.fits(("python", "train.py#aa", "--out=/data/run-1/x", "--lr", "0.1"))
    assert not record.fits(("python", "train.py#aa", "--out=/data/run-1/x", "--lr", "0.2"))
    assert not record.fits(("python", "train.py#ab", "--out=/data/run-1/x", "--lr", "0.1"))
    assert not record.fits(("python", "train.py#aa"))
