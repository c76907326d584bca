"""Fakes that pass the same contract tests as the real implementations: a store in memory, a metadata service."""
