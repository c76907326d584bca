"""The supervisor around `harness run`: what is to be run, where we are, and what follows from how it ended."""
