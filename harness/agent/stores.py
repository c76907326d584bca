"""Which ObjectStore a location names. Owns the mapping from a user's words to a store, and nothing else."""

from __future__ import annotations

from pathlib import Path

from cloud.directory import DirectoryStore
from cloud.errors import CloudError
from cloud.memory import MemoryStore
from cloud.retry import RetryingStore
from cloud.store import ObjectStore
from harness.errors import ConfigError


def open_existing_store(location: str) -> ObjectStore:
    """The store at `location`, to look at: a directory that is not there is an empty store, and is not made.

    Raises:
        ConfigError: it cannot be used.
    """
    if "://" not in location and not Path(location).exists():
        return MemoryStore()
    return open_store(location)


def open_store(location: str) -> ObjectStore:
    """The store at `location`: an absolute directory, or a URL; transient failures are retried inside each deadline.

    Raises:
        ConfigError: no such kind of store, or the directory cannot be used.
    """
    if location.startswith("s3://"):
        raise ConfigError(f"{location}: S3 stores come with the next release; use a directory for now")
    if "://" in location:
        raise ConfigError(f"{location}: a store is a directory or s3://bucket/prefix")
    try:
        directory = DirectoryStore(Path(location))
        directory.sweep()  # what writers that were killed left half-written
        return RetryingStore(directory)
    except (CloudError, OSError) as err:
        raise ConfigError(f"the store {location} cannot be used: {err}") from err
