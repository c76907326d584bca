"""Directory mode: checkpoints that a program writes by itself, taken as snapshots and laid back. Never torch."""
