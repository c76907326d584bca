"""The fleet: keeps one job alive on hosts that come and go, as a spot request does, and hears what its agents tell.

Owns which host trains, which ones are leaving, and what every exit code and event has to mean (`violations`). A host
whose processes died is started again where it is; one that was noticed, cut off or replaced is followed by a fresh one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from tests.soak.hosts import Host, Log, Setting, Told
from tests.soak.strikes import Strike

LEFT_BEHIND_S = 60.0  # `harness run` has ended: what may its last process still take
STUCK_S = 300.0  # without a step anywhere
ENDS_S = 180.0
DEADLY = {"SIGKILL data worker", "SIGKILL trainer", "SIGKILL trainer, and the next one"}  # to the program alone
CRASHED, HUNG_UP, KILLED, TERMINATED = 1, 129, 137, 143
REFUSED = (64, 70)  # a store that denies what is needed: at the very start, and while the resume point is looked for


class Fleet:
    """Hosts, from the first to the last. For one thread: `turn` is called several times a second."""

    def __init__(self, setting: Setting, may_refuse: Callable[[float], bool], say: Callable[[str], None]) -> None:
        self._setting, self._may_refuse, self._say = setting, may_refuse, say
        self.hosts: list[Host] = []
        self.leaving: list[Host] = []
        self.durable: set[str] = set()
        self.quarantined: set[str] = set()
        self.violations: list[str] = []
        self.strikes: Counter[str] = Counter()
        self.struck_at: list[tuple[float, str]] = []
        self.exits: Counter[int] = Counter()
        self.notices: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.processes_left: int | None = None  # not counted yet
        self.grown_at = 0.0  # when a step was last seen
        self._started_at = 0.0
        self._curve_bytes = 0
        self._unread: set[Host] = set()
        self.active: Host

    @property
    def starts(self) -> int:
        return sum(host.starts for host in self.hosts)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is being done to the host that trains."""
        return self.active.gone_at is None and self.active.thaw_at is None

    def provision(self, now: float) -> Host:
        """A fresh host, with nothing on its disk, trains from now on."""
        self.active = Host(len(self.hosts) + 1, self._setting)
        self.hosts.append(self.active)
        self._unread.add(self.active)
        self._start(now, "a fresh host")
        return self.active

    def strike(self, strike: Strike, rng: Random, now: float) -> bool:
        """Do it to the host that trains; whether there was anything to strike."""
        host = self.active
        if not strike.do(host, rng, now):
            return False
        self.strikes[strike.name] += 1
        self.struck_at.append((now, strike.name))
        host.struck.add(strike.name)
        self._say(f"h{host.number}: {strike.name}")
        if strike.replaced:
            self.leaving.append(host)
            self.provision(now)
        return True

    def turn(self, now: float) -> None:
        """Hear, take away, start again."""
        self.listen()
        for host in (*self.leaving, self.active):
            host.do_what_is_due(now)
        for host in list(self.leaving):
            self._see_off(host, now)
        self._look_after(self.active, now)
        self._watch_progress(now)

    def clear_out(self, now: float) -> None:
        """Nobody trains any more: who trains is told to leave, and every instance is taken away."""
        host = self.active
        if host.thaw_at is not None:
            host.thaw()
        if host.gone_at is None:
            host.struck.add("SIGTERM")
            host.terminate()
            host.wait_ended(ENDS_S)
        for left in [*self.leaving, host]:
            self._note_exit(left, now)
            left.lose()
        self.leaving.clear()

    def listen(self) -> None:
        """Take in what agents have told since the last time."""
        for host in list(self._unread):
            for log, told in host.news():
                self._hear(host, log, told)
            if host.is_lost:
                self._unread.discard(host)

    def sample(self) -> None:
        """Note what every agent has now."""
        for host in {self.active, *self.leaving}:
            host.sample()

    def violate(self, what: str) -> None:
        """What must not happen has."""
        self._say(f"VIOLATION: {what}")
        self.violations.append(what)

    def left_behind(self) -> list[str]:
        """The command lines of every process that still runs on any host."""
        found = [command for host in self.hosts for _, command in host.running().values()]
        self.processes_left = len(found)
        return found

    def close(self) -> None:
        """Kill everything."""
        for host in self.hosts:
            if not host.is_lost:
                host.lose()

    # ---- hosts ------------------------------------------------------------------------------------------------------

    def _start(self, now: float, why: str) -> None:
        self.listen()
        self._say(f"h{self.active.number}: started ({why})")
        self.active.start(self.durable)
        self._started_at = now

    def _look_after(self, host: Host, now: float) -> None:
        if host.thaw_at is not None and now >= host.thaw_at:
            host.thaw()
        if host.is_lost:  # a power cut
            self._note_exit(host, now)
            self.provision(now)
        elif host.gone_at is not None and (now >= host.gone_at or self._has_ended(host, now)):
            self.leaving.append(host)  # seen off there
            self.provision(now)
        elif host.gone_at is None and self._has_ended(host, now):
            code = self._note_exit(host, now)
            self._start(now, f"after exit code {code}")

    def _see_off(self, host: Host, now: float) -> None:
        if host.thaw_at is not None and now >= host.thaw_at:
            host.thaw()
        assert host.gone_at is not None, "whoever leaves has an end"
        ended = self._has_ended(host, now)
        if now < host.gone_at and not ended:
            return
        if not ended and not any("notice" in name for name in host.struck):
            self.violate(f"h{host.number}: another host trains, and it has not left: {sorted(host.struck)}")
        self.leaving.remove(host)
        self._note_exit(host, now)
        host.lose()

    def _has_ended(self, host: Host, now: float) -> bool:
        if host.exit_code is None:
            return False
        host.left_at = host.left_at or now
        if host.has_ended():
            return True
        if "SIGKILL agent" not in host.struck and now > host.left_at + LEFT_BEHIND_S:
            left = [command for _, command in host.running().values()]
            self.violate(f"h{host.number}: ended with {host.exit_code}, and left behind {left}")
            host.kill()
        return False

    def _note_exit(self, host: Host, now: float) -> int | None:
        """Count how it ended; the code, `None` if it had not ended when it was taken away."""
        self.listen()
        code = host.exit_code if host.exit_code != KILLED or host.told_code is None else host.told_code
        if host.is_lost or code is None:
            code = None
        noticed = any("notice" in name for name in host.struck)
        if noticed:
            self.notices[{75: "durable (75)", 74: "not durable (74)", None: "cut off"}.get(code, f"ended {code}")] += 1
        if code is None:
            return None
        self.exits[code] += 1
        if not self._may_end(host, code, noticed, now):
            self.violate(f"h{host.number}: exit code {code} after {sorted(host.struck) or 'nothing'}")
        return code

    def _may_end(self, host: Host, code: int, noticed: bool, now: float) -> bool:
        terminated = any("SIGTERM" in name for name in host.struck)
        if code in (74, 75):
            return noticed or terminated or now < host.misled_until
        if code == 73:
            return host is not self.active or self._is_overtaken(host)
        if code in (HUNG_UP, TERMINATED):
            return terminated and not host.has_told  # Python had not come to where it listens to signals
        if code == KILLED:
            return any(name.startswith("SIGKILL") for name in host.struck)
        if code == CRASHED:
            # A detached agent restarts nobody in place: whoever started its program has seen it die.
            return "SIGKILL agent" in host.struck and bool(host.struck & DEADLY)
        return code in REFUSED and self._may_refuse(now)

    def _is_overtaken(self, host: Host) -> bool:
        """Whether one that was frozen before it claimed has claimed after `host`: then it is the newer start."""
        frozen = [other.generation for other in self.hosts if "frozen, replaced" in other.struck]
        return max(frozen, default=0) > host.generation

    def _watch_progress(self, now: float) -> None:
        grown = sum(host.curve.stat().st_size for host in self.hosts if host.curve.exists())
        if grown > self._curve_bytes:
            self._curve_bytes, self.grown_at = grown, now
        if now > max(self.grown_at, self._started_at) + STUCK_S:
            self.violate(f"h{self.active.number}: no step for {STUCK_S:g} s: {self.active.running()}")
            self.active.gone_at = now

    # ---- what agents tell -------------------------------------------------------------------------------------------

    def _hear(self, host: Host, log: Log, told: Told) -> None:
        self.told[told.event] += 1
        host.has_told = True
        snapshot = told.fields.get("snapshot", "")
        if told.event == "Published" and told.fields["tier"] == "remote":
            self.durable.add(snapshot)
            log.durable.add(snapshot)
        elif told.event == "Claimed":
            host.generation = int(told.fields["generation"])
        elif told.event == "Quarantined":
            self.quarantined.add(snapshot)
        elif told.event in ("Located", "NothingToResume"):
            newest = max(log.durable - self.quarantined, default="")
            if snapshot < newest:
                self.violate(f"{log.path.name}: {newest} was durable, and it resumed {snapshot or 'nothing'}")
        elif told.event == "Ended":
            host.told_code = int(told.fields["exit_code"])
            local, remote = (int(told.fields.get(f"{tier}_step", -1)) for tier in ("local", "durable"))
            if host.told_code == 75 and local > remote:
                self.violate(f"{log.path.name}: 75 was said, with step {local} on this disk and {remote} durable")
