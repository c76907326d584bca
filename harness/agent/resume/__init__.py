"""From a store to a slot that the trainer restores from."""
