"""What a test of S3Store starts from: somebody's credentials, and botocore's models read once for all tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest


@functools.cache
def _loader(path: str | None) -> Any:
    from botocore.loaders import create_loader

    return create_loader(path)


def use_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials and region in the environment. Each session of botocore's reads 20 ms of JSON: not so here."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr("botocore.session.create_loader", _loader)
