"""CloudError and its kinds, and retry with a deadline (the only importer of tenacity).

A kind says what is known about the outcome, and `retryable` whether the same call may succeed later. A store or a
source classifies an error, because it understands it; a tier or the poller decides what to do, because it has the
context.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from cloud.notice import Deadline


class CloudError(Exception):
    """A failure outside of this program: no caller made a mistake."""

    retryable = False


class NotFound(CloudError):
    """There is no such object."""


class AlreadyExists(CloudError):
    """`put_if_absent` found an object under the key."""


class Unavailable(CloudError):
    """The service gave no answer, or no useful one: time-out, connection refused, 5xx, throttling, an I/O error."""

    retryable = True


class Unreadable(Unavailable):
    """The disk cannot read this one object (EIO: a bad block). The rest of the store may be undamaged."""


class Denied(CloudError):
    """Not allowed: permissions, a read-only file system, wrong credentials."""


class Full(CloudError):
    """No room left. The message says how many bytes were needed, how many are free, and where."""


class Truncated(CloudError):
    """An object ends before the requested range does."""


class TooLarge(CloudError):
    """An object is larger than any object that is expected under its key."""


class SourceUnreadable(CloudError):
    """The source of a put cannot be read on this host, or is gone. Says nothing about the store."""


class CannotCopy(CloudError):
    """The store cannot copy its own objects, or not in a way that can be trusted: the caller sends the bytes."""


class CopyDiffers(CloudError):
    """The source or its copy does not hold the bytes that the caller expected: damage. No copy is left behind."""


class OutcomeUnknown(CloudError):
    """The reply was lost: the call may or may not have taken effect. The caller reads back and never guesses."""

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
    """Call until it succeeds, fails permanently, or the next attempt would begin after the deadline. Blocks.

    Pauses are random, up to `base_s` doubled per attempt and never above `cap_s`: many nodes that lost one store
    at the same moment do not return to it at the same moment.

    Args:
        call: safe to repeat; knows the same deadline.
        deadline: no pause goes beyond it. The first attempt is always made.
        sleep: how to pause.
        attempts: calls at most, the first included.
        base_s: the longest first pause.
        cap_s: the longest pause.

    Raises:
        CloudError: the last attempt's own error, unchanged.
    """
    # Imported here: it costs 30 ms, in which a poller, which never retries, should already have asked for a notice.
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
