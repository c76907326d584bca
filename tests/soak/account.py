"""The account of a soak: what happened, what it cost, and whether anything was violated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Column, Table

from tests.soak import leaks, losses
from tests.soak.bucket import Found
from tests.soak.fleet import Fleet
from tests.soak.hosts import Sample
from tests.soak.losses import Step
from tests.soak.troubles import MetadataTroubles, StoreTroubles

SURPLUS = 1  # the last snapshot of all comes as the agent ends, and nobody retires the one that it makes superfluous
SHOWN = 5  # violations of one kind


@dataclass(frozen=True)
class Account:
    """All figures, as JSON has them. `violations` is empty where everything was as promised."""

    seconds: float
    steps: int
    steps_trained: int
    hosts: int
    starts: int
    trainer_starts: int
    strikes: dict[str, int]
    exit_codes: dict[str, int]
    notices: dict[str, int]
    steps_lost: dict[str, list[int]]
    store_faults: dict[str, str]
    metadata_faults: dict[str, int]
    store_errors: dict[str, int]
    megabytes_uploaded: float
    snapshots_durable: int
    rejected: int
    quarantined: int
    agent_resident_mb: float
    longest_agent_s: float
    longest_agent: dict[str, list[float]]
    processes_left: int | None
    uploads_left: int
    commits: list[str]
    bucket_when_tidy: str
    bucket_at_the_end: str
    violations: list[str]


def account(
    fleet: Fleet,
    troubles: StoreTroubles,
    metadata: MetadataTroubles,
    *,
    samples: Mapping[int, Sequence[Sample]],
    exact: Found | None,
    final: Found,
    steps: Sequence[Step],
    unbroken: Sequence[Step],
    same_weights: bool,
    seconds: float,
) -> Account:
    """Add up, and judge."""
    calls = troubles.steer("calls")
    uploaded = sum(call["body_bytes"] for call in calls if call["operation"] in ("PutObject", "UploadPart"))
    refused = Counter(f"{call['status'] or 'none'}" for call in calls if not 200 <= call["status"] < 400)
    pid, watched_s = leaks.longest(samples)
    violations = [*fleet.violations, *_judge(final, steps, unbroken, samples, same_weights=same_weights)]
    return Account(
        seconds=round(seconds, 1),
        steps=len(unbroken),
        steps_trained=len(steps),
        hosts=len(fleet.hosts),
        starts=fleet.starts,
        trainer_starts=fleet.told["TrainerStarted"],
        strikes=dict(fleet.strikes),
        exit_codes={str(code): count for code, count in sorted(fleet.exits.items())},
        notices=dict(fleet.notices),
        steps_lost=losses.lost_by_cause(steps, fleet.struck_at),
        store_faults={name: f"{troubles.struck[name]} of {made} met" for name, made in troubles.made.items()},
        metadata_faults=dict(metadata.made),
        store_errors=dict(refused),
        megabytes_uploaded=round(uploaded / 1e6, 1),
        snapshots_durable=len(fleet.durable),
        rejected=fleet.told["Rejected"],
        quarantined=len(fleet.quarantined),
        agent_resident_mb=max((s.resident_bytes for found in samples.values() for s in found), default=0) / 1e6,
        longest_agent_s=round(watched_s, 1),
        longest_agent={g.figure: [g.middle, g.last] for g in leaks.growths(pid, samples[pid])} if pid else {},
        processes_left=fleet.processes_left,
        uploads_left=len(final.uploads),
        commits=[str(snapshot) for snapshot in final.commits],
        bucket_when_tidy=exact.words() if exact else "never exact",
        bucket_at_the_end=final.words(),
        violations=violations,
    )


def _judge(
    final: Found,
    steps: Sequence[Step],
    unbroken: Sequence[Step],
    samples: Mapping[int, Sequence[Sample]],
    *,
    same_weights: bool,
) -> list[str]:
    different = losses.differences(steps, unbroken)
    found = different[:SHOWN] + ([f"… {len(different)} such steps"] if len(different) > SHOWN else [])
    if not same_weights:
        found.append("the final weights differ from the unbroken run's")
    if len(final.surplus) > SURPLUS or final.being_written or final.garbage or final.uploads or final.wrong:
        found.append(f"the bucket at the end: {final.words()}")
    for growth in leaks.grown(samples):
        found.append(f"agent {growth.pid} grows: {growth.figure} from {growth.middle:g} to {growth.last:g}")
    return found


def table(account: Account) -> Table:
    """The account for people."""
    shown = Table(Column(no_wrap=True), Column(), box=None, show_header=False, padding=(0, 3, 0, 0))
    for name, value in _rows(account).items():
        shown.add_row(name, value)
    return shown


def _rows(a: Account) -> dict[str, str]:
    return {
        "duration": f"{a.seconds:.0f} s",
        "steps": f"{a.steps}; with those repeated {a.steps_trained}",
        "hosts, starts, trainers": f"{a.hosts}, {a.starts}, {a.trainer_starts}",
        "strikes": _counts(a.strikes),
        "exit codes": _counts(a.exit_codes),
        "notices": _counts(a.notices),
        "steps repeated after": "\n".join(f"{cause}: {losses.words(lost)}" for cause, lost in a.steps_lost.items()),
        "store faults": _counts(a.store_faults),
        "calls that failed": _counts(a.store_errors),
        "metadata faults": _counts(a.metadata_faults),
        "uploaded": f"{a.megabytes_uploaded:.0f} MB; {a.snapshots_durable} durable snapshots",
        "rejected, quarantined": f"{a.rejected}, {a.quarantined}",
        "largest agent": f"{a.agent_resident_mb:.0f} MB resident, with the slots",
        "longest agent": f"{a.longest_agent_s:.0f} s; medians of its middle third → of its last: "
        + ", ".join(
            f"{name} {_figure(name, middle)} → {_figure(name, last)}"
            for name, (middle, last) in a.longest_agent.items()
        ),
        "left behind": f"{a.processes_left} processes, {a.uploads_left} unfinished uploads",
        "bucket, tidied": a.bucket_when_tidy,
        "bucket, at the end": f"{len(a.commits)} commits; {a.bucket_at_the_end}",
    }


def _figure(name: str, value: float) -> str:
    return f"{value / 1e6:.1f} MB" if name == "own memory" else f"{value:g}"


def _counts(counts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(counts.items())) or "none"
