"""moto, where it differs from AWS in what the module's apply and the tests of it rest on.

Owns each difference, and why it matters. Imported by a server's own process: it changes moto for all of it.

1. moto honours bucket policies, but none of their conditions: a deny without TLS would deny everything. Here
   `tests.support.iam` judges, with the condition keys that AWS would take from the request. Plain HTTP on this machine
   stands for TLS.
2. moto puts the tags of a launch template itself into the template's data: every second plan would change it. And it
   keeps the user data of a second version in a form that it refuses when an instance is started from it.
3. moto drops the mixed instances policy of a group at every update that does not name it: the provider makes a group
   with hooks empty, and then updates its size.
4. moto loads AWS's own policies only where it is told to.
5. moto knows no CompleteLifecycleAction, and answers what nobody can read: whoever calls it tries for half a minute.
   Here it is taken, as of an instance that waits for it.
   Neither does it know StartInstanceRefresh. Here it is taken, and the group's instances are replaced.
6. moto describes a scaling policy without saying that it is enabled, and with an empty prediction: every second plan
   would change it.
7. moto keeps a gateway endpoint at a route table that is gone, and cannot delete it then. A destroy ends them in any
   order.
8. moto has one scaling policy of a name, whichever groups have one.
9. moto fails (500) to take a role out of an instance profile a second time, which the provider then tries for minutes.
"""

from __future__ import annotations

import json
import os
from typing import Any

from flask import request
from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup, FakeScalingPolicy
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult, EmptyResult
from moto.core.types import Base64EncodedString
from moto.ec2.models.launch_templates import LaunchTemplateVersion
from moto.ec2.models.route_tables import RouteBackend
from moto.iam.access_control import PermissionResult
from moto.iam.exceptions import NotFoundException
from moto.iam.models import IAMBackend
from moto.s3.models import FakeBucket

from tests.support import iam
from tests.support.s3_bucket import Settings
from tests.support.s3_operations import Service
from tests.support.s3_wire import Request

CREATES = {"PutObject": "true", "CopyObject": "true", "CompleteMultipartUpload": "true"}
BEGINS = {"CreateMultipartUpload": "false", "UploadPart": "false"}
PERMISSIONS = {
    iam.Verdict.ALLOWED: PermissionResult.PERMITTED,
    iam.Verdict.NOT_ALLOWED: PermissionResult.NEUTRAL,
    iam.Verdict.DENIED: PermissionResult.DENIED,
}


def mend() -> None:
    """Change moto as this module says; before anything is asked of it."""
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"
    FakeBucket.get_permission = _permission
    FakeAutoScalingGroup.update = _keeping_its_policy(FakeAutoScalingGroup.update)
    AutoScalingResponse.complete_lifecycle_action = _taken
    AutoScalingResponse.start_instance_refresh = _refreshed
    AutoScalingBackend.put_scaling_policy = _of_its_group(AutoScalingBackend.put_scaling_policy)
    AutoScalingResponse.delete_policy = _deleted_from_its_group
    FakeScalingPolicy.__init__ = _enabled(FakeScalingPolicy.__init__)
    IAMBackend.remove_role_from_instance_profile = _once(IAMBackend.remove_role_from_instance_profile)
    RouteBackend.delete_route_table = _and_leave_endpoints(RouteBackend.delete_route_table)
    LaunchTemplateVersion.__init__ = _without_its_own_tags(LaunchTemplateVersion.__init__)


def _permission(bucket: FakeBucket, action: str, resource: str) -> PermissionResult:
    """What the bucket's policy says of the request that is being answered."""
    if bucket.policy is None:
        return PermissionResult.NEUTRAL
    headers = {name.lower(): value for name, value in request.headers.items()}
    asked = Service(bucket.name, Settings()).target(Request(request.method, request.path, dict(request.args), headers))
    context = {
        "aws:SecureTransport": "true",
        "s3:if-none-match": headers.get("if-none-match"),
        "s3:ObjectCreationOperation": (CREATES | BEGINS).get(asked.operation),
    }
    judged = iam.Request(asked.action or action, resource, "arn:aws:iam::123456789012:user/tests", context)
    return PERMISSIONS[iam.judge(judged, [], [json.loads(bucket.policy)])]


def _keeping_its_policy(update: Any) -> Any:
    def updated(self: Any, *, mixed_instances_policy: Any = None, **changes: Any) -> None:
        before = self.mixed_instances_policy
        update(self, mixed_instances_policy=mixed_instances_policy, **changes)
        if not (mixed_instances_policy or changes["launch_template"] or changes["launch_config_name"]):
            self.mixed_instances_policy = before

    return updated


def _taken(_: AutoScalingResponse) -> EmptyResult:
    return EmptyResult()


def _refreshed(response: AutoScalingResponse) -> ActionResult:
    backend, name = response.autoscaling_backend, response._get_param("AutoScalingGroupName")
    for instance in list(backend.autoscaling_groups[name].instance_states):
        backend.terminate_instance(instance.instance.id, should_decrement=False)
    backend.set_desired_capacity(name, backend.autoscaling_groups[name].desired_capacity)
    return ActionResult({"InstanceRefreshId": "11111111-2222-3333-4444-555555555555"})


def _and_leave_endpoints(delete: Any) -> Any:
    def deleted(self: Any, route_table_id: str) -> None:
        delete(self, route_table_id)
        for endpoint in self.vpc_end_points.values():
            endpoint.route_table_ids = [one for one in endpoint.route_table_ids or () if one != route_table_id]

    return deleted


def _of_its_group(put: Any) -> Any:
    def kept(self: AutoScalingBackend, name: str, *values: Any, as_name: str, **named: Any) -> Any:
        policy = put(self, name, *values, as_name=as_name, **named)
        self.policies[f"{as_name}/{name}"] = self.policies.pop(name)
        return policy

    return kept


def _deleted_from_its_group(response: AutoScalingResponse) -> EmptyResult:
    asked = response._get_param
    response.autoscaling_backend.policies.pop(f"{asked('AutoScalingGroupName')}/{asked('PolicyName')}", None)
    return EmptyResult()


def _once(remove: Any) -> Any:
    def removed(self: IAMBackend, profile_name: str, role_name: str) -> None:
        try:
            remove(self, profile_name, role_name)
        except ValueError:
            raise NotFoundException(f"{role_name} is not in {profile_name}") from None

    return removed


def _enabled(make: Any) -> Any:
    def made(self: Any, *values: Any, **named: Any) -> None:
        make(self, *values, **named)
        self.enabled = True
        self.predictive_scaling_configuration = self.predictive_scaling_configuration or None

    return made


def _without_its_own_tags(make: Any) -> Any:
    def made(self: Any, template: Any, number: Any, data: dict[str, Any], description: Any) -> None:
        tags = [tagged for tagged in data.get("TagSpecifications", []) if tagged["ResourceType"] != "launch-template"]
        script = {"UserData": Base64EncodedString(text)} if isinstance(text := data.get("UserData"), str) else {}
        make(self, template, number, {**data, **script, "TagSpecifications": tags}, description)

    return made
