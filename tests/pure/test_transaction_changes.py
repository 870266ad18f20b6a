"""Single decisions of a coordinator of transactions."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.core.transactions import changes
from rayq.core.transactions.records import Record, TransactionKey, decode, encode
from rayq.core.transactions.state import TransactionState
from rayq.errors import (
    AlreadyCommittedError,
    CoordinatorLoadingError,
    InvalidRequestError,
    ProducerFencedError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from tests.pure import transaction_requests

P0, P1, P2 = (("T", number) for number in range(3))
DAY_MS = 24 * 3_600_000


class Coordinator:
    """The state of transactional ids with its clock. Every decision is replayed at once."""

    def __init__(self) -> None:
        self.state = TransactionState()
        self.log: list[Record] = []
        self.now_s = 1000.0
        self.families = iter(range(1 << 61, 1 << 62, 1 << 20))

    @property
    def now_ms(self) -> int:
        return int(self.now_s * 1000)

    def apply(self, records: list[Record]) -> list[Record]:
        for record in records:
            self.state.replay(decode(*encode(record)))
        self.log += records
        return records

    def fail_over(self) -> None:
        self.state = TransactionState()
        for record in self.log:
            self.state.replay(record)

    def init(self, owner: str = "a", name: str = "id", timeout_ms: int = 60_000) -> TransactionKey:
        if changes.needs_family(self.state, name):
            self.state.families.append(next(self.families))
        self.apply(
            transaction_requests.init_producer(
                self.state, name, owner, transaction_timeout_ms=timeout_ms, now_ms=self.now_ms
            )
        )
        return self.state.ids[name].next

    def join(self, key: TransactionKey, *participants: tuple[str, int]) -> list[Record]:
        return [
            record
            for part in participants
            for record in self.apply(
                transaction_requests.join(
                    self.state, key, part, now_s=self.now_s, now_ms=self.now_ms
                )
            )
        ]

    def end(
        self,
        key: TransactionKey,
        is_commit: bool = True,
        *,
        owner: str = "a",
        name: str | None = None,
        transactional_id: str = "id",
    ) -> tuple[bool, TransactionKey]:
        how: dict[str, Any] = {"is_commit": is_commit, "name": name}
        at = (self.state, transactional_id, owner, key)
        if changes.needs_family(self.state, transactional_id):
            self.state.families.append(next(self.families))
        self.apply(transaction_requests.end(*at, **how, now_ms=self.now_ms))
        return transaction_requests.ended(*at, **how)

    def touch(self, key: TransactionKey, owner: str = "a") -> list[Record]:
        now = {"now_s": self.now_s, "now_ms": self.now_ms}
        return self.apply(transaction_requests.touch(self.state, "id", owner, key, **now))

    def throttled(self, key: TransactionKey, throttle_ms: int) -> list[Record]:
        now = {"now_s": self.now_s, "now_ms": self.now_ms}
        return self.apply(transaction_requests.throttled(self.state, key, throttle_ms, **now))

    def seal(self, key: TransactionKey, owner: str = "a") -> list[Record]:
        return self.apply(transaction_requests.seal(self.state, "id", owner, key, now_ms=self.now_ms))

    def mark(self, key: TransactionKey, *participants: tuple[str, int]) -> None:
        for part in participants:
            self.apply(changes.marker_written(self.state, key, part))

    def abort(self, key: TransactionKey) -> list[Record]:
        return self.apply(changes.abort(self.state, key, now_ms=self.now_ms))

    def expire(self) -> list[str]:
        """The ids whose transactions are aborted."""
        found = changes.expired(self.state, now_s=self.now_s, now_ms=self.now_ms)
        ids = [self.state.transactions[key].transactional_id for key in found]
        for key in found:
            self.abort(key)
        return ids


@pytest.fixture
def of() -> Coordinator:
    return Coordinator()


# --- owners -------------------------------------------------------------------------------------


def test_each_id_has_a_family_of_its_own_and_begins_with_epoch_0(of: Coordinator) -> None:
    first, other = of.init(name="one"), of.init(name="other")
    assert first.epoch == other.epoch == 0
    assert first.family != other.family


def test_without_a_family_in_hand_an_id_is_not_begun(of: Coordinator) -> None:
    with pytest.raises(CoordinatorLoadingError):
        transaction_requests.init_producer(of.state, "id", "a", transaction_timeout_ms=1000, now_ms=0)


def test_an_owner_that_repeats_itself_hears_the_same(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0)
    assert of.init() == key
    assert of.state.transactions[key].state == "open"


def test_a_new_owner_has_another_epoch_also_where_nothing_was_open(of: Coordinator) -> None:
    key = of.init("a")
    assert of.init("b") == (key.family, key.epoch + 1)
    with pytest.raises(TransactionEndedError):
        of.join(key, P0)


def test_a_new_owner_aborts_what_is_open_in_one_decision(of: Coordinator) -> None:
    key = of.init("a")
    of.join(key, P0, P1)
    before = len(of.log)
    of.init("b")
    assert len(of.log) == before + 2
    assert of.state.transactions[key].state == "aborting"
    assert changes.unmarked(of.state, key) == {P0, P1}


def test_former_owners_are_fenced(of: Coordinator) -> None:
    key = of.init("a")
    following = of.init("b")
    with pytest.raises(ProducerFencedError, match="two ids"):
        of.init("a")
    with pytest.raises(ProducerFencedError):
        of.end(following, owner="a")
    assert of.state.ids["id"].next == following
    assert of.end(key, owner="a") == (False, key), "told how it ended, and no other transaction"


@pytest.mark.parametrize("timeout_ms", [0, 999, 15 * 60_000 + 1])
def test_timeouts_have_a_range(of: Coordinator, timeout_ms: int) -> None:
    with pytest.raises(InvalidRequestError, match="1000 to 900000"):
        of.init(timeout_ms=timeout_ms)


def test_there_are_limits(of: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "IDS_MAX", 2)
    monkeypatch.setattr(changes, "PARTICIPANTS_MAX", 2)
    key = of.init(name="one")
    of.init(name="other")
    with pytest.raises(TransactionLimitError, match="2 transactional ids"):
        of.init(name="third")
    of.join(key, P0, P1)
    of.join(key, P1)
    with pytest.raises(TransactionLimitError, match="2 partitions"):
        of.join(key, P2)


def test_who_has_joined_joins_again_by_a_record(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0)
    assert of.join(key, P0), "its commit shows that no newer coordinator has sealed it"
    assert of.state.transactions[key].participants == {P0}


# --- seals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_sealed_transaction_gets_no_more_partitions_and_ends_as_any(
    of: Coordinator, is_commit: bool
) -> None:
    key = of.init()
    of.join(key, P0, P1)
    assert of.seal(key) and of.seal(key) == []
    for place in (P0, P2):
        with pytest.raises(TransactionEndedError):
            of.join(key, place)
    of.fail_over()
    with pytest.raises(TransactionEndedError):
        of.join(key, P0)
    assert changes.outcome(of.state, key) == "sealed"
    assert of.end(key, is_commit)[0] is is_commit
    assert changes.unmarked(of.state, key) == {P0, P1}
    with pytest.raises(TransactionEndedError):
        of.seal(key)


def test_a_transaction_that_nobody_joined_can_be_sealed_and_leaves_nothing(of: Coordinator) -> None:
    key = of.init()
    of.seal(key)
    with pytest.raises(TransactionEndedError):
        of.join(key, P0)
    of.end(key)
    assert of.state.transactions == {}


def test_only_the_owner_seals_and_touches(of: Coordinator) -> None:
    key = of.init("a")
    of.join(key, P0)
    of.init("b")
    with pytest.raises(ProducerFencedError):
        of.seal(key, "a")
    with pytest.raises(ProducerFencedError):
        of.touch(key, "a")
    with pytest.raises(TransactionEndedError):
        of.seal(key, "b")


def test_a_sealed_transaction_whose_owner_died_is_aborted(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0)
    of.touch(key)
    of.seal(key)
    of.now_s += 60
    assert of.expire() == ["id"]
    assert of.state.transactions[key].state == "aborting"


# --- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_commit", [True, False])
def test_an_end_has_the_next_epoch_and_is_told_again(of: Coordinator, is_commit: bool) -> None:
    key = of.init()
    of.join(key, P0)
    answer = of.end(key, is_commit)
    assert answer == (is_commit, TransactionKey(key.family, 1))
    assert of.state.transactions[key].state == ("committing" if is_commit else "aborting")
    assert of.end(key, not is_commit) == answer, "whatever is asked"
    of.mark(key, P0)
    assert of.end(key, is_commit) == answer
    assert of.state.transactions == {}


def test_a_block_that_wrote_nothing_ends_without_participants(of: Coordinator) -> None:
    key = of.init()
    committed, following = of.end(key, name="n")
    assert committed and following.epoch == key.epoch + 1
    assert of.state.transactions == {}
    assert of.state.ids["id"].last_name == "n"


def test_only_the_present_and_the_last_transaction_can_be_ended(of: Coordinator) -> None:
    first = of.init()
    _, second = of.end(first)
    _, third = of.end(second)
    for wrong in (first, TransactionKey(third.family, third.epoch + 1), TransactionKey(7, 0)):
        with pytest.raises(TransactionEndedError):
            of.end(wrong)
    with pytest.raises(TransactionEndedError):
        of.end(third, transactional_id="unknown")


def test_after_the_last_epoch_comes_another_family(
    of: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert changes.EPOCH_MAX == 65_535
    monkeypatch.setattr(changes, "EPOCH_MAX", 2)
    key = of.init()
    while key.epoch < 2:
        _, key = of.end(key)
    of.join(key, P0)
    _, following = of.end(key)
    assert following.family != key.family and following.epoch == 0
    of.join(following, P0)
    assert set(of.state.transactions) == {key, following}
    with pytest.raises(TransactionEndedError):
        of.join(TransactionKey(key.family, 2), P1)


def test_a_name_commits_once(of: Coordinator) -> None:
    _, key = of.end(of.init(), name="n")
    of.join(key, P0)
    for _ in range(2):
        with pytest.raises(AlreadyCommittedError, match="'n'"):
            of.end(key, name="n")
    assert of.state.transactions[key].state == "aborting"
    aborted, following = of.end(key, False, name="n")
    assert not aborted, "what follows is told to whoever asks for the abort"
    assert of.end(following, name="m")[0]
    assert of.state.ids["id"].last_name == "m"


def test_a_new_owner_keeps_the_name_of_what_is_committed(of: Coordinator) -> None:
    of.end(of.init(), name="n")
    of.init("b")
    assert of.state.ids["id"].last_name == "n"


def test_an_abort_by_others_ends_exactly_the_transaction_that_it_names(of: Coordinator) -> None:
    key = of.init()
    assert not of.abort(key), "nothing is open"
    of.join(key, P0)
    assert of.abort(key)
    following = TransactionKey(key.family, 1)
    assert of.end(key) == (False, following)
    of.join(following, P0)
    assert not of.abort(key), "it waits for its marker"
    of.mark(key, P0)
    assert not of.abort(key), "it is forgotten"
    assert of.state.transactions[following].state == "open"


# --- participants -------------------------------------------------------------------------------


def test_what_has_ended_takes_no_participants(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0)
    of.end(key)
    with pytest.raises(TransactionEndedError):
        of.join(key, P1)
    of.mark(key, P0)
    with pytest.raises(TransactionEndedError):
        of.join(key, P1)


def test_a_transaction_is_forgotten_with_its_last_marker(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0, P1)
    assert changes.outcome(of.state, key) == "open"
    of.end(key)
    of.mark(key, P1)
    assert changes.outcome(of.state, key) == "committing"
    assert changes.unmarked(of.state, key) == {P0}
    of.fail_over()
    assert changes.unmarked(of.state, key) == {P0, P1}, "a new coordinator writes all again"
    of.mark(key, P0, P1)
    assert key not in of.state.transactions


@pytest.mark.parametrize("is_commit", [True, False])
def test_of_each_id_it_is_known_how_its_last_transaction_ended(
    of: Coordinator, is_commit: bool
) -> None:
    key = of.init()
    of.join(key, P0)
    following = of.end(key, is_commit=is_commit)[1]
    of.mark(key, P0)
    of.fail_over()
    assert changes.outcome(of.state, key) == ("committed" if is_commit else "aborted")
    assert changes.outcome(of.state, following) == "unknown"
    of.end(following)
    assert changes.outcome(of.state, key) == "unknown"


def test_the_next_transactions_begin_while_five_lack_markers(of: Coordinator) -> None:
    key = of.init()
    ended = []
    for _ in range(5):
        of.join(key, P0)
        ended.append(key)
        _, key = of.end(key)
    with pytest.raises(TransactionOrderError, match="5 earlier"):
        of.join(key, P0)
    assert of.state.under_way("id") == ended
    of.mark(ended[2], P0)
    assert of.join(key, P0)
    assert of.join(key, P1), "it has begun: it is not refused any more"


# --- time ---------------------------------------------------------------------------------------


def test_a_transaction_ends_after_its_timeout_from_the_first_partition_on(of: Coordinator) -> None:
    key = of.init(timeout_ms=1000)
    of.now_s += 100
    of.join(key, P0)
    of.now_s += 0.9
    of.join(key, P1)
    assert of.expire() == []
    of.now_s += 0.1
    assert of.expire() == ["id"]
    assert of.end(key) == (False, TransactionKey(key.family, 1))
    assert of.expire() == []


@pytest.mark.parametrize(("passed_s", "left_s"), [(20, 40), (58, 5), (600, 5), (-600, 60)])
def test_a_new_coordinator_grants_what_is_left(
    of: Coordinator, passed_s: float, left_s: float
) -> None:
    of.join(of.init(), P0)
    of.now_s += passed_s
    of.fail_over()
    assert of.expire() == []
    of.now_s += left_s - 0.1
    assert of.expire() == []
    of.now_s += 0.1
    assert of.expire() == ["id"]


def test_a_touched_transaction_has_its_timeout_from_each_touch_on_for_an_hour(
    of: Coordinator,
) -> None:
    key = of.init()
    assert of.touch(key) == [], "it has no partition, so it has no time-out either"
    of.join(key, P0)
    of.now_s += 59
    assert of.touch(key) and not of.touch(key), "that it is touched is kept"
    for _ in range(59):
        assert of.expire() == []
        of.now_s += 60 - 0.1
        of.touch(key)
    of.now_s += 61
    assert of.expire() == ["id"]
    with pytest.raises(TransactionEndedError):
        of.touch(key)


def test_time_in_which_a_quota_makes_its_producer_wait_does_not_count(of: Coordinator) -> None:
    key = of.init()
    assert of.throttled(key, 5000) == [], "it is not open"
    of.join(key, P0)
    of.now_s += 50
    of.throttled(key, 20_000)
    of.throttled(key, 20_000)  # Another leader tells of the same time.
    of.now_s += 10
    of.throttled(key, 20_000)  # Of that time 10 s were not told before.
    of.now_s += 29
    assert of.expire() == []
    of.now_s += 1.1
    assert of.expire() == ["id"]
    assert of.throttled(key, 5000) == [], "it has ended"


def test_no_quota_keeps_a_transaction_for_longer_than_an_hour(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0)
    for _ in range(61):
        of.throttled(key, 59_000)
        assert of.expire() == []
        of.now_s += 59
    of.now_s += 61
    assert of.expire() == ["id"]


def test_no_touch_keeps_a_transaction_for_longer_than_an_hour(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0)
    for _ in range(61):
        of.touch(key)
        assert of.expire() == []
        of.now_s += 59
    of.touch(key)
    of.now_s += 1
    assert of.expire() == ["id"]


def test_a_new_coordinator_grants_a_touched_transaction_a_whole_timeout(of: Coordinator) -> None:
    key = of.init()
    of.join(key, P0)
    of.touch(key)
    for _ in range(20):
        of.now_s += 50
        of.touch(key)
    of.fail_over()
    assert of.expire() == []
    of.now_s += 59
    assert of.expire() == []
    of.now_s += 1
    assert of.expire() == ["id"]


def test_time_in_which_nobody_is_heard_does_not_count(of: Coordinator) -> None:
    of.join(of.init(timeout_ms=1000), P0)
    of.now_s += 10
    changes.prolong(of.state, 9.5)
    assert of.expire() == []
    of.now_s += 0.5
    assert of.expire() == ["id"]


def test_unused_ids_go_after_a_week_unless_they_have_names_or_markers_out(of: Coordinator) -> None:
    of.end(of.init(name="named"), transactional_id="named", name="n")
    busy = of.init(name="busy")
    of.join(busy, P0)
    of.end(busy, transactional_id="busy")
    unused = of.init(name="unused")
    of.now_s += 6 * DAY_MS / 1000
    of.init(name="used lately")
    of.now_s += 2 * DAY_MS / 1000
    of.apply(changes.forget_unused(of.state, now_ms=of.now_ms))
    assert set(of.state.ids) == {"named", "busy", "used lately"}
    with pytest.raises(TransactionEndedError):
        of.join(unused, P0)
    again = of.init(name="unused")
    assert again.family != unused.family
