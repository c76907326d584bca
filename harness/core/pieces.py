"""Pieces: which rank stores what of a state that several ranks hold together.

Owns the assignment: every element is stored by exactly one rank, and the bytes are spread evenly. A pure function of
what the ranks hold: it knows no tensors, and does not depend on the order in which they are told.

    what each rank holds ──▶ assign ──▶ what each rank stores
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.core.shard import DTYPE_BYTES
from harness.errors import StateError


class Holding(enum.Enum):
    """How a rank holds a piece."""

    SHARED = "shared"
    """It is equal wherever it is held: a shard of a DTensor, or what DDP keeps equal."""
    MAYBE = "maybe"
    """It may be equal on all ranks; until that is known, it is the rank's own."""
    OWN = "own"
    """It is this rank's alone, whatever other ranks have under the same name."""


@dataclass(frozen=True, order=True)
class Piece:
    """A box of a tensor.

    Attributes:
        name: of the tensor.
        offset: where it begins in the whole tensor, in each dimension.
        shape: of the box.
        whole: shape of the whole tensor.
        dtype: of an element, as in a shard.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """How many boxes it can be cut into along dimension 0; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.shape) * self.itemsize

    def cut(self, first: int, last: int) -> Piece:
        """Return the rows from `first` to before `last`; the piece itself if that is all of them."""
        if (first, last) == (0, self.rows):
            return self
        offset = (self.offset[0] + first, *self.offset[1:])
        return Piece(self.name, offset, (last - first, *self.shape[1:]), self.whole, self.dtype)

    def contains(self, other: Piece) -> bool:
        """Whether another box of the same tensor lies within this one."""
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def meets(self, other: Piece) -> bool:
        """Whether two boxes of one tensor have an element in common."""
        return all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ) and bool(math.prod(self.shape) and math.prod(other.shape))


@dataclass(frozen=True)
class Run:
    """Bytes of a box: from `begin` in the box, `size` of them, to `at` in the whole tensor."""

    begin: int
    size: int
    at: int


@dataclass(frozen=True)
class Held:
    """A piece that a rank holds."""

    piece: Piece
    how: Holding


def assign(tables: Sequence[Sequence[Held]]) -> list[list[Piece]]:
    """Return what each rank stores, in the order of the pieces.

    Args:
        tables: what each rank holds, by its number.

    Raises:
        StateError: the pieces of a tensor overlap without being equal, or leave some of it out.
    """
    shared: dict[Piece, set[int]] = {}
    stored: list[list[Piece]] = [[] for _ in tables]
    for rank, table in enumerate(tables):
        for held in table:
            if held.how is Holding.OWN:
                stored[rank].append(held.piece)
            else:
                shared.setdefault(held.piece, set()).add(rank)
    check_cover(shared)
    loads = [sum(piece.bytes for piece in pieces) for pieces in stored]
    groups: dict[tuple[int, ...], list[Piece]] = {}
    for piece, holders in shared.items():
        if not piece.bytes:  # an empty tensor is stored too, and an empty shard of another is not
            stored[min(holders)] += [] if math.prod(piece.whole) else [piece]
            continue
        groups.setdefault(tuple(sorted(holders)), []).append(piece)
    for ranks in sorted(groups, key=lambda ranks: (len(ranks), ranks)):  # who has no choice comes first
        _spread(sorted(groups[ranks]), ranks, loads, stored)
    return [sorted(pieces) for pieces in stored]


def _spread(pieces: Sequence[Piece], ranks: Sequence[int], loads: list[int], stored: list[list[Piece]]) -> None:
    """Give the pieces to these ranks, one after the other, so that their loads become as equal as can be."""
    quotas = _quotas(sum(piece.bytes for piece in pieces), [loads[rank] for rank in ranks])
    due = 0.0  # bytes that the ranks before should have taken too, but for rows that cannot be cut
    queue = list(reversed(pieces))
    for number, rank in enumerate(ranks):
        due += quotas[number]
        is_last = number == len(ranks) - 1
        while queue and (is_last or due > 0):
            piece = queue.pop()
            rows = piece.rows
            if not is_last and piece.bytes > due:
                rows = min(piece.rows, max(0, round(due / piece.row_bytes)))
            if rows:
                mine = piece.cut(0, rows)
                stored[rank].append(mine)
                loads[rank] += mine.bytes
                due -= mine.bytes
            if rows < piece.rows:
                queue.append(piece.cut(rows, piece.rows))
                break


def _quotas(total: int, loads: Sequence[int]) -> list[float]:
    """Return how much of `total` each should take so that the least loaded are filled up first, like water."""
    level, left = 0.0, float(total)
    order = sorted(range(len(loads)), key=lambda number: loads[number])
    for count, number in enumerate(order, 1):
        floor = loads[order[count]] if count < len(order) else math.inf
        room = (floor - max(level, loads[number])) * count if floor != math.inf else math.inf
        level = max(level, loads[number])
        if left <= room:
            level += left / count
            break
        left -= room
        level = floor
    return [max(0.0, level - load) for load in loads]


def check_cover(shared: Iterable[Piece]) -> None:
    """Raise StateError unless the pieces of each tensor cover it, each element once."""
    by_name: dict[str, list[Piece]] = {}
    for piece in shared:
        by_name.setdefault(piece.name, []).append(piece)
    for name, pieces in by_name.items():
        if len({(piece.whole, piece.dtype) for piece in pieces}) > 1:
            shapes = sorted({f"{piece.dtype} {list(piece.whole)}" for piece in pieces})
            raise StateError(f"{name}: its ranks do not have the same tensor: {', '.join(shapes)}")
        elements = sum(math.prod(piece.shape) for piece in pieces)
        if elements != math.prod(pieces[0].whole) or any(
            one.meets(other) for number, one in enumerate(pieces) for other in pieces[number + 1 :]
        ):
            raise StateError(f"{name}: what its ranks hold of it overlaps, or leaves some of it out")


def runs(whole: Sequence[int], offset: Sequence[int], shape: Sequence[int], itemsize: int) -> Iterator[Run]:
    """Yield the runs of bytes of a box that lie one after the other in the whole tensor, in the order of the box.

    Both are contiguous, in the order of rows. The arguments are those of a piece.
    """
    inner = len(shape)
    while inner and shape[inner - 1] == whole[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)  # the last dimension that is cut is still one run
    size = math.prod(shape[inner:]) * itemsize
    strides = [math.prod(whole[dim + 1 :]) * itemsize for dim in range(len(whole))]
    start = sum(at * stride for at, stride in zip(offset, strides, strict=True))
    for number, index in enumerate(itertools.product(*map(range, shape[:inner]))):
        yield Run(number * size, size, start + sum(at * step for at, step in zip(index, strides, strict=False)))


def label(name: str, offset: Sequence[int] | None, shape: Sequence[int]) -> str:
    """Return a text for a piece that is the same on each rank that holds it. `offset` is `None` for a whole tensor."""
    return f"{name}@{','.join(map(str, offset or ()))}+{','.join(map(str, shape))}"


def tensor_of(label: str) -> str:
    """Return the name of the tensor in a label."""
    return label.rpartition("@")[0]


def balance(stored: Sequence[Sequence[Piece]]) -> Mapping[int, int]:
    """Return the bytes that each rank stores."""
    return {rank: sum(piece.bytes for piece in pieces) for rank, pieces in enumerate(stored)}
