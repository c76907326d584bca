"""Who am I, and which tags have I: against the metadata simulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cloud.aws.instance import ATTEMPTS, GROUP_TAG, Instance, identify, tag, whoami
from cloud.aws.metadata import Answer, MetadataSession
from cloud.errors import Unavailable
from cloud.notice import Deadline
from cloud.testing.metadata_sim import Fault, MetadataSimulator
from tests.support.patience import HANG_S

NEVER = Deadline.never()
DOCUMENT = "dynamic/instance-identity/document"


@pytest.fixture
def simulator() -> Iterator[MetadataSimulator]:
    with MetadataSimulator(instance_id="i-1", tags={GROUP_TAG: "trainers", "harness-run": "gpt-small"}) as simulator:
        yield simulator


@pytest.fixture
def session(simulator: MetadataSimulator) -> Iterator[MetadataSession]:
    session = MetadataSession(simulator.url, timeout_s=HANG_S)
    yield session
    session.close()


class Texts:
    """A metadata service that has these texts, and fails so often before it answers."""

    def __init__(self, texts: dict[str, str], failures: int = 0) -> None:
        self.texts = texts
        self.failures = failures

    def get(self, path: str, *, deadline: Deadline) -> Answer | None:
        if self.failures:
            self.failures -= 1
            raise Unavailable("busy")
        return Answer(self.texts[path], None) if path in self.texts else None

    def close(self) -> None:
        pass


def test_an_instance_knows_itself(session: MetadataSession) -> None:
    assert whoami(session, NEVER) == Instance("i-1", "us-east-1", "g6e.xlarge", "us-east-1a", spot=True)


def test_an_instance_on_demand_is_no_spot_instance() -> None:
    texts = {DOCUMENT: '{"instanceId": "i-2"}', "meta-data/instance-life-cycle": "on-demand"}

    assert whoami(Texts(texts), NEVER) == Instance("i-2", "", "", "", spot=False)


@pytest.mark.parametrize("document", ["", "{}", "[]", "null", "<html>", '{"instanceId": ""}', "[" * 100_000])
def test_what_is_no_identity_document_is_no_instance(document: str) -> None:
    with pytest.raises(Unavailable, match="no instance identity document"):
        identify(Texts({DOCUMENT: document}), NEVER)


def test_a_place_without_a_metadata_service_is_not_ec2() -> None:
    session = MetadataSession("http://127.0.0.1:1")

    assert whoami(session, NEVER) is None
    assert tag(session, GROUP_TAG, NEVER) is None
    session.close()


def test_a_metadata_service_that_is_turned_off_is_not_asked() -> None:
    assert whoami(None, NEVER) is None
    assert tag(None, GROUP_TAG, NEVER) is None


def test_a_service_that_is_busy_is_asked_again() -> None:
    texts = {DOCUMENT: '{"instanceId": "i-2"}'}

    assert whoami(Texts(texts, failures=ATTEMPTS - 1), NEVER) is not None
    assert whoami(Texts(texts, failures=ATTEMPTS), NEVER) is None


def test_a_service_that_hangs_is_given_up_by_the_deadline(simulator: MetadataSimulator) -> None:
    simulator.fault(Fault.HANG)
    session = MetadataSession(simulator.url, timeout_s=HANG_S)

    assert whoami(session, Deadline.after(0.05)) is None
    session.close()


def test_a_tag_is_read_and_one_that_is_not_there_is_none(
    simulator: MetadataSimulator, session: MetadataSession
) -> None:
    assert tag(session, GROUP_TAG, NEVER) == "trainers"
    assert tag(session, "harness-run", NEVER) == "gpt-small"
    assert tag(session, "harness-store", NEVER) is None
    assert ("GET", "meta-data/tags/instance/aws:autoscaling:groupName") in simulator.requests


def test_a_key_that_no_path_can_hold_is_quoted(simulator: MetadataSimulator, session: MetadataSession) -> None:
    assert tag(session, "../instance-id?a b", NEVER) is None
    assert ("GET", "meta-data/tags/instance/..%2Finstance-id%3Fa%20b") in simulator.requests
