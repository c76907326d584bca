"""What the refusals of Auto Scaling, SNS and CloudWatch become."""

from __future__ import annotations

import pytest

from cloud.aws.fleet_errors import SERVICES, NotWaiting, Refused, explain
from cloud.errors import CloudError, Denied, OutcomeUnknown, Unavailable
from cloud.s3.errors import CredentialsExpired, SlowDown


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [
        (400, "Throttling", "Rate exceeded", SlowDown),
        (503, "ServiceUnavailable", "", SlowDown),
        (429, "429", "", SlowDown),
        (400, "ScalingActivityInProgressFault", "", Unavailable),
        (403, "ExpiredToken", "", CredentialsExpired),
        (403, "InvalidClientTokenId", "", Denied),
        (403, "SignatureDoesNotMatch", "", Denied),
        (400, "ValidationError", "No active Lifecycle Action found with token t", NotWaiting),
        (400, "ValidationError", "AutoScalingGroup name not found", Refused),
        (500, "InternalFailure", "", OutcomeUnknown),
        (413, "RequestEntityTooLarge", "", Denied),
    ],
)
def test_a_refusal_is_of_the_kind_that_says_what_is_known(
    status: int, code: str, message: str, kind: type[CloudError]
) -> None:
    error = explain("SetDesiredCapacity", "of i-1", status=status, code=code, message=message)

    assert type(error) is kind
    assert str(error).startswith(f"SetDesiredCapacity of i-1: {code}")


def test_a_read_that_fails_leaves_nothing_unknown() -> None:
    error = explain("DescribeAutoScalingGroups", "of a", status=500, code="InternalFailure", message="")

    assert type(error) is Unavailable


def test_the_operations_are_those_of_the_services() -> None:
    from botocore.loaders import create_loader

    models = {service: create_loader().load_service_model(service, "service-2") for service in set(SERVICES.values())}
    assert all(operation in models[service]["operations"] for operation, service in SERVICES.items())
