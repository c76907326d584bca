"""The supervisor around `harness run`: what to run, on which platform, and what to do after it has ended."""
