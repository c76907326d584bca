"""Ec2Source: what is announced, when it ends, and that nothing makes it give up."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from cloud.aws.metadata import Answer, MetadataSession
from cloud.aws.notices import AT_ONCE_S, Ec2Source
from cloud.errors import Unavailable
from cloud.notice import SPOT_NOTICE_S, Deadline, Notice, NoticeKind
from cloud.testing.metadata_sim import Fault, MetadataSimulator
from tests.support.clock import FakeClock
from tests.support.patience import HANG_S

SPOT = "meta-data/spot/instance-action"
AUTOSCALING = "meta-data/autoscaling/target-lifecycle-state"
REBALANCE = "meta-data/events/recommendations/rebalance"
NOON = datetime(2026, 6, 1, 12, 0, 0, tzinfo=UTC)


class FakeMetadata:
    """Answers by path: an Answer, an error, or nothing. `seconds` is what asking each path takes."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.answers: dict[str, str | Unavailable] = {}
        self.served_at: datetime | None = NOON
        self.seconds: dict[str, float] = {}
        self.asked: list[str] = []
        self.closed = False

    def get(self, path: str, *, deadline: Deadline) -> Answer | None:
        self.asked.append(path)
        self.clock.advance(min(self.seconds.get(path, 0.0), deadline.remaining_s))
        answer = self.answers.get(path)
        if isinstance(answer, Unavailable):
            raise answer
        return None if answer is None else Answer(answer, self.served_at)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(5000.0)


@pytest.fixture
def metadata(clock: FakeClock) -> FakeMetadata:
    return FakeMetadata(clock)


@pytest.fixture
def source(metadata: FakeMetadata, clock: FakeClock) -> Ec2Source:
    return Ec2Source(metadata, clock, lambda: NOON + timedelta(hours=1))  # the host's clock is wrong by an hour


def the_only(source: Ec2Source) -> Notice:
    (notice,) = source.poll()
    return notice


def lead_s(notice: Notice) -> float:
    assert notice.deadline is not None
    return notice.deadline.remaining_s


# ------------------------------------------------------------------------------------------------- what answers mean


def test_nothing_announced_is_no_notice(source: Ec2Source) -> None:
    assert list(source.poll()) == []


@pytest.mark.parametrize("action", ["terminate", "stop"])
def test_a_spot_notice_ends_at_its_time_by_the_services_clock(
    source: Ec2Source, metadata: FakeMetadata, action: str
) -> None:
    metadata.answers[SPOT] = f'{{"action": "{action}", "time": "2026-06-01T12:02:00Z"}}'

    notice = the_only(source)

    assert notice.id == f"ec2 spot {action} 2026-06-01T12:02:00+00:00"
    assert (notice.kind, notice.source) == (NoticeKind.INTERRUPT, "ec2 spot")
    assert lead_s(notice) == 120
    assert notice.detail == metadata.answers[SPOT]


def test_without_the_services_clock_the_hosts_is_used(metadata: FakeMetadata, clock: FakeClock) -> None:
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T12:02:00Z"}'
    metadata.served_at = None

    assert lead_s(the_only(Ec2Source(metadata, clock, lambda: NOON + timedelta(seconds=30)))) == 90


def test_a_deadline_is_fixed_when_it_is_first_seen(source: Ec2Source, metadata: FakeMetadata, clock: FakeClock) -> None:
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T12:02:00Z"}'
    first = the_only(source)

    clock.advance(50)
    metadata.served_at = NOON + timedelta(seconds=80)  # the service's clock jumped

    assert the_only(source) is first
    assert lead_s(first) == 70


def test_another_time_is_another_notice(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T12:02:00Z"}'
    first = the_only(source)
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T12:03:00Z"}'
    second = the_only(source)

    assert first.id != second.id
    assert lead_s(second) == 180


def test_a_hibernation_begins_at_once(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[SPOT] = '{"action": "hibernate", "time": "2026-06-01T12:02:00Z"}'

    assert lead_s(the_only(source)) == AT_ONCE_S


def test_a_time_that_has_passed_is_at_once(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T11:59:10Z"}'

    assert lead_s(the_only(source)) == AT_ONCE_S


def test_a_notice_that_was_not_carried_out_lapses_a_minute_after_its_time(
    source: Ec2Source, metadata: FakeMetadata
) -> None:
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T11:58:59Z"}'
    assert list(source.poll()) == []

    metadata.served_at = None  # nobody tells the time that EC2 goes by
    assert lead_s(the_only(source)) == AT_ONCE_S


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<?xml version='1.0'?><html><body><h1>200 - OK</h1></body></html>",
        "null",
        "[]",
        "[" * 10000,
        '{"action": "terminate"}',
        '{"action": "terminate", "time": "soon"}',
        '{"action": "terminate", "time": 1780315320}',
        '{"action": ["terminate"], "time": "2026-06-01T12:02:00Z"}',
        '{"action": "terminate", "time": "2036-06-01T12:02:00Z"}',  # no notice is ten years ahead
    ],
)
def test_an_unreadable_notice_is_an_interruption_in_two_minutes(
    source: Ec2Source, metadata: FakeMetadata, text: str
) -> None:
    metadata.answers[SPOT] = text

    notice = the_only(source)

    assert notice.kind is NoticeKind.INTERRUPT
    assert lead_s(notice) == SPOT_NOTICE_S


def test_an_unreadable_notice_that_changes_with_every_poll_is_one_notice(
    source: Ec2Source, metadata: FakeMetadata, clock: FakeClock
) -> None:
    metadata.answers[SPOT] = "<html>request 1</html>"
    first = the_only(source)
    clock.advance(100)
    metadata.answers[SPOT] = "<html>request 2</html>"

    assert the_only(source) is first
    assert lead_s(first) == 20


@pytest.mark.parametrize("state", ["InService", "Standby", "Detached", "Warmed:Stopped", "", "<html>Terminated</html>"])
def test_a_group_that_keeps_its_instance_is_no_notice(source: Ec2Source, metadata: FakeMetadata, state: str) -> None:
    metadata.answers[AUTOSCALING] = state

    assert list(source.poll()) == []


def test_a_group_that_ends_its_instance_is_an_interruption(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[AUTOSCALING] = "Terminated\n"

    notice = the_only(source)

    assert (notice.kind, notice.source, notice.id) == (
        NoticeKind.INTERRUPT,
        "ec2 autoscaling",
        "ec2 autoscaling Terminated",
    )
    assert lead_s(notice) == SPOT_NOTICE_S


@pytest.mark.parametrize("text", ['{"noticeTime": "2026-06-01T12:00:00Z"}', "<html></html>"])
def test_a_recommendation_is_mild_and_has_no_deadline(source: Ec2Source, metadata: FakeMetadata, text: str) -> None:
    metadata.answers[REBALANCE] = text

    notice = the_only(source)

    assert (notice.kind, notice.deadline) == (NoticeKind.REBALANCE, None)


def test_a_withdrawn_notice_is_gone(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T12:02:00Z"}'
    source.poll()
    del metadata.answers[SPOT]

    assert list(source.poll()) == []


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("failing", [SPOT, AUTOSCALING, REBALANCE])
def test_one_failing_path_hides_no_other_news(source: Ec2Source, metadata: FakeMetadata, failing: str) -> None:
    answers = {
        SPOT: '{"action": "terminate", "time": "2026-06-01T12:02:00Z"}',
        AUTOSCALING: "Terminated",
        REBALANCE: '{"noticeTime": "2026-06-01T12:00:00Z"}',
    }
    metadata.answers = {**answers, failing: Unavailable("down")}

    assert len(source.poll()) == 2


def test_one_failing_path_without_news_elsewhere_is_told(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[SPOT] = Unavailable("down")

    with pytest.raises(Unavailable, match="down"):
        source.poll()


def test_a_notice_whose_path_fails_stays_in_force(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[SPOT] = '{"action": "terminate", "time": "2026-06-01T12:02:00Z"}'
    first = the_only(source)
    metadata.answers[SPOT] = Unavailable("down")

    assert the_only(source) is first


def test_no_answer_at_all_is_told_even_with_a_notice_in_force(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers[REBALANCE] = '{"noticeTime": "2026-06-01T12:00:00Z"}'
    source.poll()
    metadata.answers = dict.fromkeys((SPOT, AUTOSCALING, REBALANCE), Unavailable("down"))

    with pytest.raises(Unavailable):
        source.poll()


def test_a_thousand_failures_later_it_still_asks(source: Ec2Source, metadata: FakeMetadata) -> None:
    metadata.answers = dict.fromkeys((SPOT, AUTOSCALING, REBALANCE), Unavailable("down"))
    for _ in range(1000):
        with pytest.raises(Unavailable):
            source.poll()
    metadata.answers = {AUTOSCALING: "Terminated"}

    assert the_only(source).kind is NoticeKind.INTERRUPT


def test_a_hanging_path_costs_a_second_and_starves_no_other(
    source: Ec2Source, metadata: FakeMetadata, clock: FakeClock
) -> None:
    metadata.answers = {SPOT: Unavailable("hangs"), AUTOSCALING: "Terminated"}
    metadata.seconds[SPOT] = 60.0

    before = clock()
    with pytest.raises(Unavailable):
        source.poll()
    assert clock() - before == 1.0
    assert metadata.asked == [SPOT]

    assert the_only(source).source == "ec2 autoscaling"
    assert clock() - before == 2.0


def test_closing_closes_the_session(source: Ec2Source, metadata: FakeMetadata) -> None:
    source.close()

    assert metadata.closed


# ------------------------------------------------------------------------------------ the whole way, over loopback


@pytest.fixture
def simulator(clock: FakeClock) -> Iterator[MetadataSimulator]:
    with MetadataSimulator(clock=clock, wall_clock=lambda: NOON) as simulator:
        yield simulator


@pytest.fixture
def real(simulator: MetadataSimulator, clock: FakeClock) -> Iterator[Ec2Source]:
    session = MetadataSession(simulator.url, timeout_s=HANG_S, clock=clock)
    source = Ec2Source(session, clock, lambda: NOON - timedelta(hours=1))
    yield source
    source.close()


def test_a_notice_is_seen_when_it_appears(real: Ec2Source, simulator: MetadataSimulator, clock: FakeClock) -> None:
    simulator.notice(in_s=20, lead_s=100)
    assert list(real.poll()) == []

    clock.advance(20)

    notice = the_only(real)
    assert notice.id == "ec2 spot terminate 2026-06-01T12:02:00+00:00"
    assert lead_s(notice) == 120  # the simulator's wall clock stood still meanwhile


def test_notice_recommendation_and_group_come_together(real: Ec2Source, simulator: MetadataSimulator) -> None:
    simulator.notice()
    simulator.rebalance()
    simulator.lifecycle("Terminated")

    assert [notice.source for notice in real.poll()] == ["ec2 spot", "ec2 autoscaling", "ec2 rebalance"]

    simulator.withdraw()
    assert list(real.poll()) == []


def test_a_service_whose_clock_is_an_hour_ahead_changes_no_deadline(
    real: Ec2Source, simulator: MetadataSimulator
) -> None:
    simulator.fault(Fault.CLOCK_OFFSET)
    simulator.notice(lead_s=60)

    notice = the_only(real)

    assert notice.id == "ec2 spot terminate 2026-06-01T13:01:00+00:00"
    assert lead_s(notice) == 60


def test_a_page_with_status_200_is_an_interruption(real: Ec2Source, simulator: MetadataSimulator) -> None:
    simulator.fault(Fault.XHTML, path=SPOT)

    assert lead_s(the_only(real)) == SPOT_NOTICE_S


@pytest.mark.parametrize("kind", [Fault.SERVER_ERROR, Fault.UNAUTHORIZED, Fault.DISABLED, Fault.NO_TOKENS])
def test_a_fault_is_told_and_the_notice_after_it_is_seen(
    real: Ec2Source, simulator: MetadataSimulator, clock: FakeClock, kind: Fault
) -> None:
    simulator.fault(kind, for_s=10)
    with pytest.raises(Unavailable):
        real.poll()

    clock.advance(10)
    simulator.notice()
    assert the_only(real).kind is NoticeKind.INTERRUPT


def test_an_expired_token_delays_no_notice(real: Ec2Source, simulator: MetadataSimulator) -> None:
    real.poll()
    simulator.fault(Fault.TOKEN_EXPIRY)
    simulator.notice()

    assert the_only(real).kind is NoticeKind.INTERRUPT
