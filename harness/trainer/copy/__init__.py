"""Copies between live tensors and slots."""
