"""The evaluator that the role's table is judged by: AWS's rules, and no verdict on what it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.iam import Request, Unknown, Verdict, is_arn_like, judge, statements

ROLE = "arn:aws:iam::123456789012:role/node"
BUCKET = "arn:aws:s3:::bucket"
ALLOWED, NOT_ALLOWED, DENIED = Verdict.ALLOWED, Verdict.NOT_ALLOWED, Verdict.DENIED


def policy(*made: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(made)}


def allow(action: Any = "s3:GetObject", resource: Any = f"{BUCKET}/*", **parts: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **parts}


def deny(action: Any = "s3:*", resource: Any = "*", **parts: Any) -> dict[str, Any]:
    return {**allow(action, resource, **parts), "Effect": "Deny"}


def get(key: str = "a", **context: Any) -> Request:
    keys = {name.replace("_", ":", 1).replace("_", "-"): value for name, value in context.items()}
    return Request("s3:GetObject", f"{BUCKET}/{key}", ROLE, keys)


# ---- who outweighs whom ---------------------------------------------------------------------------------------------


def test_what_nobody_allows_is_not_allowed() -> None:
    assert judge(get()) is NOT_ALLOWED
    assert judge(get(), [policy(allow("s3:PutObject"))], [policy(allow("s3:PutObject", Principal="*"))]) is NOT_ALLOWED


def test_either_policy_may_allow_and_either_may_deny() -> None:
    assert judge(get(), [policy(allow())]) is ALLOWED
    assert judge(get(), [], [policy(allow(Principal={"AWS": ROLE}))]) is ALLOWED
    assert judge(get(), [policy(deny())], [policy(allow(Principal="*"))]) is DENIED
    assert judge(get(), [policy(allow(), allow("*", "*"))], [policy(deny(Principal="*"))]) is DENIED


@pytest.mark.parametrize(
    ("principal", "speaks_of_it"),
    [
        ("*", True),
        ({"AWS": "*"}, True),
        ({"AWS": [ROLE]}, True),
        ({"AWS": "arn:aws:iam::123456789012:root"}, True),
        ({"AWS": "123456789012"}, True),
        ({"AWS": "arn:aws:iam::123456789012:role/other"}, False),
        ({"Service": "events.amazonaws.com"}, False),
    ],
)
def test_a_resources_policy_speaks_of_its_principals_only(principal: Any, speaks_of_it: bool) -> None:
    assert judge(get(), [], [policy(allow(Principal=principal))]) is (ALLOWED if speaks_of_it else NOT_ALLOWED)


def test_a_service_is_a_principal_of_its_own() -> None:
    publish = Request("sns:Publish", "arn:aws:sns:eu-west-1:123456789012:t", "events.amazonaws.com")
    may = allow("sns:Publish", publish.resource, Principal={"Service": "events.amazonaws.com"})
    assert judge(publish, [], [policy(may)]) is ALLOWED
    assert judge(publish, [], [policy({**may, "Principal": {"Service": "budgets.amazonaws.com"}})]) is NOT_ALLOWED


# ---- actions and resources ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "meant"),
    [
        ("s3:getobject", True),
        ("s3:Get*", True),
        ("s3:?etObject", True),
        ("*", True),
        ("s3:Get", False),
        ("s3:Put*", False),
    ],
)
def test_an_action_is_meant_in_any_case_and_by_its_wildcards(action: str, meant: bool) -> None:
    assert judge(get(), [policy(allow(action))]) is (ALLOWED if meant else NOT_ALLOWED)


@pytest.mark.parametrize(
    ("pattern", "arn", "meant"),
    [
        ("*", f"{BUCKET}/a", True),
        (f"{BUCKET}/*", f"{BUCKET}/a/b", True),
        (f"{BUCKET}/?", f"{BUCKET}/a", True),
        (f"{BUCKET}/A", f"{BUCKET}/a", False),
        (f"{BUCKET}/*", BUCKET, False),
        (BUCKET, f"{BUCKET}/a", False),
        (f"{BUCKET}/a.c", f"{BUCKET}/abc", False),
        ("arn:aws:logs:eu-west-1:1:log-group:g:*", "arn:aws:logs:eu-west-1:1:log-group:g:log-stream:s", True),
        ("arn:aws:logs:eu-west-1:1:*", "arn:aws:logs:eu-west-2:1:log-group:g", False),
    ],
)
def test_an_arn_is_meant_as_it_is_written(pattern: str, arn: str, meant: bool) -> None:
    assert is_arn_like(pattern, arn) is meant


# ---- conditions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "wanted", "sent", "held"),
    [
        ("StringEquals", "a", "a", True),
        ("StringEquals", ["a", "b"], "b", True),
        ("StringEquals", "a", "A", False),
        ("StringEquals", "a", None, False),
        ("StringEqualsIfExists", "a", None, True),
        ("StringEqualsIfExists", "a", "b", False),
        ("StringNotEquals", ["a", "b"], "b", False),
        ("StringNotEquals", "a", None, True),
        ("StringLike", "run/*", "run/a", True),
        ("StringLike", "run/*", "run", False),
        ("StringLike", ["run/*", "run"], "run", True),
        ("StringNotLike", "run/*", "other/a", True),
        ("ArnLike", "arn:aws:iam::1:role/*", "arn:aws:iam::1:role/node", True),
        ("ArnNotEquals", "arn:aws:iam::1:role/a", "arn:aws:iam::1:role/b", True),
        ("Bool", False, "false", True),
        ("Bool", "true", "false", False),
        ("Bool", "false", None, False),
        ("BoolIfExists", "false", None, True),
        ("Null", "true", None, True),
        ("Null", True, "*", False),
        ("Null", "false", "*", True),
        ("NumericLessThan", "1.2", "1.1", True),
        ("NumericLessThan", 1.2, "1.2", False),
        ("NumericLessThanEquals", "2", "2", True),
        ("NumericLessThanEqualsIfExists", "2", "10", False),
        ("ForAnyValue:StringEquals", ["a", "b"], ("b", "c"), True),
        ("ForAnyValue:StringEquals", "a", None, False),
        ("ForAllValues:StringLike", "a*", ("a1", "a2"), True),
        ("ForAllValues:StringLike", "a*", ("a1", "b"), False),
        ("ForAllValues:StringLike", "a*", None, True),
        ("ForAnyValue:StringNotEquals", "a", None, False),
    ],
)
def test_a_condition_holds_as_aws_says(operator: str, wanted: Any, sent: Any, held: bool) -> None:
    statement = allow(Condition={operator: {"S3:Prefix": wanted}})
    assert judge(get(s3_prefix=sent), [policy(statement)]) is (ALLOWED if held else NOT_ALLOWED)


def test_every_condition_of_a_statement_has_to_hold() -> None:
    both = {"StringEquals": {"s3:prefix": "a", "s3:delimiter": "/"}, "Bool": {"aws:SecureTransport": "true"}}
    sent = {"s3:prefix": "a", "s3:delimiter": "/", "aws:SecureTransport": "true"}
    for key, value, verdict in [
        ("s3:prefix", "a", ALLOWED),
        ("s3:prefix", "b", NOT_ALLOWED),
        ("s3:delimiter", None, NOT_ALLOWED),
    ]:
        request = Request("s3:GetObject", f"{BUCKET}/a", ROLE, sent | {key: value})
        assert judge(request, [policy(allow(Condition=both))]) is verdict


# ---- what it does not know ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        {"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"},
        {"Effect": "Allow", "Action": "s3:*", "NotResource": "*"},
        {"Effect": "Permit", "Action": "s3:*", "Resource": "*"},
        {"Effect": "Allow", "Action": "s3:*"},
        allow(Principal="*"),
        allow(resource="arn:aws:s3:*:*:bucket"),
        allow(resource="bucket"),
        allow(resource=f"{BUCKET}/${{aws:username}}"),
        allow(Condition={"DateLessThan": {"s3:prefix": "a"}}),
        allow(Condition={"NullIfExists": {"s3:prefix": "true"}}),
        allow(Condition={"ForSomeValue:StringLike": {"s3:prefix": "a"}}),
        allow(Condition={"StringEquals": {"s3:prefix": "${aws:username}"}}),
        allow(Condition={"StringEquals": {"s3:prefiks": "a"}}),
        allow(Condition={"StringEquals": {"s3:prefix": {"a": "b"}}}),
        allow(Condition={"Bool": {"s3:prefix": "true"}}),
    ],
)
def test_what_it_does_not_know_it_does_not_judge(statement: dict[str, Any]) -> None:
    with pytest.raises(Unknown):
        judge(get(s3_prefix="a"), [policy(statement)])


def test_several_values_need_an_operator_for_several() -> None:
    with pytest.raises(Unknown, match="several values"):
        judge(get(s3_prefix=("a", "b")), [policy(allow(Condition={"StringEquals": {"s3:prefix": "a"}}))])


def test_a_statement_of_something_else_is_read_all_the_same() -> None:
    with pytest.raises(Unknown, match="DateLessThan"):
        judge(get(), [policy(allow(), allow("iam:*", Condition={"DateLessThan": {"aws:CurrentTime": "2026"}}))])


def test_another_principal_form_is_not_judged() -> None:
    with pytest.raises(Unknown, match="Federated"):
        judge(get(), [], [policy(allow(Principal={"Federated": "cognito"}))])


@pytest.mark.parametrize("strange", [{"Version": "2008-10-17", "Statement": []}, {**policy(), "Extra": 1}, {}])
def test_a_policy_of_another_form_is_refused(strange: dict[str, Any]) -> None:
    with pytest.raises(Unknown):
        statements(strange)


def test_one_statement_need_not_be_in_a_list() -> None:
    assert judge(get(), [{"Version": "2012-10-17", "Statement": allow()}]) is ALLOWED
