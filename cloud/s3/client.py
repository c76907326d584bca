"""S3Client: one boto3 client, its credentials, and calls under a deadline (with fleet.py the only importer of boto3).

Owns endpoint, region, credentials, proxies and time-outs, and turns the library's exceptions into those of
`cloud.errors`: `errors.explain` classifies S3's answers, this module the failures below them. An answer that S3 cannot
have given (a redirect, the page of a portal, half an answer) counts as no answer. Retries nothing: a call is one
request, so that a caller learns of a lost reply instead of being misled by a retry.

The library finds and renews credentials: the first request within 15 minutes of their expiry renews a role's, and a
run makes a request every few seconds. If the store reports them as expired nevertheless, or none were found, the next
request searches for credentials from the beginning, and finds those that a user has put into ~/.aws meanwhile.
"""

from __future__ import annotations

import contextlib
import email.utils
import os
import threading
import time
import traceback
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from cloud.errors import CloudError, Denied, OutcomeUnknown, Unavailable
from cloud.notice import Deadline
from cloud.s3.errors import TAKES_EFFECT, CredentialsExpired, CredentialsMissing, Refusal, explain

CONNECT_S = 5.0
"""Time-out to connect, and for the network to accept each piece of a body."""
READ_S = 15.0
"""Time-out for an answer, and for each piece of its body."""
METADATA_ATTEMPTS = 3
"""Attempts to get a role's credentials, a second each; with botocore's 1, a busy boot looks like no role."""

_AWS_DOMAINS = (".amazonaws.com", ".amazonaws.com.cn", ".amazonaws.eu", ".api.aws")
_METADATA_HOST = "169.254.169.254"


class S3Client:
    """Calls S3. Safe for threads. Opens nothing before the first call.

    Args:
        bucket: for error texts.
        endpoint: a URL; `None` for AWS's, or that of the environment or the profile (AWS_ENDPOINT_URL_S3).
        connections: how many may stay open.
    """

    def __init__(self, bucket: str, endpoint: str | None, *, connections: int) -> None:
        self.bucket = bucket
        self._endpoint = endpoint
        self._connections = connections
        self._lock = threading.Lock()
        self._client: Any = None
        self._credentials: Any = None
        self._current = threading.local()  # the deadline of this thread's call, for `_limit`

    def call(self, operation: str, key: str | None, *, deadline: Deadline, **parameters: Any) -> dict[str, Any]:
        """Send one request, by S3's name for it ("PutObject"), about `key` of the bucket, or the bucket itself.

        A `Body` in the reply is a stream: read it with `read_body`, under this deadline.

        Raises:
            OutcomeUnknown: no reply, and the call is one that makes an object visible.
            CloudError: of the kind that `errors.explain` returns.
        """
        where = f"s3://{self.bucket}" + (f"/{key}" if key is not None else "")
        if deadline.expired:
            raise Unavailable(f"{operation} {where}: no time left")
        if key is not None:
            parameters["Key"] = key
        client = None
        self._current.deadline, self._current.operation = deadline, operation
        try:
            client = self._opened()
            reply: dict[str, Any] = getattr(client, _method(operation))(Bucket=self.bucket, **parameters)
            _check_answer(reply, operation)
            return reply
        except call_errors() as err:
            _let_go(err)
            error = self._understand(err, operation, where)
            if isinstance(error, CredentialsExpired | CredentialsMissing):
                self._forget(client)
            try:
                raise error from err
            finally:
                del error  # its traceback refers to this frame, and that to the caller's buffer: avoid a cycle

    def read_body(self, body: Any, size: int, where: str, deadline: Deadline) -> bytes:
        """Read at most `size` bytes of a reply's body; fewer at its end. Raises `Unavailable`."""
        from botocore.exceptions import BotoCoreError
        from botocore.httpsession import URLLib3SSLError

        if deadline.expired:
            raise Unavailable(f"GetObject {where}: no time left")
        try:
            with contextlib.suppress(AttributeError):  # the body is read, and its connection back in the pool
                body.set_socket_timeout(max(0.05, min(READ_S, deadline.remaining_s)))
            data: bytes = body.read(size)
            return data
        except (BotoCoreError, URLLib3SSLError, OSError, ValueError, AttributeError) as err:
            raise Unavailable(f"GetObject {where}: the answer broke off: {err}") from err

    @property
    def is_aws(self) -> bool:
        """Whether the endpoint is AWS's own, whose behaviour is known. Raises CloudError if no client can be made."""
        return _is_aws(self._endpoint_url())

    def identity(self) -> tuple[str, str]:
        """Return the last four characters of the access key, and its source ("iam-role", "env", ...)."""
        self._endpoint_url()
        with self._lock:
            credentials = self._credentials
        if credentials is None:
            return "", ""
        try:
            return str(credentials.get_frozen_credentials().access_key)[-4:], str(credentials.method)
        except library_errors() as err:
            raise self._understand(err, "open", f"s3://{self.bucket}") from err

    def close(self) -> None:
        """Close the connections. Idempotent; a later call opens new ones."""
        self._forget(self._client)

    # ------------------------------------------------------------------------------------------------- opening

    def _endpoint_url(self) -> str:
        try:
            return str(self._opened().meta.endpoint_url)
        except library_errors() as err:
            raise self._understand(err, "open", f"s3://{self.bucket}") from err

    def _opened(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client, self._credentials = self._open()
            return self._client

    def _open(self) -> tuple[Any, Any]:
        from botocore.config import Config

        session = new_session()

        def client(style: str) -> Any:
            config = Config(
                connect_timeout=CONNECT_S,
                read_timeout=READ_S,
                retries={"total_max_attempts": 1, "mode": "standard"},
                max_pool_connections=self._connections,
                tcp_keepalive=True,
                request_checksum_calculation="when_required",  # ours are made by cloud.digest
                response_checksum_validation="when_required",
                # The CRC guards the payload against damage, TLS against people; SHA-256 would cost 2 s/GB.
                s3={"addressing_style": style, "payload_signing_enabled": False},
                user_agent_extra="harness-spot",
            )
            try:
                return session.client("s3", endpoint_url=self._endpoint, config=config)
            except ValueError as err:  # "Invalid endpoint" of the environment: ours has been checked
                remedy = "check AWS_ENDPOINT_URL_S3, AWS_REGION and the profile"
                raise Denied(f"s3://{self.bucket}: {err}; {remedy}") from err

        style = "path" if self._endpoint and not _is_aws(self._endpoint) else "auto"
        made = client(style)
        if style == "auto" and not _is_aws(made.meta.endpoint_url):
            made = client("path")  # an endpoint of the environment; bucket.localhost does not resolve
        made.meta.events.register("before-call.s3", self._limit)
        made.meta.events.register("before-call.s3.HeadBucket", self._skip_head_bucket)
        return made, session.get_credentials()

    def _limit(self, context: dict[str, Any], **_: Any) -> None:
        deadline: Deadline = getattr(self._current, "deadline", None) or Deadline.never()
        context["read_timeout"] = max(0.05, min(READ_S, deadline.remaining_s))

    def _skip_head_bucket(self, **_: Any) -> tuple[Any, dict[str, Any]] | None:
        """Answer botocore's own HeadBucket with an empty reply, unless our caller asked for HeadBucket.

        Botocore sends HEAD for the bucket's region whenever it is redirected, and again if that is redirected. With a
        store that redirects every request, this would recurse until the stack is full. A real S3 names the region in
        its first answer.
        """
        if self._current.operation == "HeadBucket":
            return None
        return SimpleNamespace(status_code=200), {"ResponseMetadata": {"HTTPHeaders": {}}}

    def _forget(self, client: Any) -> None:
        """Close `client`, unless another has replaced it already. Requests in flight are not interrupted."""
        with self._lock:
            if client is None or client is not self._client:
                return
            self._client = self._credentials = None
        client.close()

    # ------------------------------------------------------------------------------------------- what went wrong

    def _understand(self, err: Exception, operation: str, where: str) -> CloudError:
        """Return the CloudError for an exception of boto3's. Raise the exception again if it is our own bug."""
        from botocore import exceptions as boto

        if isinstance(err, boto.ClientError):
            return explain(_refusal(err, operation, where, self.bucket))
        if isinstance(err, RecursionError) or not isinstance(err, library_errors()):
            words = f"{operation} {where}: the answer is not S3's ({type(err).__name__}: {err}); check the endpoint"
            return OutcomeUnknown(words) if operation in TAKES_EFFECT else Unavailable(words)
        if isinstance(err, boto.HTTPClientError) and isinstance(cause := err.kwargs.get("error"), CloudError):
            return cause  # our own body stopped the request: out of time, too slow, cancelled
        return no_answer(err, f"{operation} {where}", takes_effect=operation in TAKES_EFFECT)


class _NoAnswerOfS3(ValueError):
    """An answer that reports success but lacks fields that S3 always sends."""


_SAYS: dict[str, tuple[tuple[str, ...], ...]] = {
    "ListObjectsV2": (("Name", "KeyCount", "IsTruncated", "MaxKeys"),),
    "ListMultipartUploads": (("Bucket", "IsTruncated", "MaxUploads"),),
    "ListParts": (("Bucket", "UploadId", "IsTruncated"),),
    "CreateMultipartUpload": (("UploadId",),),
    "PutObject": (("ETag",),),
    "UploadPart": (("ETag",),),
    "CompleteMultipartUpload": (("ETag", "Location", "Key"),),
    "CopyObject": (("CopyObjectResult.ETag",),),
    "UploadPartCopy": (("CopyPartResult.ETag",),),
    "HeadObject": (("ContentLength",), ("ETag",)),
    "GetObject": (("ContentLength",), ("ETag",)),
}
"""Fields of S3's answers: at least one of each group is present. A page of HTML also parses, but has none of them."""


def _let_go(err: BaseException | None) -> None:
    """Clear the frames of the tracebacks, which hold the error that holds them.

    Otherwise their connections would stay open until the garbage collector runs.
    """
    while err is not None:
        traceback.clear_frames(err.__traceback__)
        err = err.__context__


def _check_answer(reply: dict[str, Any], operation: str) -> None:
    """Raise ValueError if the answer lacks fields that S3 always sends."""
    for group in _SAYS.get(operation, ()):
        if all(_said(reply, name) is None for name in group):
            if (body := reply.get("Body")) is not None:
                body.close()  # the caller gets the error, and no body to close
            raise _NoAnswerOfS3(f"a success without {' or '.join(group)}")


def _said(reply: dict[str, Any], path: str) -> Any:
    """Return the answer's value at a dotted path, or `None`."""
    found: Any = reply
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


# ------------------------------------------------------------------------------- also used for AWS's other services


def new_session() -> Any:
    """Return a boto3 session that honours AWS_REGION, and retries a role's credentials without any proxy."""
    import boto3.session  # 150 ms, only for users of AWS
    import botocore.session

    core = botocore.session.Session()
    attempts = max(METADATA_ATTEMPTS, core.get_config_variable("metadata_service_num_attempts"))
    core.set_config_variable("metadata_service_num_attempts", attempts)
    # As the aws command does; botocore knows only AWS_DEFAULT_REGION, and takes an empty one for a region.
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region or "AWS_DEFAULT_REGION" in os.environ:
        core.set_config_variable("region", region or core.get_scoped_config().get("region"))
    _keep_metadata_off_proxies(core)
    return boto3.session.Session(botocore_session=core)


def library_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that boto3 may raise for failures outside of this program."""
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    return BotoCoreError, ClientError, ResponseParserError, RuntimeError, OSError


def call_errors() -> tuple[type[Exception], ...]:
    """Return `library_errors`, and those that botocore's parsers raise for an answer that is not S3's (a bad date)."""
    return *library_errors(), ValueError, TypeError, LookupError, AttributeError


def no_answer(err: Exception, what: str, *, takes_effect: bool) -> CloudError:
    """Return the CloudError for `err`, raised without an answer of the service. Raise `err` again if it is our own bug.

    Args:
        err: one of `library_errors`, but not a ClientError.
        what: the request, for the message.
        takes_effect: whether the outcome is unknown if the reply is lost.
    """
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    words = f"{what}: {err}"
    if isinstance(err, boto.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(err):
        return Denied(f"{words}; if a private authority signs this certificate, set AWS_CA_BUNDLE to its bundle")
    if isinstance(err, boto.SSLError) and any(
        isinstance(cause, FileNotFoundError) for cause in getattr(err.kwargs.get("error"), "args", ())
    ):
        return Denied(f"{words}; the bundle that AWS_CA_BUNDLE or the profile names does not exist")
    if isinstance(err, boto.ProxyConnectionError | boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return Unavailable(words)  # nothing was sent
    if isinstance(err, boto.HTTPClientError | boto.ConnectionError | ResponseParserError):
        return OutcomeUnknown(words) if takes_effect else Unavailable(words)
    if isinstance(err, boto.NoCredentialsError):
        return CredentialsMissing(
            f"{words}; give the instance a role, or this user a profile (AWS_PROFILE, aws configure)"
        )
    if isinstance(err, boto.SSOError | boto.LoginError | boto.TokenRetrievalError):
        return Denied(f"{words}; log in again (aws sso login)")
    if isinstance(err, boto.CredentialRetrievalError | boto.MetadataRetrievalError):
        return Unavailable(f"{words}; the source of the credentials did not answer")
    if isinstance(err, RuntimeError) and "expired" in str(err):
        return CredentialsExpired(words)  # expired right after a refresh: botocore has no type for it
    if isinstance(err, RuntimeError) and "AWS_AUTH_SIGNING_INVALID_CONFIGURATION" in str(err):
        return Denied(f"{words}; check the region (AWS_REGION)")
    if isinstance(err, FileNotFoundError | PermissionError):
        return Unavailable(f"{words}; are the credentials read from this file (AWS_WEB_IDENTITY_TOKEN_FILE)?")
    if isinstance(err, OSError):
        return OutcomeUnknown(words) if takes_effect else Unavailable(words)
    if isinstance(err, boto.ParamValidationError) or not isinstance(err, boto.BotoCoreError):
        raise err
    return Denied(f"{words}; check profile, region and endpoint")


def _method(operation: str) -> str:
    from botocore import xform_name

    return str(xform_name(operation))


def _is_aws(url: str) -> bool:
    return ("." + (urlsplit(url).hostname or "")).endswith(_AWS_DOMAINS)


def _keep_metadata_off_proxies(core: Any) -> None:
    """Make botocore reach this host's metadata service without any proxy of the environment.

    botocore uses the environment's proxies there as for any URL (`InstanceMetadataFetcher.__init__`), and offers no
    setting. A proxy would answer for another host, or leak this host's credentials.

    Raises:
        Denied: this botocore has none of the names that are needed for it, and there is such a proxy.
    """
    from botocore.httpsession import URLLib3Session

    try:
        fetcher = core.get_component("credential_provider").get_provider("iam-role")._role_fetcher
        fetcher._session.close()
        fetcher._session = URLLib3Session(timeout=fetcher._timeout)
    except AttributeError as err:
        if "http" in getproxies() and not proxy_bypass(_METADATA_HOST):
            raise Denied(
                f"this botocore is too new for the harness, which cannot keep its requests to {_METADATA_HOST} off the "
                f"proxy: use an older one, or add {_METADATA_HOST} to NO_PROXY"
            ) from err


def _refusal(err: Any, operation: str, where: str, bucket: str) -> Refusal:
    error = err.response.get("Error", {})
    meta = err.response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    return Refusal(
        operation=operation,
        where=where,
        bucket=bucket,
        status=status,
        code=str(error.get("Code") or status),
        message=str(error.get("Message") or ""),
        skew_s=skew_s(meta, time.time()),
    )


def skew_s(metadata: dict[str, Any], now: float) -> float | None:
    """Return our clock `now` minus the server's clock in a `ResponseMetadata`, to the second; `None` without a date."""
    try:
        served_at = email.utils.parsedate_to_datetime(metadata.get("HTTPHeaders", {}).get("date", ""))
    except ValueError:
        return None
    if served_at.tzinfo is None:
        served_at = served_at.replace(tzinfo=UTC)
    return (datetime.fromtimestamp(now, UTC) - served_at).total_seconds()
