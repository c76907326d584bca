"""What TensorBoard shows of a directory."""

from __future__ import annotations

from pathlib import Path


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    """The points of a curve: step and value, in the order in which they are drawn."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]
