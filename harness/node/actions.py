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

    def do(self, actions: Sequence[Act], cause: str) -> bool:
        """Do all actions, in turn. Return whether all took effect.

        Args:
            actions: what to do.
            cause: the reason, as text for people.
        """
        done = True
        for act in actions:
            if act is not Act.COMPLETE:
                self._say(f"{act.value}: {cause}")
            if act is Act.REQUEUE:
                if (failure := self._platform.requeue()) is not None:
                    self._say(f"the job could not be requeued: {failure}")
                    done = False
            elif (fleet := self._platform.fleet) is not None:
                done &= self._do(act, fleet, cause)
        return done

    def replace(self, cause: str) -> bool:
        """Have the group replace this machine, which must not train. Return whether it will."""
        if (fleet := self._platform.fleet) is None:
            return False
        done = self._try(lambda deadline: self._give_up(fleet, deadline), "have this instance replaced", cause)
        if done:
            self._notify(fleet, "this instance is replaced", cause)
        self._complete(fleet)
        return done

    @staticmethod
    def _give_up(fleet: Fleet, deadline: Deadline) -> None:
        if not fleet.abandon(deadline):  # the health of an instance that is not in service yet cannot be set
            fleet.mark_unhealthy(deadline)

    def _do(self, act: Act, fleet: Fleet, cause: str) -> bool:
        if act is Act.COMPLETE:
            self._complete(fleet)
            return True
        if act is Act.FINISH:
            return self._try(fleet.finish, act.value, cause)
        if act is Act.LEAVE:
            return self._try(fleet.leave, act.value, cause)
        if not self._try(fleet.stop, act.value, cause):
            return False
        self._notify(fleet, "the fleet is stopped", f"{cause}. Its desired capacity is 0 now")
        return True

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
        text = (
            f"{text}.\n\n{self._platform.words}. For details see /var/log/harness/harness.log there, or its log group."
        )
        try:
            if fleet is not None:
                fleet.notify(f"run {self._run}: {what}", text, Deadline.after(NOTIFY_S, self._clock))
        except CloudError as err:
            self._say(f"the SNS topic could not be notified: {err}")

    def _complete(self, fleet: Fleet) -> None:
        """Tell the group to stop waiting for us, as soon as it waits: some seconds after it was asked to end us."""
        give_up_at = self._clock() + self._let_go_s
        try:
            fleet.abandon(Deadline.after(NOTIFY_S, self._clock))  # it has ended before it was in service
            if not self._platform.hooked:
                return
            while not fleet.complete(Deadline.after(NOTIFY_S, self._clock)):
                if self._clock() >= give_up_at or self._signals.asked is not None:
                    return
                self._signals.pause(LOOK_AGAIN_S)
        except CloudError as err:
            self._say(f"complete the lifecycle hook: {err} (the group continues by itself after the hook's timeout)")
