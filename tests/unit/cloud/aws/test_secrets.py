"""Values that only an ARN names: read from moto, and never told."""

from __future__ import annotations

import json
from collections.abc import Iterator

import boto3
import pytest
from moto import mock_aws

from cloud.aws.secrets import SecretRef
from cloud.errors import CloudError, Denied
from cloud.notice import Deadline
from harness.errors import ConfigError
from harness.node.secrets import VARIABLE, read_secrets

REGION = "us-east-1"
ACCOUNT = "123456789012"
NEVER = Deadline.never()
PARAMETER = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/team/token"


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """ARNs of what is there, by a name."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with mock_aws():
        boto3.client("ssm", REGION).put_parameter(Name="/team/token", Value="hf_123", Type="SecureString")
        vault = boto3.client("secretsmanager", REGION)
        made = {
            name: vault.create_secret(Name=name, **value)["ARN"]
            for name, value in {
                "plain": {"SecretString": "a\nkey\nof lines"},
                "json": {"SecretString": json.dumps({"WANDB_API_KEY": "w", "port": 8})},
                "binary": {"SecretBinary": b"\x00\x01"},
                "nul": {"SecretString": "a\0b"},
            }.items()
        }
        yield {**made, "parameter": PARAMETER}


def test_a_parameter_and_secrets_are_read_by_their_arns(account: dict[str, str]) -> None:
    assert SecretRef.parse(account["parameter"]).read(NEVER) == "hf_123"
    assert SecretRef.parse(account["plain"]).read(NEVER) == "a\nkey\nof lines"
    assert SecretRef.parse(f"{account['json']}:WANDB_API_KEY::").read(NEVER) == "w"
    assert SecretRef.parse(f"{account['json']}:port::").read(NEVER) == "8"
    assert SecretRef.parse(f"{account['plain']}::AWSCURRENT:").read(NEVER) == "a\nkey\nof lines"


@pytest.mark.parametrize(
    "text",
    ["", "hf_123", "arn:aws:s3:::bucket", f"arn:aws:ssm:{REGION}:{ACCOUNT}:document/x", f"arn:aws:ssm:{REGION}:1:x"],
)
def test_what_is_no_arn_of_a_secret_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the ARN"):
        SecretRef.parse(text)


def test_what_cannot_be_had_says_which_and_no_value(account: dict[str, str]) -> None:
    for arn, why in {
        account["binary"]: "is binary",
        f"{account['json']}:other::": "no JSON object with the key 'other'",
        f"{account['plain']}:key::": "no JSON object with the key 'key'",
        PARAMETER.replace("token", "absent"): "ParameterNotFound",
    }.items():
        with pytest.raises(CloudError, match=why) as refused:
            SecretRef.parse(arn).read(NEVER)
        assert "of lines" not in str(refused.value)
        assert isinstance(refused.value, Denied)


def test_they_become_variables_of_the_program(account: dict[str, str]) -> None:
    said: list[str] = []
    line = f"HF_TOKEN={account['parameter']} WANDB_API_KEY={account['json']}:WANDB_API_KEY::"

    assert read_secrets({VARIABLE: line}, said.append) == {"HF_TOKEN": "hf_123", "WANDB_API_KEY": "w"}
    assert said == ["secrets: HF_TOKEN, WANDB_API_KEY"]
    assert read_secrets({}, said.append) == {}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("1X=arn", "no name of an environment variable"),
        ("TOKEN", "not the ARN"),
        ("TOKEN=hf_123", "not the ARN"),
        (f"TOKEN={PARAMETER}-absent", "the secret TOKEN cannot be read: GetParameter"),
    ],
)
def test_one_that_cannot_be_read_is_an_error_of_the_configuration(account: dict[str, str], line: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        read_secrets({VARIABLE: line}, lambda text: None)


def test_a_value_that_no_variable_holds_is_refused(account: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="NUL"):
        read_secrets({VARIABLE: f"TOKEN={account['nul']}"}, lambda text: None)
