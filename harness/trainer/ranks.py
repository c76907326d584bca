"""Which rank of the training this process is, and whether all ranks are on this machine.

Owns where that is known from: the process group, once there is one, or else what the launcher has put into the
environment. Talks to no other rank.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from harness.errors import ConfigError

_GROUP: Final = "torch.distributed"


@dataclass(frozen=True)
class Rank:
    """This process among those that train together.

    Attributes:
        number: its rank, from 0.
        world_size: how many ranks there are.
        local: its number on this machine, from 0.
    """

    number: int = 0
    world_size: int = 1
    local: int = 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank."""
        return self.world_size == 1

    @property
    def speaks(self) -> bool:
        """Whether it says what all ranks would say."""
        return self.number == 0

    @property
    def is_first_here(self) -> bool:
        """Whether it starts what the ranks of this machine have in common."""
        return self.local == 0

    def __str__(self) -> str:
        return f"rank {self.number} of {self.world_size}"


ALONE: Final = Rank()


def find_rank(environ: Mapping[str, str]) -> Rank:
    """Return which rank this process is.

    Raises:
        ConfigError: the environment and the process group differ, or some ranks are on other machines.
    """
    told, grouped = _from_environment(environ), _from_group()
    if grouped is None:
        found = Rank() if told is None else told
    elif told is None:  # by mp.spawn, for example; nothing tells the number on this machine
        found = grouped
    elif (told.number, told.world_size) != (grouped.number, grouped.world_size):
        raise ConfigError(
            f"the process group says that this is {grouped}, and RANK and WORLD_SIZE say that it is {told}: "
            "unset them, or give the group the same"
        )
    else:
        found = told
    size = _number(environ, "LOCAL_WORLD_SIZE")
    if size is not None and size < found.world_size:
        raise ConfigError(
            f"WORLD_SIZE is {found.world_size} and LOCAL_WORLD_SIZE {size}: ranks on several machines cannot be saved "
            "yet; use one machine (torchrun --standalone --nproc-per-node N)"
        )
    return found


def _from_environment(environ: Mapping[str, str]) -> Rank | None:
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    local = _number(environ, "LOCAL_RANK")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {size}: ranks count from 0")
    return Rank(rank, size, rank if local is None else local)


def _from_group() -> Rank | None:
    """Return the rank by the process group; `None` if there is none. Imports nothing."""
    distributed = sys.modules.get(_GROUP)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    rank = int(distributed.get_rank())
    return Rank(rank, int(distributed.get_world_size()), rank)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
