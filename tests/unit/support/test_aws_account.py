"""The account that the module is applied to: copies go their own ways, and nothing outlives its last user."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import EndpointConnectionError

from tests.support.aws_account import Account, Lease, open_account
from tests.support.patience import HANG_S


@pytest.fixture
def lease(tmp_path: Path) -> Iterator[Lease]:
    held = Lease(tmp_path / "lease")
    yield held
    held.release()


@pytest.fixture
def account(tmp_path: Path, lease: Lease) -> Account:
    made = open_account(tmp_path / "lease", tmp_path / "log")
    put(made, "first")
    return made


def put(account: Account, name: str) -> None:
    account.client("sns").create_topic(Name=name)


def topics(account: Account) -> set[str]:
    return {topic["TopicArn"].split(":")[-1] for topic in account.client("sns").list_topics()["Topics"]}


def test_a_copy_has_what_there_was_and_goes_its_own_way(account: Account) -> None:
    copy = account.copy()
    put(account, "second")
    put(copy, "third")
    copy_of_it = copy.copy()

    assert topics(account) == {"first", "second"}
    assert topics(copy) == topics(copy_of_it) == {"first", "third"}


def test_a_copy_that_is_ended_takes_nothing_with_it(account: Account) -> None:
    copy = account.copy()
    copy_of_it = copy.copy()
    copy.end()

    with pytest.raises(EndpointConnectionError):
        topics(copy)
    assert topics(account) == topics(copy_of_it) == {"first"}


def test_an_account_and_its_copies_end_with_the_last_who_holds_the_lease(
    account: Account, lease: Lease, tmp_path: Path
) -> None:
    processes = [os.pidfd_open(each.pid) for each in (account, account.copy())]
    another = Lease(tmp_path / "lease")
    lease.release()
    assert topics(account) == {"first"}

    another.release()

    for process in processes:
        assert select.select([process], [], [], HANG_S)[0], "it lives on"
        os.close(process)
