"""From the live state to a sealed slot; the only part of a snapshot that blocks the training loop."""
