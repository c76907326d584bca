"""Notices from the host itself: signals and the drain file."""
