"""What happens to a host: each strike is something that spot instances, kernels and people do.

Owns the strikes and what each does at once; what follows (a replacement, a restart) is the fleet's.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.soak.hosts import Host


@dataclass(frozen=True)
class Strike:
    """One kind.

    Attributes:
        name: as it is counted.
        do: strikes, at monotonic `now`; False where there is nothing to strike just now.
        replaced: whether the fleet starts another host at once, beside the struck one.
        spares_agent: whether the agent lives on.
    """

    name: str
    do: Callable[[Host, Random, float], bool]
    replaced: bool = False
    spares_agent: bool = False


def _notice(host: Host, rng: Random, now: float) -> bool:
    lead_s = rng.uniform(4.0, 25.0)  # EC2 gives 120 s at best
    host.simulator.notice(lead_s=lead_s)
    host.gone_at = now + lead_s
    return True


def _power_cut(host: Host, _rng: Random, now: float) -> bool:
    host.gone_at = now
    host.lose()
    return True


def _kill_all(host: Host, _rng: Random, _now: float) -> bool:
    host.kill()
    return True


def _kill(find: Callable[[Host], list[int]]) -> Callable[[Host, Random, float], bool]:
    def strike(host: Host, rng: Random, _now: float) -> bool:
        if not (found := find(host)):
            return False
        host.send([rng.choice(found)], signal.SIGKILL)
        return True

    return strike


def _kill_twice(host: Host, rng: Random, now: float) -> bool:
    if not _kill(Host.trainers)(host, rng, now):
        return False
    host.then(now + rng.uniform(0.2, 3.0), lambda: host.send(host.trainers(), signal.SIGKILL))  # the next one starts
    return True


def _terminate(host: Host, _rng: Random, _now: float) -> bool:
    return host.terminate()


def _terminate_again(host: Host, rng: Random, now: float) -> bool:
    """As a service manager and a closing terminal do, or one that is impatient."""
    second = rng.choice((signal.SIGTERM, signal.SIGHUP))
    host.then(now + rng.uniform(0.0, 4.0), lambda: host.terminate(second))
    return host.terminate()


def _notice_and_terminate(host: Host, rng: Random, now: float) -> bool:
    """The notice, and then the shutdown of the machine that it spoke of."""
    host.then(now + rng.uniform(0.0, 3.0), host.terminate)
    return _notice(host, rng, now)


def _recommend(host: Host, _rng: Random, _now: float) -> bool:
    host.simulator.rebalance()
    return True


def _replace(host: Host, rng: Random, now: float) -> bool:
    host.simulator.rebalance()
    host.gone_at = now + rng.uniform(45.0, 60.0)  # long after the handover, which takes a look of 15 s and a snapshot
    return True


def _freeze(host: Host, rng: Random, now: float) -> bool:
    host.freeze()
    host.thaw_at = now + rng.uniform(0.5, 6.0)
    return True


def _freeze_agent(host: Host, rng: Random, now: float) -> bool:
    """The trainer goes on beside it."""
    if not (agents := host.agents()):
        return False
    host.send(agents, signal.SIGSTOP)
    host.thaw_at = now + rng.uniform(0.5, 20.0)
    return True


def _freeze_long(host: Host, rng: Random, now: float) -> bool:
    host.freeze()
    host.thaw_at = now + rng.uniform(5.0, 40.0)  # around the silence after which it counts as dead
    host.gone_at = host.thaw_at + 60.0
    return True


STRIKES = [
    Strike("notice", _notice),
    Strike("notice, replaced at once", _notice, replaced=True),
    Strike("notice, SIGTERM", _notice_and_terminate),
    Strike("power cut", _power_cut),
    Strike("SIGKILL trainer", _kill(Host.trainers), spares_agent=True),
    Strike("SIGKILL trainer, and the next one", _kill_twice, spares_agent=True),
    Strike("SIGKILL agent", _kill(Host.agents)),
    Strike("SIGKILL both", _kill_all),
    Strike("SIGKILL data worker", _kill(Host.workers), spares_agent=True),
    Strike("SIGTERM", _terminate),
    Strike("SIGTERM, a second signal", _terminate_again),
    Strike("rebalance", _recommend, spares_agent=True),
    Strike("rebalance, replaced", _replace, replaced=True),
    Strike("frozen", _freeze, spares_agent=True),
    Strike("frozen agent", _freeze_agent, spares_agent=True),
    Strike("frozen, replaced", _freeze_long, replaced=True),
]
