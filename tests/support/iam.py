"""What IAM policies say of one request: a small evaluator, after the rules of AWS's reference of policy elements.

Owns the rules that the module's policies use, for one account: identity policies and a resource's policy together, an
explicit deny first, then any allow. Whatever it does not know it refuses to judge (`Unknown`), so that a verdict never
rests on a part of a policy that was not looked at. No boundaries, no policies of an organisation, no sessions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Values = tuple[str, ...]
STATEMENT = frozenset({"Sid", "Effect", "Action", "Resource", "Condition", "Principal"})
ARN_PARTS = 6


class Unknown(ValueError):
    """A part of a policy, or of what it asks about a request, that this evaluator knows nothing of."""


class Verdict(Enum):
    """ALLOWED; NOT_ALLOWED, since nobody allows it; DENIED, by a statement that no other can outweigh."""

    ALLOWED = "allowed"
    NOT_ALLOWED = "not allowed"
    DENIED = "denied"


@dataclass(frozen=True)
class Request:
    """One call.

    Attributes:
        action: "s3:PutObject".
        resource: the ARN, or "*" for a call that is on nothing in particular.
        principal: the role's ARN, or a service such as "events.amazonaws.com".
        context: the condition keys of the request. A policy may ask about these only: a key that a request may carry
            and this one does not is `None`, one that is not mentioned at all is `Unknown`.
    """

    action: str
    resource: str
    principal: str
    context: Mapping[str, str | Values | None] = field(default_factory=dict)


def judge(
    request: Request,
    identity_policies: Iterable[Mapping[str, Any]] = (),
    resource_policies: Iterable[Mapping[str, Any]] = (),
) -> Verdict:
    """What the policies say of `request`. Raises Unknown."""
    effects = set()
    for policy in identity_policies:
        effects |= {effect for statement in statements(policy) if (effect := _identity_effect(statement, request))}
    for policy in resource_policies:
        effects |= {effect for statement in statements(policy) if (effect := _resource_effect(statement, request))}
    if "Deny" in effects:
        return Verdict.DENIED
    return Verdict.ALLOWED if "Allow" in effects else Verdict.NOT_ALLOWED


def statements(policy: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The statements of a policy, of which every part has a name that is known."""
    if policy.get("Version") != "2012-10-17" or not set(policy) <= {"Version", "Id", "Statement"}:
        raise Unknown(f"a policy of this version, with these parts: {dict(policy)}")
    found = policy["Statement"]
    found = [found] if isinstance(found, Mapping) else list(found)
    for statement in found:
        if strange := set(statement) - STATEMENT:
            raise Unknown(f"{', '.join(sorted(strange))} in {statement}")
        if statement.get("Effect") not in ("Allow", "Deny") or not {"Action", "Resource"} <= set(statement):
            raise Unknown(f"Effect, Action and Resource are needed in {statement}")
    return found


def _identity_effect(statement: Mapping[str, Any], request: Request) -> str | None:
    if "Principal" in statement:
        raise Unknown(f"Principal in an identity policy: {statement}")
    return _effect(statement, request)


def _resource_effect(statement: Mapping[str, Any], request: Request) -> str | None:
    if "Principal" not in statement:
        raise Unknown(f"a resource's policy without Principal: {statement}")
    effect = _effect(statement, request)
    return effect if _is_principal(statement["Principal"], request.principal) else None


def _effect(statement: Mapping[str, Any], request: Request) -> str | None:
    """Every part is looked at, whatever the others say: what is unknown is found with any request."""
    actions = [is_like(action.lower(), request.action.lower()) for action in _texts(statement["Action"])]
    resources = [is_arn_like(arn, request.resource) for arn in _texts(statement["Resource"])]
    conditions = [
        (operator, key, _texts(wanted))
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    ]
    for operator, _, _ in conditions:
        _parse(operator)
    if not any(actions) or not any(resources):
        return None
    held = [_holds(*condition, request) for condition in conditions]
    return str(statement["Effect"]) if all(held) else None


def _is_principal(wanted: Any, principal: str) -> bool:
    if wanted == "*":
        return True
    if not isinstance(wanted, Mapping) or not set(wanted) <= {"AWS", "Service"}:
        raise Unknown(f"Principal {wanted}")
    if principal in _texts(wanted.get("Service", ())):
        return True
    if not principal.startswith("arn:"):
        return "*" in _texts(wanted.get("AWS", ()))
    account = principal.split(":")[4]
    everybody = {"*", principal, account, f"arn:aws:iam::{account}:root"}
    return not everybody.isdisjoint(_texts(wanted.get("AWS", ())))


# ---- what is like what ----------------------------------------------------------------------------------------------


def is_like(pattern: str, text: str) -> bool:
    """With `*` for any characters and `?` for one, upper and lower case apart."""
    if "${" in pattern:
        raise Unknown(f"a policy variable: {pattern}")
    pieces = [{"*": ".*", "?": "."}.get(piece, re.escape(piece)) for piece in re.split(r"([*?])", pattern)]
    return re.fullmatch("".join(pieces), text, re.DOTALL) is not None


def is_arn_like(pattern: str, arn: str) -> bool:
    """As IAM compares ARNs: each of the six parts for itself, case and all. Wildcards stand in the last part alone.

    In the others AWS lets a `*` reach over a colon or not, depending on where it stands: not known here.
    """
    if pattern == "*":
        return True
    wanted, given = pattern.split(":", ARN_PARTS - 1), arn.split(":", ARN_PARTS - 1)
    if len(wanted) != ARN_PARTS or re.search(r"[*?]|\$\{", "".join(wanted[:-1])):
        raise Unknown(f"an ARN of another form than service, region and account in full: {pattern}")
    return given[:-1] == wanted[:-1] and is_like(wanted[-1], given[-1])


def _equals(wanted: str, given: str) -> bool:
    if "${" in wanted:
        raise Unknown(f"a policy variable: {wanted}")
    return wanted == given


def _is_bool(wanted: str, given: str) -> bool:
    if not {wanted.lower(), given.lower()} <= {"true", "false"}:
        raise Unknown(f"Bool {wanted} of {given}")
    return wanted.lower() == given.lower()


POSITIVE: dict[str, Callable[[str, str], bool]] = {
    "StringEquals": _equals,
    "StringLike": is_like,
    "ArnEquals": is_arn_like,
    "ArnLike": is_arn_like,
    "Bool": _is_bool,
    "NumericLessThan": lambda wanted, given: float(given) < float(wanted),
    "NumericLessThanEquals": lambda wanted, given: float(given) <= float(wanted),
}
NEGATED = {
    "StringNotEquals": "StringEquals",
    "StringNotLike": "StringLike",
    "ArnNotEquals": "ArnEquals",
    "ArnNotLike": "ArnLike",
}


def _parse(operator: str) -> tuple[str, str, bool]:
    """Of "ForAnyValue:StringLikeIfExists": what it asks of several values, its name, whether a missing key will do."""
    quantifier, _, rest = operator.rpartition(":")
    name = rest.removesuffix("IfExists")
    known = name in POSITIVE or name in NEGATED or (name == rest == "Null" and not quantifier)
    if quantifier not in ("", "ForAnyValue", "ForAllValues") or not known:
        raise Unknown(f"the condition operator {operator}")
    return quantifier, name, name != rest


def _holds(operator: str, key: str, wanted: Values, request: Request) -> bool:
    quantifier, name, if_exists = _parse(operator)
    context = {known.lower(): value for known, value in request.context.items()}
    if key.lower() not in context:
        raise Unknown(f"the condition key {key}: say what it is in {request}, or None where it is not sent")
    value = context[key.lower()]
    if name == "Null":
        return any(_is_bool(item, str(value is None)) for item in wanted)
    given = () if value is None else _texts(value)
    if not given:
        return if_exists or quantifier == "ForAllValues" or (name in NEGATED and not quantifier)
    if not quantifier and not isinstance(value, str):
        raise Unknown(f"{operator} on {key}, of which a request has several values")
    test = POSITIVE[NEGATED.get(name, name)]
    held = [(name in POSITIVE) == any(test(item, sent) for item in wanted) for sent in given]
    return all(held) if quantifier == "ForAllValues" else any(held)


def _texts(value: Any) -> Values:
    """One or several, as JSON has them: a bool and a number are what they look like."""
    several = value if isinstance(value, list | tuple) else [value]
    for item in several:
        if not isinstance(item, str | bool | int | float):
            raise Unknown(f"{item!r} where a text should be")
    return tuple(str(item).lower() if isinstance(item, bool) else str(item) for item in several)
