"""The seam between trainer and agent: shared memory and one Unix socket. Standard library only."""
