"""Notices that the host itself gives: signals and the drain file."""
