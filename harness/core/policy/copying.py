"""How long moving bytes takes, and whether having a store copy them pays: by measured speeds, with time limits.

Owns the speeds that are assumed before anything was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

ASSUMED_STORE_BYTES_S = 50e6  # before anything was measured: a slow EBS volume or a busy bucket
SLOWEST_BYTES_S = 1e6  # anything slower than this counts as a hang
COPY_S = 10.0  # for the round trips of one copy; its bytes may take as long as sending them would
LOOKS_IN_VAIN = 3
LOOKS_EVERY = 16


@dataclass(frozen=True)
class Copied:
    """Bytes of one snapshot that a store copied by itself, so that they were not sent.

    Attributes:
        bytes: of the shards that were copied.
        seconds: how long it took to find and to copy them.
    """

    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Measured speeds, pessimistic (`harness.core.rate`); `None` until something was measured.

    Attributes:
        copy_bytes_s: device to slot.
        store_bytes_s: slot to the remote tier, publish included.
        step_s: from one boundary to the next.
        disk_bytes_s: slot to the local tier; `None` where there is none, too.
        copied: by the store, of the newest snapshot. The next one will have to send as much as the rest of that one.
    """

    copy_bytes_s: float | None = None
    store_bytes_s: float | None = None
    step_s: float | None = None
    disk_bytes_s: float | None = None
    copied: Copied = Copied()

    @property
    def copies_pay(self) -> bool:
        """Whether the store copies no slower than we send. In a hurry, this decides whether it is asked to copy.

        True if it has copied nothing yet: the snapshot that was just sent whole may be the base of all later ones.
        """
        copied = self.copied
        return not copied.bytes or copied.seconds <= copied.bytes / (self.store_bytes_s or ASSUMED_STORE_BYTES_S)

    def send_s(self, size: int) -> float:
        """Return the seconds until a snapshot of `size` bytes is durable, if nothing else is being sent."""
        store_bytes_s = self.store_bytes_s or ASSUMED_STORE_BYTES_S
        if not self.copies_pay:
            return size / store_bytes_s
        return max(0, size - self.copied.bytes) / store_bytes_s + self.copied.seconds


def patience_s(size: int, base_s: float, limit_bytes_s: float | None = None) -> float:
    """Return how long one attempt at moving `size` bytes may take: an attempt that is cut off has to begin again.

    Args:
        size: bytes.
        base_s: for everything but the bytes.
        limit_bytes_s: how fast they may be sent; `None` for no limit.
    """
    return base_s + size / min(SLOWEST_BYTES_S, limit_bytes_s or SLOWEST_BYTES_S)


def copy_patience_s(size: int, has_s: float) -> float:
    """Return how long a store may take to copy `size` bytes, when everything has to be done in `has_s` seconds.

    At most half of those: the other half is for sending, if the copy does not succeed.
    """
    return min(COPY_S + size / ASSUMED_STORE_BYTES_S, has_s / 2)


def should_probe(in_vain: int, passed: int) -> bool:
    """Return whether to look for unchanged shards, which need not be sent; it stops where that saves nothing.

    After three looks in a row in vain, the next look is at every 16th snapshot only. A tensor that is frozen later has
    another layout, so its shard is new here; a tensor that only stops changing is found within those 16.

    Args:
        in_vain: number of looks in a row that found nothing.
        passed: number of snapshots since the last look.
    """
    return in_vain < LOOKS_IN_VAIN or passed >= LOOKS_EVERY - 1
