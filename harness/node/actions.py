"""Actions on the platform once a run has ended: end the job, stop the fleet, notify people, complete the hook.

Owns the calls. Failed calls are logged. If a failed AWS call could leave an instance running, it is also published to
the SNS topic. No failure here changes an exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloud.aws.fleet import Fleet
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.node.context import Context
from harness.node.exit_policy import Act
from harness.node.platform import Platform

ACT_S = 120.0  # throttled calls are retried: an instance that is not ended costs money
NOTIFY_S = 20.0
LOOK_AGAIN_S = 2.0


class Actions:
    """Acts on the platform. For the main thread; blocks for as long as AWS takes, within the limits above.

    Args:
        context: of this `harness resume`.
        platform: the platform to act on.
        let_go_s: how long to wait until the group begins to end this instance, so that its hook can be completed.
    """

    def __init__(self, context: Context, platform: Platform, let_go_s: float) -> None:
        self._run, self._signals, self._say, self._clock = context.run, context.signals, context.say, context.clock
        self._platform, self._let_go_s = platform, let_go_s

    def do(self, actions: Sequence[Act], cause: str) -> None:
        """Do all actions, in turn. `cause` is the reason, as text for people."""
        for act in actions:
            if act is not Act.COMPLETE:
                self._say(f"{act.value}: {cause}")
            if act is Act.REQUEUE:
                if (failure := self._platform.requeue()) is not None:
                    self._say(f"the job could not be requeued: {failure}")
            elif (fleet := self._platform.fleet) is not None:
                self._do(act, fleet, cause)

    def replace(self, cause: str) -> None:
        """Have the group replace this machine, which must not train."""
        if (fleet := self._platform.fleet) is not None:
            if self._try(fleet.mark_unhealthy, "mark this instance as unhealthy", cause):
                self._notify(fleet, "this instance is replaced", cause)
            self._complete(fleet)

    def _do(self, act: Act, fleet: Fleet, cause: str) -> None:
        if act is Act.COMPLETE:
            self._complete(fleet)
        elif act is Act.FINISH:
            self._try(fleet.finish, act.value, cause)
        elif act is Act.LEAVE:
            self._try(fleet.leave, act.value, cause)
        elif self._try(fleet.stop, act.value, cause):
            self._notify(fleet, "the fleet is stopped", f"{cause}. Its desired capacity is 0 now")

    def _try(self, call: Callable[[Deadline], object], what: str, cause: str) -> bool:
        try:
            call(Deadline.after(ACT_S, self._clock))
        except CloudError as err:
            self._say(f"{what}: {err}")
            self._notify(
                self._platform.fleet, f"could not {what}", f"{cause}, but: {err}. Instances keep running and cost money"
            )
            return False
        return True

    def _notify(self, fleet: Fleet | None, what: str, text: str) -> None:
        text = f"{text}.\n\n{self._platform.words}. For details see `journalctl -u harness` there, or its log group."
        try:
            if fleet is not None:
                fleet.notify(f"run {self._run}: {what}", text, Deadline.after(NOTIFY_S, self._clock))
        except CloudError as err:
            self._say(f"the SNS topic could not be notified: {err}")

    def _complete(self, fleet: Fleet) -> None:
        """Tell the group to stop waiting for us, as soon as it waits: some seconds after it was asked to end us."""
        if not self._platform.hooked:
            return
        give_up_at = self._clock() + self._let_go_s
        try:
            while not fleet.complete(Deadline.after(NOTIFY_S, self._clock)):
                if self._clock() >= give_up_at or self._signals.asked is not None:
                    return
                self._signals.pause(LOOK_AGAIN_S)
        except CloudError as err:
            self._say(f"complete the lifecycle hook: {err} (the group continues by itself after the hook's timeout)")
