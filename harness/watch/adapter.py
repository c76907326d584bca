"""Adapter: what a framework's checkpoints look like, as data: a table in TOML, one for each framework.

Owns the fields of such a table, and which tables there are. `docs/watch.md` tells people how to write one.
"""

from __future__ import annotations

import functools
import importlib.resources
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from harness.errors import ConfigError
from harness.watch.patterns import BadPattern, pattern

WITHIN_EPOCH = "epoch/step"
"""In `Layout.step`: each epoch counts its steps from 0."""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that names all files of a part of the checkpoint.

    Attributes:
        file: pattern of its path in the checkpoint.
        names: of a JSON file: the field whose values (of an object), or items (of an array), are the names, beside it.
        form: "json", or "dcp": a `.metadata` of torch.distributed.checkpoint, which also tells how long each file is.
    """

    file: str
    names: str = ""
    form: Literal["json", "dcp"] = "json"


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A small file, or a link, that names the newest checkpoint.

    Attributes:
        path: where it lies in the watched directory.
        says: what stands in it, with fields of the checkpoint's own path; {name} is that, and {root} the watched
            directory.
        is_link: whether it is a symbolic link.
        is_last: whether it is changed only once the checkpoint is whole, so that one that it does not name is not.
    """

    path: str
    says: str
    is_link: bool = False
    is_last: bool = False


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which directory, file or files are a checkpoint.

    Attributes:
        directory: pattern of a directory whose whole content is one; empty if files are.
        files: patterns of files.
        files_are: what one of these files is: "parts", so that all with the same numbers are one checkpoint; "each", a
            checkpoint by itself; or "one", the only file of its kind, which is written again and again.
        shared: patterns of files of the watched directory that belong to each checkpoint.
        leave_out: patterns of files in a checkpoint that are not part of it.
        rewritten: whether a file of it may be written again in place; if not, a hard link sets it aside.
        step: how a checkpoint without a {step} in its name is counted: "epoch", or a JSON file and its field, as in
            "trainer_state.json:global_step"; "epoch/step" if each epoch counts its steps from 0. With none of these,
            the one that was written last is the newest.
    """

    directory: str = ""
    files: tuple[str, ...] = ()
    files_are: Literal["parts", "each", "one"] = "parts"
    shared: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    rewritten: bool = True
    step: str = ""


class Complete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What makes it complete. All of it has to hold, and all files have to be whole by their own form.

    Attributes:
        has: patterns of files that are there once it is, such as a marker, or the last file that is written.
        has_not: patterns of files in it that are there while it is being written.
        beside_not: paths, with {name} for its own, of files beside it that are there while it is being written.
        index: files that name others.
        each_rank: patterns with {rank} of files that each rank writes.
        newest: pattern of a file that is written last each time, where the same names are written again: none of the
            others may be newer.
        each_rank_or_none: whether there may be checkpoints without any such file, which are whole without.
        early: whether the mark, or the pointer, may come before the files of other ranks. Then a checkpoint also has to
            have every file that the one before it had; the first one has to have a file of each rank, by `each_rank`,
            or the program has to live on for 30 s behind it, to begin another, or to end well.
        late: patterns of files that some programs write behind all marks. As with `early`, of any number of ranks.
        quiet_s: with this, files that did not change for so long are taken for complete. For layouts without any mark:
            only where the user names the adapter.
    """

    has: tuple[str, ...] = ()
    has_not: tuple[str, ...] = ()
    beside_not: tuple[str, ...] = ()
    index: tuple[Index, ...] = ()
    each_rank: tuple[str, ...] = ()
    each_rank_or_none: bool = False
    newest: str = ""
    early: bool = False
    late: tuple[str, ...] = ()
    quiet_s: float = 0.0


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the program comes to continue.

    Attributes:
        how: in words, for people.
        argument: what to add to the command, with {checkpoint} for its path; empty if it finds it by itself.
    """

    how: str
    argument: str = ""


class Save(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the program is asked to save, and to leave, on a notice.

    With none of these, SIGTERM asks a program that has a handler for it; any other one saves only by its own clock.

    Attributes:
        signal: sent to it, if it has a handler for that.
        to: "program", its first process with such a handler, or "ranks", every process with a RANK.
        touch: a file in the watched directory that is made.
        http: a URL that gets an empty POST.
        command: a command that is run.
        leaves: whether it ends by itself after that.
    """

    signal: str = ""
    to: Literal["program", "ranks"] = "program"
    touch: str = ""
    http: str = ""
    command: tuple[str, ...] = ()
    leaves: bool = True

    @property
    def is_possible(self) -> bool:
        """Whether there is a way to ask."""
        return bool(self.signal or self.touch or self.http or self.command)


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One framework's table.

    Attributes:
        title: the framework, and what writes these checkpoints.
        source: what it was drawn from: a version, or a page.
        checkpoint: see `Layout`.
        resume: see `Resume`.
        complete: see `Complete`.
        pointers: see `Pointer`.
        save: see `Save`.
        by_name: whether it is used only where the user names it.
        general: whether many programs have such names: it is recognized only where no other table is.
        name: the table's own name.
    """

    title: str
    source: str
    checkpoint: Layout
    resume: Resume
    complete: Complete = Complete()
    pointers: tuple[Pointer, ...] = ()
    save: Save = Save()
    by_name: bool = False
    general: bool = False
    name: str = ""

    def explained(self) -> list[str]:
        """Return its rules as lines for people."""
        layout, marks, save = self.checkpoint, self.complete, self.save
        kind = {"parts": "all with the same numbers are one", "each": "each is one", "one": "the only one of its kind"}
        found = [f"a directory {layout.directory}"] if layout.directory else []
        found += [f"files {', '.join(layout.files)}: {kind[layout.files_are]}"] if layout.files else []
        rules = [
            ("a checkpoint is", found),
            ("with, beside it", list(layout.shared)),
            ("it is whole once it has", [*marks.has, *(f"{text} of each rank" for text in marks.each_rank)]),
            ("and every file that is named in", [index.file for index in marks.index]),
            ("and once it has no", [*marks.has_not, *(f"{text} beside it" for text in marks.beside_not)]),
            ("and is named by", [pointer.path for pointer in self.pointers if pointer.is_last]),
            ("and has not changed for", [f"{marks.quiet_s:g} s"] if marks.quiet_s else []),
            ("on a notice", [_asking(save)]),
            ("drawn from", [self.source]),
        ]
        return [f"{begin} {'; '.join(texts)}" for begin, texts in rules if texts]

    def check(self) -> None:
        """Raise ConfigError if a pattern has a field that there is not, or the table contradicts itself."""
        layout, complete = self.checkpoint, self.complete
        patterns = [layout.directory, *layout.files, *layout.shared, *layout.leave_out]
        patterns += [*complete.has, *complete.has_not, *complete.beside_not, *complete.each_rank, *complete.late]
        patterns += [*(index.file for index in complete.index), *(pointer.says for pointer in self.pointers)]
        try:
            for text in patterns:
                pattern(text)
        except BadPattern as err:
            raise ConfigError(f"adapter {self.name}: {err}") from err
        if bool(layout.directory) == bool(layout.files):
            raise ConfigError(f"adapter {self.name}: a checkpoint is either a directory or files")
        ways = [way for text in (layout.directory, *layout.files) for way in text.split("|") if text]
        if layout.step == WITHIN_EPOCH and not all("{epoch}" in way and "{step}" in way for way in ways):
            raise ConfigError(
                f"adapter {self.name}: step = {WITHIN_EPOCH!r} needs an {{epoch}} and a {{step}} in the name"
            )
        if self.save.signal and self.save.signal not in signal.Signals.__members__:
            raise ConfigError(f"adapter {self.name}: there is no signal {self.save.signal!r}")
        if complete.quiet_s and not self.by_name:
            raise ConfigError(f"adapter {self.name}: quiet_s counts only with by_name = true")


def _asking(save: Save) -> str:
    ways = [f"{save.signal} to the {save.to}"] if save.signal else []
    ways += [f"the file {save.touch} is made"] if save.touch else []
    ways += [f"a POST to {save.http}"] if save.http else []
    ways += [" ".join(save.command)] if save.command else []
    return " or ".join(ways) or "SIGTERM, if the program has a handler for it"


_TABLES = msgspec.toml.decode


@functools.cache
def built_in() -> Mapping[str, Adapter]:
    """Return the adapters that come with the harness, by name."""
    folder = importlib.resources.files("harness.watch") / "adapters"
    found = [_parse(item.read_bytes(), item.name.removesuffix(".toml")) for item in folder.iterdir()]
    return {adapter.name: adapter for adapter in sorted(found, key=lambda adapter: adapter.name)}


def named(name: str) -> Adapter:
    """Return the adapter of this name, or that of a file of the user's. Raises ConfigError."""
    if name.endswith(".toml"):
        try:
            return _parse(Path(name).read_bytes(), Path(name).stem)
        except OSError as err:
            raise ConfigError(f"{name}: {err.strerror}") from err
    if name not in built_in():
        raise ConfigError(f"there is no adapter {name!r}: there are {', '.join(built_in())}, or give a .toml file")
    return built_in()[name]


def _parse(data: bytes, name: str) -> Adapter:
    try:
        adapter = msgspec.structs.replace(_TABLES(data, type=Adapter), name=name)
    except (msgspec.MsgspecError, UnicodeDecodeError) as err:
        raise ConfigError(f"adapter {name}: {err}") from err
    adapter.check()
    return adapter
