"""Values and formats: no I/O, no torch, no cloud; msgspec at most."""
