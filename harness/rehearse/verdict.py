"""The verdict of a rehearsal: what was compared, what was not reached or seen, and the usual causes of a difference.

Owns its words and its JSON form. Pure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from harness.core.words import listed
from harness.rehearse.compare import Difference, Observed, Variable, in_words

CAUSES = (
    (
        "a value in a local variable (a running average, a hidden state, a best loss, a counter)",
        "keep it in ckpt.extra",
    ),
    ("a number that enumerate() counts", "use ckpt.enumerate(loader), ckpt.batch or ckpt.step_count"),
    ("data or random numbers drawn before the loop", "draw them inside of it, or before Checkpointer(...)"),
    ("a loader or iterator that the Checkpointer does not know", "loop over ckpt.batches(loader), or pass loader="),
    ("an object with a state of its own that was not given (a scheduler, an EMA, an environment)", "pass it by name"),
)
"""The usual causes of a difference, the most frequent one first, each with its remedy."""
OF_ITSELF = (
    "an operation is not deterministic: torch.use_deterministic_algorithms(True), cudnn.benchmark = False",
    "a seed is missing, or taken from the clock",
    "memory is used that was never initialised: torch.empty, np.empty",
    "threads or processes race: a pool, workers that share a file",
)
"""The usual causes of a program that differs from itself."""
_TOO_FEW = "nothing is shown: the program was not interrupted at any step. Use more --steps"
_NO_STEPS = (
    "nothing is shown: the program's loop made no step, and only between steps is a program interrupted. "
    "ckpt.epochs(n) alone makes none: loop over ckpt.batches(loader) inside of it, or over ckpt.steps(n) instead"
)


@dataclass(frozen=True)
class Verdict:
    """The result of a rehearsal.

    Attributes:
        places: where the program was interrupted, in words.
        seen: what the unbroken pass has shown.
        difference: the first one between the unbroken and the interrupted pass.
        of_itself: the first one between two unbroken passes.
        missing: what was not reached, in words.
        unseen: what the Checkpointer cannot observe, in words.
        unseeded: random numbers without a seed, in words.
        variables: the program's own, as far as an interruption has changed them.
        objects: those with a state of their own that were not given to the Checkpointer, likewise.
        files: files that the passes wrote in the current directory.
        loose: names of what differs in two unbroken passes, while all else is the same.
    """

    places: tuple[str, ...]
    seen: Observed
    difference: Difference | None = None
    of_itself: Difference | None = None
    missing: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    unseeded: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()
    objects: tuple[Variable, ...] = ()
    files: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()

    @property
    def identical(self) -> bool:
        """Whether the interrupted program was bit-identical, and was interrupted at all."""
        return bool(self.places) and self.difference is None and not self.objects

    @property
    def step(self) -> int:
        """The step at which the passes were compared last."""
        return self.seen.step

    @property
    def summary(self) -> str:
        """The verdict in one line."""
        places = listed(self.places)
        if not self.places:
            return _NO_STEPS if not self.seen.step else _TOO_FEW
        if self.difference is None and self.objects:
            first = self.objects[0]
            return (
                f"DIFFERENT after interruptions at steps {places}: {first.name} differs first, after step {first.step}"
            )
        if self.difference is None:
            but = f", but for {in_words(self.loose)}" if self.loose else ""
            return f"bit-identical at step {self.seen.step} after interruptions at steps {places}{but}"
        found = _found(self.difference)
        if self.of_itself is not None:
            itself = _found(self.of_itself)
            return f"the program differs from itself, without any interruption: {itself}. A resume cannot be exact"
        return f"DIFFERENT after interruptions at steps {places}: {found}"

    @property
    def lines(self) -> list[str]:
        """The verdict, line by line: what the passes wrote, the verdict itself, causes, and what was not shown."""
        lines = []
        if self.files:
            lines += ["the passes wrote these files here, one over the other; {out} in the command keeps them apart:"]
            lines += [f"  {path}" for path in self.files[:_SHOWN]]
            lines += [f"  and {len(self.files) - _SHOWN} more"] if len(self.files) > _SHOWN else []
        lines.append(self.summary)
        if self.of_itself is not None:
            seed = [f"  - {numbers} have no seed: set one as the program begins" for numbers in self.unseeded]
            lines += ["usual causes:", *seed, *(f"  - {cause}" for cause in OF_ITSELF)]
        lines += self._beside
        if self.of_itself is None and self.difference is not None and not self.objects:
            lines += ["usual causes:", *(f"  - {cause}: {remedy}" for cause, remedy in CAUSES)]
        lines += [f"not reached: {what}" for what in self.missing]
        lines += [f"not observed: {what}" for what in self.unseen]
        if self.loose:
            names = [name.replace("/", ".") for name in self.loose[:_SHOWN]]
            names += [f"{len(self.loose) - _SHOWN} more"] if len(self.loose) > _SHOWN else []
            lines += [
                f"not observed: {listed(names)}: two unbroken passes differ there, and in nothing else (a time, or "
                "memory that is never initialised, as of torch.empty)"
            ]
        if self.of_itself is None:
            lines += [f"not observed: {numbers}: they have no seed" for numbers in self.unseeded]
        return lines

    @property
    def _beside(self) -> list[str]:
        """What differs in the program and was not given to the Checkpointer, line by line."""
        lines = [
            f"not given to the Checkpointer: {each.name} differs after step {each.step}. Pass it by name"
            for each in self.objects[:_SHOWN]
        ]
        until = self.difference.step if self.difference is not None else self.seen.step
        earlier = [each for each in self.variables if each.step <= until]
        if earlier:
            lines.append(
                "after an interruption, variables of the program have other values, and so has what they decide:"
            )
            lines += [
                f"  {each.name}: {each.there}, unbroken {each.here}, step {each.step}" for each in earlier[:_SHOWN]
            ]
            lines += [f"  and {len(earlier) - _SHOWN} more"] if len(earlier) > _SHOWN else []
            lines.append("  keep those that matter in ckpt.extra, and read them from there")
        return lines

    def to_json(self) -> dict[str, Any]:
        """The verdict for machines."""

        def of(difference: Difference | None) -> dict[str, Any] | None:
            return (
                None if difference is None else {name: getattr(difference, name) for name in ("step", "what", "name")}
            )

        return {
            "identical": self.identical,
            "step": self.seen.step,
            "finished": self.seen.finished,
            "interrupted_at": list(self.places),
            "difference": of(self.difference),
            "differs_from_itself": of(self.of_itself),
            "not_reached": list(self.missing),
            "not_observed": list(self.unseen),
            "without_a_seed": list(self.unseeded),
            "differs_by_itself": list(self.loose),
            "variables": [dataclasses.asdict(each) for each in self.variables],
            "objects_not_given": [dataclasses.asdict(each) for each in self.objects],
            "files": list(self.files),
            "verdict": self.summary,
        }


def _found(difference: Difference) -> str:
    place = "in" if difference.what == "batch" else "after"
    whose = f" of rank {difference.rank}" if difference.rank else ""
    return f"{difference.name}{whose} differs first, {place} step {difference.step}"


_SHOWN = 10
