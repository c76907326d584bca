"""Fakes that pass the same contract tests as the real thing: a store in memory, a metadata service."""
