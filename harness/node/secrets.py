"""Secrets of the program: read when a supervisor starts, into the environment of `harness run`, and nowhere else.

Owns the variable that names them. The configuration, user data, claims and logs have the ARNs only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from cloud.aws.secrets import SecretRef
from cloud.errors import CloudError
from cloud.notice import Deadline
from harness.errors import ConfigError

VARIABLE: Final = "HARNESS_SECRETS"
READ_S = 60.0
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_secrets(environ: Mapping[str, str], say: Callable[[str], None]) -> dict[str, str]:
    """Return the values of the secrets that `HARNESS_SECRETS` names: "NAME=ARN NAME=ARN". Blocks for a minute at most.

    Raises:
        ConfigError: one cannot be read; names the variable and the ARN, never a value.
    """
    found: dict[str, str] = {}
    for entry in environ.get(VARIABLE, "").split():
        name, _, arn = entry.partition("=")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{VARIABLE}: {name[:60]!r} is no name of an environment variable")
        try:
            value = SecretRef.parse(arn).read(Deadline.after(READ_S))
        except (ValueError, CloudError) as err:
            raise ConfigError(f"the secret {name} cannot be read: {err}") from err
        if "\0" in value:
            raise ConfigError(f"the secret {name} has a NUL in it: an environment variable cannot hold that")
        found[name] = value
    if found:
        say(f"secrets: {', '.join(found)}")
    return found
