"""Whether a trainer that died by itself is started again, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Restart:
    """Start the trainer again after `in_s` seconds; `crashes` without progress so far."""

    in_s: float
    crashes: int


@dataclass(frozen=True)
class GiveUp:
    """Too many crashes without progress: exit with the trainer's own code."""

    crashes: int


def after_crash(
    *,
    crashes: int,
    progressed: bool,
    connected: bool,
    max_crashes: int,
    first_delay_s: float = 1.0,
    cap_s: float = 60.0,
) -> Restart | GiveUp:
    """Return what to do after the trainer died by itself. Preemptions are not handled here.

    A trainer that never said hello has not failed *under* the harness (a typing error, a missing module): starting it
    again would only repeat the message. Progress (a step beyond the furthest one ever reached) clears the count.

    Args:
        crashes: crashes in a row without progress, before this one.
        progressed: whether this attempt got beyond every earlier one.
        connected: whether a Checkpointer said hello, in this attempt or in an earlier one.
        max_crashes: how many crashes without progress are forgiven.
        first_delay_s: delay of the first restart; doubled for each crash without progress.
        cap_s: longest delay.
    """
    if not connected:
        return GiveUp(crashes + 1)
    count = 1 if progressed else crashes + 1
    if count > max_crashes:
        return GiveUp(count)
    return Restart(min(cap_s, first_delay_s * 2 ** (count - 1)), count)
