"""Known: the loaders of the program's loops, and which stored position belongs to which of them.

Owns the names of loaders: a loader is called like the loop that brought it first, whichever loop iterates over it now;
a second one that the same loop brings while the program keeps the first is `name~2`. Their positions are stored by
these names. A resumed program goes through its loops only from the place of the snapshot on, so it meets the loaders in
another order than before. Up to the place, the snapshot tells which loader each loop had last. Behind it, a loader is
recognized by its form: what it reads, and the seed of its generator.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from harness.trainer.loaders.hook import InstrumentedLoader, Tree, is_held_elsewhere
from harness.trainer.loaders.instrument import instrument
from harness.trainer.loaders.persistent import Form, PersistentLoaders, Present, form_of
from harness.trainer.loaders.sequence import SequenceLoader
from harness.trainer.state.random_states import RandomStates


@dataclass(frozen=True)
class StoredLoaders:
    """What a snapshot keeps of the loaders.

    Attributes:
        positions: the position of each loader, by its name; in the order in which they were used last.
        loops: the name of the loader that a loop had last, by the loop's name, where the two differ.
        forms: what each loader looks like, by its name; none in a snapshot of an older version of the harness.
        persistent: names of the other loaders whose persistent workers were started.
    """

    positions: Tree
    loops: dict[str, str] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)
    persistent: tuple[str, ...] = ()

    @classmethod
    def of(cls, small: Mapping[str, Any]) -> StoredLoaders:
        """Return what `to_tree` has put into the small state of a snapshot."""
        return cls(
            small["loaders"],
            small.get("loader_loops", {}),
            {name: Form(*form) for name, form in small.get("loader_forms", {}).items()},
            tuple(small.get("persistent", ())),
        )

    def to_tree(self) -> Tree:
        """Return it as fields of the small state."""
        return {
            "loaders": self.positions,
            "loader_loops": self.loops,
            "loader_forms": {name: tuple(form) for name, form in self.forms.items()},
            "persistent": list(self.persistent),
        }


@dataclass(eq=False)
class _Known:
    name: str
    form: Form
    made: InstrumentedLoader


class Loaders:
    """The loaders of the program's loops, as the loops begin; and restored positions without a loader yet."""

    def __init__(
        self,
        states: Mapping[str, Any],
        random: RandomStates,
        warn: Callable[[str], None],
        *,
        seed_workers: bool,
    ) -> None:
        """Begin without loaders.

        Args:
            states: the Checkpointer's states, by name: a generator among them is restored as a state.
            random: the random states on which a batch may depend, but for those of the loaders' own generators.
            warn: shows a warning to the user.
            seed_workers: see `instrument`.
        """
        self._states, self._warn = states, warn
        self._random = random
        self._seed_workers = seed_workers
        self._known: dict[str, _Known] = {}
        self._loops: dict[str, str] = {}
        self._aimed = StoredLoaders({})
        self._pending: Tree = {}
        self._pending_rng: Any = None
        self._there = Present()
        self._arrived = self._missed = self._told_alike = False
        self._told_changed: set[str] = set()
        self.persistent = PersistentLoaders(random.take, random.set)
        """Loaders that the Checkpointer does not know."""

    # ---- as loops begin ---------------------------------------------------------------------------------------------

    def instrumented(self, loader: Any, loop: str, *, alone: bool = False) -> InstrumentedLoader:
        """Return the loader of the loop called `loop`, made resumable. A restored position that waits for it is set.

        A loop may bring a new object each epoch: if the program has let go of the one before, it counts as the same
        loader. An object that several loops bring is one loader.

        Args:
            loader: the loader.
            loop: the loop's name.
            alone: the loop has one loader, whatever object it brings, and whether or not the one before is still held.

        Raises:
            StateError: the loader's position cannot be restored exactly; says why, and the remedy.
        """
        known = self._find(loader, loop) or self._meet(loader, loop, alone=alone)
        self._known[known.name] = self._known.pop(known.name)  # the one used last comes last
        self._loops[loop] = known.name
        if (path := known.made.changed_outside()) is not None and path not in self._told_changed:
            self._told_changed.add(path)
            self._warn(
                f"{path} of the loader of {_first(known.name)} has been changed since its last iteration. A start "
                "makes it as it was at first, so that its order cannot be drawn again and a resume is refused, unless "
                "the program sets it before the loop again: keep it in ckpt.extra, and take it from there"
            )
        return known.made

    def _find(self, loader: Any, loop: str) -> _Known | None:
        for known in self._known.values():
            # Of a list each loop has a position of its own: one may be inside another, and nothing of it is shared.
            if known.made.loader is loader and (_first(known.name) == loop or not _is_sequence(known)):
                return known
        return None

    def _meet(self, loader: Any, loop: str, *, alone: bool) -> _Known:
        form = form_of(loader)
        if alone:
            name = loop
        elif not self._arrived:
            name = self._free(self._aimed.loops.get(loop, loop))
        else:
            name = self._name_behind(loader, loop, form) or self._free(loop, but=self._pending)
        made = instrument(loader, _first(name), self._random.take, self._random.set, self._seed_workers)
        known = self._known[name] = _Known(name, form, made)
        if name in self._pending:
            made.restore(self._without_settled(known, self._pending.pop(name)), self._pending_rng)
        self._look_for_alike(known)
        return known

    def _name_behind(self, loader: Any, loop: str, form: Form) -> str | None:
        """Return the name of a loader that is met behind the place of the snapshot; `None` if it is a new one."""
        if isinstance(loader, DataLoader) and loader not in self._there:
            return None
        last, forms = self._aimed.loops.get(loop, loop), self._aimed.forms
        ours = [name for name in self._pending if _first(name) == _first(last)]
        for name in (*ours, *self._pending):  # of several, the one that was used longest ago
            if forms.get(name, form) == form:
                return name
        is_alone = ours == [last] and forms[last].parts == form.parts  # its generator has got another seed
        return last if is_alone else None

    def _free(self, name: str, but: Container[str] = ()) -> str:
        """Return the name itself, or a numbered one if a loader has it that the program still holds.

        Args:
            name: the name.
            but: other names that are not free.
        """
        first, number = _first(name), 1
        while name in but or (name in self._known and is_held_elsewhere(self._known[name].made)):
            number += 1
            name = f"{first}~{number}"
        self._known.pop(name, None)
        return name

    def _look_for_alike(self, known: _Known) -> None:
        """Warn if a resume could take the loader for another one of the same loop, and that would matter."""
        ours = [other for other in self._known.values() if _first(other.name) == _first(known.name)]
        alike = [other for other in ours if other is not known and other.form == known.form]
        matters = getattr(known.made.loader, "num_workers", 0) or known.made.generators()
        if not (alike and matters) or self._told_alike:
            return
        if any(is_held_elsewhere(other.made, collects=True) for other in alike):
            self._told_alike = True
            self._warn(
                f"one loop iterates over several loaders in turns, which look alike ({known.form.parts}): a resume may "
                "take one for the other, and then draw other random numbers. Give each a generator with a seed of its "
                "own: DataLoader(…, generator=torch.Generator().manual_seed(number))"
            )

    def given(self) -> list[Any]:
        """Return the loaders of the loops that have begun."""
        return [known.made.loader for known in self._known.values()]

    # ---- the snapshot -----------------------------------------------------------------------------------------------

    def store(self) -> StoredLoaders:
        """Return the position of each loader that the program still holds, and of the last one of each name.

        Those that a resumed program has not met yet keep the positions that they had.
        """
        newest = {_first(name): name for name in self._known}
        for name in [*self._known]:
            if name not in newest.values() and not is_held_elsewhere(self._known[name].made):
                del self._known[name]
        forms = {name: form for name, form in self._aimed.forms.items() if name in self._pending}
        forms |= {name: known.form for name, known in self._known.items()}
        positions = self._pending | {name: known.made.position() for name, known in self._known.items()}
        loops = self._aimed.loops | self._loops
        return StoredLoaders(
            positions,
            {loop: name for loop, name in loops.items() if loop != name and name in positions},
            forms,
            tuple(self.persistent.started()),
        )

    def aim(self, stored: StoredLoaders) -> None:
        """Note the loaders of the snapshot whose place is to be reached."""
        self._aimed = stored

    def forget_inner(self) -> None:
        """Drop the positions of loaders whose loops have not begun: the place in those loops was not reached."""
        self._missed = True

    def restore(self, stored: StoredLoaders, rng: Any, *, arrives: bool) -> None:
        """Restore the loaders that are known now, and the others when their loops begin. Sets the random states, last.

        Args:
            stored: the loaders of the snapshot.
            rng: the random states of the snapshot.
            arrives: whether the program is at the place of the snapshot, and not on the way in a body.
        """
        self._aimed, self._pending = stored, dict(stored.positions)
        for name, known in self._known.items():
            if name in self._pending:
                known.made.restore(self._pending.pop(name), rng)
        if self._missed:
            self._pending = {}
        if arrives and self._pending:
            self._there.look()
        self._arrived |= arrives
        self.persistent.restore(stored.persistent)
        self._random.set(rng)
        self._pending_rng = rng

    def _without_settled(self, known: _Known, position: Tree) -> Tree:
        """Return a position that is restored late, without the generators that were restored, and drawn from, before.

        These are the states, and those that another loader shares with this one.
        """
        others = [other.made for other in self._known.values() if other is not known]
        settled = {id(state) for state in self._states.values()}
        settled |= {id(generator) for made in others for generator in made.generators().values()}
        return _without(position, {path for path, each in known.made.generators().items() if id(each) in settled})


def _without(position: Tree, paths: Iterable[str]) -> Tree:
    """Return a position without the states of the generators at these paths."""
    if "base" in position:
        return position | {"base": _without(position["base"], paths)}
    states = position.get("generators", {})
    return position | {"generators": {path: state for path, state in states.items() if path not in paths}}


def _first(name: str) -> str:
    """Return the name of the loop that brought a loader first."""
    return name.partition("~")[0]


def _is_sequence(known: _Known) -> bool:
    return isinstance(known.made, SequenceLoader)
