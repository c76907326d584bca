"""A spot fleet from the user's own machine: its code, its variables, its state, its costs.

`pack` and `vendor` import the standard library alone: scripts/pack runs them where nothing is installed.
"""
