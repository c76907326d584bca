"""Signals and the drain file as Notices."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cloud.errors import Unavailable
from cloud.host.notices import DrainFileSource, SignalSource
from cloud.notice import NoticeKind
from tests.support.clock import FakeClock


def test_without_a_signal_there_is_no_notice() -> None:
    assert list(SignalSource(30.0).poll()) == []


def test_a_signal_is_an_interruption_after_the_grace_period() -> None:
    clock = FakeClock()
    source = SignalSource(30.0, clock)

    source.received(signal.SIGTERM)
    clock.advance(10)
    (notice,) = source.poll()

    assert (notice.id, notice.kind) == ("signal SIGTERM", NoticeKind.INTERRUPT)
    assert notice.deadline is not None
    assert notice.deadline.remaining_s == 20


def test_the_same_signal_again_is_no_news() -> None:
    clock = FakeClock()
    source = SignalSource(30.0, clock)
    source.received(signal.SIGTERM)
    (first,) = source.poll()

    clock.advance(10)
    source.received(signal.SIGTERM)

    assert list(source.poll()) == [first]


def test_without_the_file_there_is_no_notice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert list(DrainFileSource(tmp_path / "drain", 60.0).poll()) == []
    assert list(DrainFileSource(tmp_path / "file" / "drain", 60.0).poll()) == []


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 60), ("90", 90), (" 12.5\n", 12.5), ("0", 0), ("-5", 60), ("nan", 60), ("inf", 60), ("please", 60)],
)
def test_the_file_may_say_how_long_there_is(tmp_path: Path, text: str, seconds: float) -> None:
    (tmp_path / "drain").write_text(text)

    (notice,) = DrainFileSource(tmp_path / "drain", 60.0, FakeClock()).poll()

    assert notice.kind is NoticeKind.INTERRUPT
    assert notice.deadline is not None
    assert notice.deadline.remaining_s == seconds


def test_a_file_that_stays_is_one_notice_with_one_deadline(tmp_path: Path) -> None:
    clock = FakeClock()
    (tmp_path / "drain").touch()
    source = DrainFileSource(tmp_path / "drain", 60.0, clock)
    (first,) = source.poll()

    clock.advance(20)

    assert list(source.poll()) == [first]
    assert first.deadline is not None
    assert first.deadline.remaining_s == 40


def test_a_file_written_again_is_another_notice(tmp_path: Path) -> None:
    path = tmp_path / "drain"
    path.write_text("90")
    source = DrainFileSource(path, 60.0, FakeClock())
    (first,) = source.poll()

    path.write_text("30")
    os.utime(path, ns=(1, 1))
    (second,) = source.poll()

    assert second.id != first.id
    assert second.deadline is not None
    assert second.deadline.remaining_s == 30


def test_a_removed_file_withdraws(tmp_path: Path) -> None:
    path = tmp_path / "drain"
    path.touch()
    source = DrainFileSource(path, 60.0)
    source.poll()

    path.unlink()

    assert list(source.poll()) == []


def test_a_file_that_cannot_be_read_still_drains(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "drain")  # opening it would block

    assert len(DrainFileSource(tmp_path / "drain", 60.0).poll()) == 1


def test_a_path_that_cannot_be_looked_at_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")

    with pytest.raises(Unavailable):
        DrainFileSource(tmp_path / "loop", 60.0).poll()
