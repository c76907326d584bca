"""What TensorBoard shows of a directory."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve: step and value, in the order in which they are drawn.

    TensorBoard reads files in the order of their names: the second in which they were begun, and of one second the
    process, as text. A start that takes less than a second, as tests have them, may come first by that: pid 1019 before
    889. So the files are read in the order in which they were written.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written = sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns)
    with TemporaryDirectory() as ordered:
        for number, path in enumerate(written):
            shutil.copy(path, Path(ordered) / f"events.out.tfevents.{number:010d}")
        events = EventAccumulator(ordered, size_guidance={"scalars": 0})
        events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]
