"""Rehearsal: does the user's own program resume exactly? Runs it unbroken, then interrupted, and compares.

Owns `harness rehearse`. Starts the program as `harness run` does, in a scratch store; touches nothing of the real run
but the record of the result.
"""
