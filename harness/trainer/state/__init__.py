"""The user's states: captured, compared and restored."""
