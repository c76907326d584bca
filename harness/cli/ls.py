"""`harness ls`: the runs of a store, or the snapshots of a run."""

from __future__ import annotations

import os
from typing import Any

from harness.cli.options import TO_LOOK, Json, settings_of, with_settings
from harness.cli.output import patience, print_json, print_table


@with_settings(*TO_LOOK)
def ls(flags: dict[str, Any], as_json: Json = False) -> None:
    """List the snapshots of a run in each tier, and why one is not usable. Without --run: the runs of the store."""
    from harness.inspect.ls import runs, snapshots

    if flags["run"] is None and "HARNESS_RUN" not in os.environ:
        with patience(flags["store"]):
            names = runs(settings_of({**flags, "run": "_"}))
        print_json(names) if as_json else print_table([{"run": name} for name in names])
        return
    with patience(flags["store"]):
        rows = snapshots(settings_of(flags))
    if as_json:
        print_json(rows)
    else:
        several = any((row["ranks"] or 1) > 1 for row in rows)
        left_out = set() if several else {"ranks"}
        shown = [row | {"sealed_at": _to_the_second(row["sealed_at"])} for row in rows]
        print_table([{name: value for name, value in row.items() if name not in left_out} for row in shown])


def _to_the_second(at: str | None) -> str | None:
    """A snapshot's time, short enough for a table in a terminal."""
    return at if at is None or not at.endswith("+00:00") else f"{at[:10]} {at[11:19]}Z"
