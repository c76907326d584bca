"""What a rehearsal says."""

from __future__ import annotations

from harness.core.rehearsal import Record
from harness.rehearse.compare import Difference, Observed, Variable
from harness.rehearse.verdict import Verdict

SEEN = Observed(step=40, batches=40, finished=False)
DIFFERENT = Difference(14, "state", "optimizer.state.3.exp_avg (and 2 more)")


def test_without_an_interruption_identical_is_never_said() -> None:
    verdict = Verdict((), SEEN)

    assert not verdict.identical
    assert "not interrupted" in verdict.summary


def test_a_loop_that_makes_no_steps_is_told_so() -> None:
    """More --steps would not help."""
    verdict = Verdict((), Observed(step=0, batches=0, finished=True))

    assert "made no step" in verdict.summary
    assert "ckpt.steps(n)" in verdict.summary
    assert "--steps" not in verdict.summary


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


BEST = Variable(14, "best in main() (train.py)", "0.31", "inf")
EMA = Variable(14, "ema (train.py), an ExponentialMovingAverage,", "aa", "bb")


def test_a_variable_of_its_own_is_told_and_leaves_a_program_identical() -> None:
    verdict = Verdict(("7",), SEEN, variables=(BEST,))

    assert verdict.identical
    assert verdict.lines[0].startswith("bit-identical")
    assert verdict.lines[2] == "  best in main() (train.py): inf, unbroken 0.31, step 14"
    assert "ckpt.extra" in verdict.lines[3]


def test_an_object_with_a_state_that_was_not_given_is_a_difference() -> None:
    verdict = Verdict(("7",), SEEN, objects=(EMA,))

    assert not verdict.identical
    assert verdict.summary.startswith("DIFFERENT")
    assert "Pass it by name" in verdict.lines[1]


def test_variables_that_differ_by_then_come_before_the_usual_causes() -> None:
    later = Variable(15, "shown in main() (train.py)", "1", "2")

    lines = Verdict(("7",), SEEN, DIFFERENT, variables=(BEST, later)).lines

    assert lines.index("usual causes:") > 2
    assert "best in main()" in lines[2]
    assert not any("shown" in line for line in lines)


def test_a_program_that_differs_from_itself_is_not_the_resumes_fault() -> None:
    lines = Verdict(("7",), SEEN, DIFFERENT, DIFFERENT).lines

    assert "differs from itself" in lines[0]
    assert not any("ckpt.extra" in line for line in lines)


def test_a_missing_seed_is_the_first_cause_of_a_program_that_differs_from_itself() -> None:
    verdict = Verdict(("7",), SEEN, DIFFERENT, DIFFERENT, unseeded=("Python's random numbers",))

    causes = verdict.lines[verdict.lines.index("usual causes:") + 1 :]
    assert causes[0] == "  - Python's random numbers have no seed: set one as the program begins"
    assert not any(line.startswith("not observed") for line in verdict.lines)


def test_numbers_without_a_seed_that_change_nothing_were_not_observed() -> None:
    verdict = Verdict(("7",), SEEN, unseeded=("Python's random numbers",))

    assert verdict.lines[-1] == "not observed: Python's random numbers: they have no seed"


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


def test_what_differs_by_itself_is_named_beside_the_verdict() -> None:
    identical = Verdict(("7",), SEEN, loose=("memory/_assoc", "ckpt.extra/begun"))

    assert identical.identical
    assert identical.summary.endswith("interruptions at steps 7, but for memory._assoc (and 1 more)")
    different = Verdict(("7",), SEEN, DIFFERENT, variables=(BEST,), loose=("memory/_assoc",))
    assert not different.identical
    for verdict in (identical, different):
        assert verdict.lines[-1].startswith("not observed: memory._assoc")
    assert "memory._assoc and ckpt.extra.begun: two unbroken passes differ there" in identical.lines[-1]


def test_what_an_interruption_has_changed_is_named_in_a_program_that_differs_from_itself() -> None:
    lines = Verdict(("7",), SEEN, DIFFERENT, DIFFERENT, variables=(BEST,), objects=(EMA,)).lines

    assert any(line.startswith("not given to the Checkpointer: ema") for line in lines)
    assert any(line.startswith("  best in main()") for line in lines)
