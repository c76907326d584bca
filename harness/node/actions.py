"""What is done about the place once a run has ended: the job ended, the fleet stopped, people told, the hook completed.

Owns the calls and what becomes of one that fails: it is said, people are told where they can be, and that is all. No
failure here changes an exit code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloud.aws.fleet import Fleet
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.node.context import Context
from harness.node.exit_policy import Act
from harness.node.platform import Platform

ACT_S = 120.0  # throttled calls are asked again: an instance that is not ended costs money
NOTIFY_S = 20.0
LOOK_AGAIN_S = 2.0


class Actions:
    """Main thread. Blocks for as long as AWS takes, within the limits above.

    Args:
        context: of this `harness resume`.
        platform: what is acted upon.
        let_go_s: how long the group is given to begin with the end of this instance, so that its hook can be completed.
    """

    def __init__(self, context: Context, platform: Platform, let_go_s: float) -> None:
        self._run, self._signals, self._say, self._clock = context.run, context.signals, context.say, context.clock
        self._platform, self._let_go_s = platform, let_go_s

    def do(self, actions: Sequence[Act], cause: str) -> None:
        """Do all of them, in turn. `cause`, in words, is for people."""
        for act in actions:
            if act is not Act.COMPLETE:
                self._say(f"{act.value}: {cause}")
            if act is Act.REQUEUE:
                if (failure := self._platform.requeue()) is not None:
                    self._say(f"the job could not be requeued: {failure}")
            elif (fleet := self._platform.fleet) is not None:
                self._do(act, fleet, cause)

    def replace(self, cause: str) -> None:
        """This machine must not train: have the group start another."""
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
                self._platform.fleet, f"could not {what}", f"{cause}, but: {err}. Instances go on and cost money"
            )
            return False
        return True

    def _notify(self, fleet: Fleet | None, what: str, text: str) -> None:
        text = f"{text}.\n\n{self._platform.words}. `journalctl -u harness` there, or its log group, has the rest."
        try:
            if fleet is not None:
                fleet.notify(f"run {self._run}: {what}", text, Deadline.after(NOTIFY_S, self._clock))
        except CloudError as err:
            self._say(f"nobody could be notified: {err}")

    def _complete(self, fleet: Fleet) -> None:
        """Tell the group that it need not wait for us, as soon as it does, some seconds after it was asked."""
        if not self._platform.hooked:
            return
        give_up_at = self._clock() + self._let_go_s
        try:
            while not fleet.complete(Deadline.after(NOTIFY_S, self._clock)):
                if self._clock() >= give_up_at or self._signals.asked is not None:
                    return
                self._signals.pause(LOOK_AGAIN_S)
        except CloudError as err:
            self._say(f"complete the lifecycle hook: {err} (it goes on by itself when its time is over)")
