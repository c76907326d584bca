"""Secrets: values that only an ARN names, of Systems Manager's parameters and Secrets Manager.

Owns the two forms of an ARN, and the calls that read them. A value is returned and kept nowhere else; no error has one.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from cloud.aws.calls import Calls
from cloud.errors import Denied, call_with_retry
from cloud.notice import Deadline

_PARAMETER = re.compile(r"arn:[a-z-]+:ssm:([a-z0-9-]+):\d{12}:parameter/.+")
# As in a task definition of ECS, a key of the JSON in it, a stage and a version may follow the ARN.
_SECRET = re.compile(r"(arn:[a-z-]+:secretsmanager:([a-z0-9-]+):\d{12}:secret:[^:]+)(?::([^:]*):([^:]*):([^:]*))?")


@dataclass(frozen=True)
class SecretRef:
    """Where a value is.

    Attributes:
        arn: of the parameter, or of the secret.
        region: of the service.
        key: of the JSON in a secret; empty for all of it.
        stage: of a secret's version; empty for the current one.
        version: of a secret; empty for the stage's.
    """

    arn: str
    region: str
    key: str = ""
    stage: str = ""
    version: str = ""

    @classmethod
    def parse(cls, text: str) -> SecretRef:
        """Read an ARN. Raises ValueError."""
        if (found := _PARAMETER.fullmatch(text)) is not None:
            return cls(text, found[1])
        if (found := _SECRET.fullmatch(text)) is not None:
            return cls(found[1], found[2], *(found[group] or "" for group in (3, 4, 5)))
        # Without the text: it may be the secret itself.
        raise ValueError("not the ARN of a parameter of Systems Manager, or of a secret of Secrets Manager")

    def read(self, deadline: Deadline, sleep: Callable[[float], None] = time.sleep) -> str:
        """Return the value. Repeated until the deadline while the service does not answer.

        Raises:
            CloudError: `Denied` names the IAM action that is missing, or says that the secret has no such key.
        """
        calls = Calls(self.region)
        try:
            return call_with_retry(lambda: self._read(calls, deadline), deadline, sleep=sleep)
        finally:
            calls.close()

    def _read(self, calls: Calls, deadline: Deadline) -> str:
        if ":ssm:" in self.arn:
            found = calls.call("GetParameter", self.arn, deadline, Name=self.arn, WithDecryption=True)
            return str(found["Parameter"]["Value"])
        which = {"VersionStage": self.stage, "VersionId": self.version}
        given = {name: value for name, value in which.items() if value}
        found = calls.call("GetSecretValue", self.arn, deadline, SecretId=self.arn, **given)
        if "SecretString" not in found:
            raise Denied(f"{self.arn}: the secret is binary: an environment variable holds text")
        value = str(found["SecretString"])
        return self._of_key(value) if self.key else value

    def _of_key(self, value: str) -> str:
        try:
            found = json.loads(value)[self.key]
        except (ValueError, TypeError, LookupError):
            raise Denied(f"{self.arn}: the secret is no JSON object with the key {self.key!r}") from None
        return found if isinstance(found, str) else json.dumps(found)
