"""CloudError and its kinds, and retry with a deadline (the only importer of tenacity).

A kind says what is known about the outcome, and `retryable` whether the same call may succeed later. Classified where
it is understood (in a store or a source), decided where there is context (a tier, the poller).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from cloud.notice import Deadline


class CloudError(Exception):
    """The world failed; nobody called anything wrong."""

    retryable = False


class NotFound(CloudError):
    """There is no such object."""


class AlreadyExists(CloudError):
    """put_if_absent found the key taken."""


class Unavailable(CloudError):
    """The service did not answer, or not usefully: time-out, connection refused, 5xx, throttling, an I/O error."""

    retryable = True


class Unreadable(Unavailable):
    """The disk cannot read this one object (EIO: a bad block). The rest of the store may be as good as ever."""


class Denied(CloudError):
    """Not allowed: permissions, a read-only file system, wrong credentials."""


class Full(CloudError):
    """No room left. Says how much was needed, how much there is, and where."""


class Truncated(CloudError):
    """An object is shorter than what was asked of it."""


class TooLarge(CloudError):
    """An object is larger than anything that should stand there."""


class SourceUnreadable(CloudError):
    """What was to be put cannot be read here, or is not there any more. Says nothing about the store."""


class CannotCopy(CloudError):
    """The store makes no copy of its own objects, or none that can be trusted: whoever wants one sends the bytes."""


class CopyDiffers(CloudError):
    """What was to be copied, or the copy, is not what the caller expected: damage. Nothing of it is left."""


class OutcomeUnknown(CloudError):
    """The call may or may not have taken effect: the reply was lost. Read back, never guess."""

    retryable = True


_REREADS = 3  # of a block that the disk cannot read: a network file system may say EIO once
_T = TypeVar("_T")


def call_with_retry(
    call: Callable[[], _T],
    deadline: Deadline,
    *,
    sleep: Callable[[float], None] = time.sleep,
    attempts: int = 10,
    base_s: float = 0.1,
    cap_s: float = 5.0,
) -> _T:
    """Call until it succeeds, fails for good, or the next attempt would begin after the deadline. Blocks.

    Pauses are random, up to `base_s` doubled per attempt and never above `cap_s`: many nodes that lost one store
    together do not come back to it together.

    Args:
        call: safe to repeat; knows the same deadline.
        deadline: no pause goes beyond it. The first attempt is always made.
        sleep: how to pause.
        attempts: calls at most, the first included.
        base_s: the longest first pause.
        cap_s: the longest pause.

    Raises:
        CloudError: the last attempt's own error, as it was.
    """
    # Imported here: it costs 30 ms, and a poller that never retries should have asked for a notice by then.
    from tenacity import RetryCallState, Retrying, retry_if_exception, wait_random_exponential

    def enough(state: RetryCallState) -> bool:
        if isinstance(state.outcome and state.outcome.exception(), Unreadable) and state.attempt_number >= _REREADS:
            return True
        return state.attempt_number >= attempts or deadline.remaining_s <= state.upcoming_sleep

    retrying = Retrying(
        retry=retry_if_exception(lambda err: isinstance(err, CloudError) and err.retryable),
        stop=enough,
        wait=wait_random_exponential(multiplier=base_s, max=cap_s),
        sleep=sleep,
        reraise=True,
    )
    return retrying(call)
