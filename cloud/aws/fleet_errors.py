"""Refusals of Auto Scaling, SNS and CloudWatch turned into CloudErrors that say what failed, and the remedy.

Owns the meaning of their error codes and the IAM name of each call. Knows no client library: `fleet.py` takes the
library's exceptions apart and hands over the pieces.
"""

from __future__ import annotations

from cloud.errors import CloudError, Denied, OutcomeUnknown, Unavailable
from cloud.s3.errors import CredentialsExpired, SlowDown


class Refused(Denied):
    """The service refuses the request, because it does not fit the state that the service finds."""


class NotWaiting(Refused):
    """No lifecycle action of this instance is in progress."""


SERVICES = {
    "CompleteLifecycleAction": "autoscaling",
    "DescribeAutoScalingGroups": "autoscaling",
    "RecordLifecycleActionHeartbeat": "autoscaling",
    "SetDesiredCapacity": "autoscaling",
    "SetInstanceHealth": "autoscaling",
    "SetInstanceProtection": "autoscaling",
    "TerminateInstanceInAutoScalingGroup": "autoscaling",
    "UpdateAutoScalingGroup": "autoscaling",
    "GetParameter": "ssm",
    "GetSecretValue": "secretsmanager",
    "Publish": "sns",
    "PutMetricData": "cloudwatch",
}
"""The service of each call that a node makes; service and call together are the IAM action."""

OWNERS_SERVICES = {
    "DescribeAlarms": "cloudwatch",
    "DescribeScalingActivities": "autoscaling",
    "DescribeSpotPriceHistory": "ec2",
    "FilterLogEvents": "logs",
    "GetCommandInvocation": "ssm",
    "GetProducts": "pricing",
    "ListBuckets": "s3",
    "SendCommand": "ssm",
    "StartExperiment": "fis",
}
"""The same of each call that only the owner of a fleet makes, with `harness fleet`."""

_RESOURCES = {
    "autoscaling": "this group's ARN",
    "cloudwatch": '"*"',
    "ec2": '"*"',
    "fis": "the experiment template's ARN",
    "logs": "the log group's ARN",
    "pricing": '"*"',
    "s3": '"*"',
    "secretsmanager": "the secret's ARN",
    "sns": "the topic's ARN",
    "ssm": "the parameter's ARN, or the instance's",
}

_IAM_NAMES = {"ListBuckets": "ListAllMyBuckets"}  # where IAM has another word for the call

_SLOW = {
    "BandwidthLimitExceeded",
    "EC2Throttled",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "SlowDown",
    "Throttled",
    "Throttling",
    "TooManyRequests",
}
_BUSY = {"ResourceContention", "ScalingActivityInProgress"}
_EXPIRED = {"ExpiredToken", "RequestExpired"}
_DENIED = {"AccessDenied", "AuthorizationError", "KMSAccessDenied", "UnauthorizedOperation"}
_STRANGER = {"AuthFailure", "InvalidClientTokenId", "MissingAuthenticationToken", "UnrecognizedClient"}
_SIGNATURE = {"IncompleteSignature", "InvalidSignature", "SignatureDoesNotMatch"}
_INVALID = {
    "InvalidParameter",
    "InvalidParameterCombination",
    "InvalidParameterValue",
    "InvocationDoesNotExist",
    "NotFound",
    "ValidationError",
}


def service_of(operation: str) -> str:
    """Return the service of a call, by the name of its client."""
    return SERVICES.get(operation) or OWNERS_SERVICES[operation]


def takes_effect(operation: str) -> bool:
    """Whether the outcome is unknown if the reply to `operation` is lost."""
    return not operation.startswith(("Describe", "Filter", "Get", "List"))


def explain(operation: str, where: str, *, status: int, code: str, message: str) -> CloudError:
    """Return the CloudError for an answer that is not a success: its kind says what is known, its text what to do.

    Args:
        operation: the call, by AWS's name ("SetDesiredCapacity").
        where: the resource of the call.
        status: the HTTP status.
        code: the service's error code; some protocols append "Exception" or "Fault" to it.
        message: the service's words.
    """
    kind = code.removesuffix("Exception").removesuffix("Fault")
    words = f"{operation} {where}: {code} {message}".rstrip()
    if kind in _SLOW or status in (429, 503):
        return SlowDown(words)
    if kind in _BUSY:
        return Unavailable(words)
    if kind in _EXPIRED:
        return CredentialsExpired(f"{words}; the credentials have expired")
    if kind in _DENIED:
        return Denied(f"{words}; allow {_permission(operation)}: see docs/operations.md")
    if kind in _STRANGER:
        return Denied(f"{words}; AWS does not know the credentials: check role and profile")
    if kind in _SIGNATURE:
        return Denied(f"{words}; set the clock (chrony), or if it is right, check the secret key")
    if "no active lifecycle action" in message.lower():
        return NotWaiting(words)
    if kind in _INVALID:
        return Refused(words)
    if status >= 500:
        return OutcomeUnknown(words) if takes_effect(operation) else Unavailable(words)
    return Denied(f"{words}; the service refused this request")


def _permission(operation: str) -> str:
    service = service_of(operation)
    resource = '"*"' if operation.startswith("Describe") else _RESOURCES[service]  # IAM has no ARN for a list
    return f"{service}:{_IAM_NAMES.get(operation, operation)} on {resource}"
