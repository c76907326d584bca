"""Calls: single requests to AWS's services, each under a deadline (with `cloud.s3.client`, importer of boto3).

Owns the clients and the limits of a request. Repeats nothing: the caller knows what may be repeated. The meaning of a
refusal is `fleet_errors.py`'s.
"""

from __future__ import annotations

import threading
from typing import Any

from cloud.aws.fleet_errors import explain, service_of, takes_effect
from cloud.errors import CloudError, Denied, Unavailable
from cloud.notice import Deadline
from cloud.s3.client import library_errors, new_session, no_answer
from cloud.s3.errors import CredentialsExpired, CredentialsMissing

CONNECT_S = 3.0
"""Time-out to connect: the time by which a call can exceed its deadline if nothing answers."""
READ_S = 15.0
"""Time-out for an answer."""


class Calls:
    """boto3's clients for one region, and calls under a deadline. One request each. Safe for threads."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._lock = threading.Lock()
        self._session: Any = None
        self._clients: dict[str, Any] = {}
        self._current = threading.local()  # the deadline of this thread's call, for `_limit`

    def call(self, operation: str, where: str, deadline: Deadline, **parameters: Any) -> dict[str, Any]:
        """Send one request, by AWS's name for it. Raises CloudError of the kind that `fleet_errors.explain` returns."""
        from botocore import xform_name
        from botocore.exceptions import ClientError

        if deadline.expired:
            raise Unavailable(f"{operation} {where}: no time left")
        self._current.deadline = deadline
        try:
            client = self._opened(service_of(operation))
            reply: dict[str, Any] = getattr(client, xform_name(operation))(**parameters)
            return reply
        except library_errors() as err:
            if isinstance(err, ClientError):
                error = _refusal(err, operation, where)
            else:
                error = no_answer(err, f"{operation} {where}", takes_effect=takes_effect(operation))
            if isinstance(error, CredentialsExpired | CredentialsMissing):
                self.close()  # the next request searches for credentials from the beginning
            raise error from err

    def close(self) -> None:
        """Close the connections. Idempotent; a later call opens new ones."""
        with self._lock:
            clients, self._clients, self._session = self._clients, {}, None
        for client in clients.values():
            client.close()

    def _opened(self, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                self._clients[service] = self._open(service)
            return self._clients[service]

    def _open(self, service: str) -> Any:
        from botocore.config import Config

        self._session = self._session or new_session()
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            retries={"total_max_attempts": 1, "mode": "standard"},
            user_agent_extra="harness-spot",
        )
        try:
            client = self._session.client(service, region_name=self._region or None, config=config)
        except ValueError as err:  # "Invalid endpoint"
            raise Denied(f"{service}: {err}; check AWS_ENDPOINT_URL, AWS_REGION and the profile") from err
        client.meta.events.register(f"before-call.{client.meta.service_model.service_id.hyphenize()}", self._limit)
        return client

    def _limit(self, context: dict[str, Any], **_: Any) -> None:
        deadline: Deadline = self._current.deadline
        context["read_timeout"] = max(0.05, min(READ_S, deadline.remaining_s))


def _refusal(err: Any, operation: str, where: str) -> CloudError:
    error = err.response.get("Error", {})
    status = int(err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code, message = str(error.get("Code") or status), str(error.get("Message") or "")
    if message.lstrip().startswith("<"):  # of something before AWS: a proxy, a load balancer
        message = "the answer is a page of HTML"
    return explain(operation, where, status=status, code=code, message=message)
