"""Decisions about transactions, record by record, and their bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayq.core.transactions import changes
from rayq.core.transactions.records import (
    IdRecord,
    IdValue,
    Outcome,
    Record,
    TransactionKey,
    TransactionRecord,
    TransactionValue,
)
from rayq.core.transactions.state import TransactionState
from rayq.errors import (
    AlreadyCommittedError,
    AuthorizationError,
    CoordinatorLoadingError,
    InvalidRequestError,
    ProducerFencedError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from rayq.messages.transaction_ids import EPOCH_MAX
from tests.pure import transaction_requests
from tests.pure.test_transaction_changes import DAY_MS, P0, P1, P2, Coordinator

replace = msgspec.structs.replace
NOW_MS = 1_000_000
"""When a coordinator's clock begins."""
KEY = TransactionKey(9, 5)
NEXT = TransactionKey(9, 6)
VALUE = IdValue("a", 60_000, KEY, 7, Outcome(TransactionKey(9, 4), True), "n", ("z",))
OPEN = TransactionValue("id", "open", 400_000, frozenset({P0, P1}))


def made_of(*records: Record) -> Coordinator:
    of = Coordinator()
    of.apply(list(records))
    return of


def begun(value: IdValue = VALUE, transaction: TransactionValue | None = OPEN) -> Coordinator:
    """One id, and its present transaction."""
    if transaction is None:
        return made_of(IdRecord("id", value))
    return made_of(IdRecord("id", value), TransactionRecord(KEY, transaction))


def end(of: Coordinator, key: TransactionKey = KEY, owner: str = "a", **how: Any) -> list[Record]:
    how = {"is_commit": True, "name": None, **how}
    return transaction_requests.end(of.state, "id", owner, key, **how, now_ms=of.now_ms)


def init(
    of: Coordinator, owner: str, timeout_ms: int = 5_000, name: str = "id", **who: Any
) -> list[Record]:
    return transaction_requests.init_producer(
        of.state, name, owner, transaction_timeout_ms=timeout_ms, now_ms=of.now_ms, **who
    )


# --- owners ---------------------------------------------------------------------------------------


def test_a_new_id_takes_one_of_the_families_in_hand() -> None:
    of = Coordinator()
    of.state.families = [3, 4]
    assert init(of, "a") == [IdRecord("id", IdValue("a", 5_000, TransactionKey(4, 0), NOW_MS))]
    assert of.state.families == [3]


@pytest.mark.parametrize("state", [None, "open", "sealed"])
def test_a_new_owner_is_written_with_the_end_of_what_was_open(state: Any) -> None:
    transaction = None if state is None else replace(OPEN, state=state)
    of = begun(transaction=transaction)
    changed = IdValue("b", 5_000, NEXT, NOW_MS, Outcome(KEY, False), "n", ("z", "a"))
    expected: list[Record] = [IdRecord("id", changed)]
    if transaction is not None:
        expected.append(TransactionRecord(KEY, replace(OPEN, state="aborting")))
    assert init(of, "b") == expected


def test_the_same_owner_changes_nothing_and_a_former_one_is_fenced() -> None:
    of = begun()
    assert init(of, "a", 7_000) == []
    with pytest.raises(ProducerFencedError, match="Another producer has the transactional id 'id'"):
        init(of, "z")


def test_a_family_belongs_to_the_principal_that_owns_its_id() -> None:
    of = Coordinator()
    of.state.families = [4]
    of.apply(init(of, "a", principal="orders"))
    value = of.state.ids["id"]
    assert value.principal == "orders"
    assert init(of, "a", principal="orders") == []
    # A superuser's repetition, and a new owner, of another principal that may write to the id.
    assert init(of, "a") == [IdRecord("id", replace(value, principal=None))]
    of.apply(init(of, "b", principal="billing"))
    taken = of.state.ids["id"]
    assert taken.principal == "billing" and taken.next == value.next._replace(epoch=1)
    assert join_as(of, taken.next, "billing")
    with pytest.raises(AuthorizationError):
        join_as(of, taken.next, "orders")


def join_as(of: Coordinator, key: TransactionKey, principal: str | None) -> list[Record]:
    return transaction_requests.join(
        of.state, key, P0, now_s=0, now_ms=of.now_ms, principal=principal
    )


@pytest.mark.parametrize("transaction", [None, OPEN, replace(OPEN, state="sealed")])
def test_only_its_principal_and_superusers_write_in_a_transaction(transaction: Any) -> None:
    of = begun(replace(VALUE, principal="orders"), transaction)
    for stranger in ("billing", "order", "superuser"):
        with pytest.raises(AuthorizationError, match=f"'{stranger}' may not write") as refused:
            join_as(of, KEY, stranger)
        assert "'id'" not in str(refused.value), "a family can be guessed, a name is not told"
    assert (KEY in of.state.transactions) == (transaction is not None)
    if transaction is not None and transaction.state == "sealed":
        return
    for writer in ("orders", None):
        assert join_as(of, KEY, writer)
    with pytest.raises(AuthorizationError):
        join_as(begun(VALUE, transaction), KEY, "orders")  # A superuser's.


def test_a_stranger_prolongs_no_transaction() -> None:
    of = begun(replace(VALUE, principal="orders"))
    of.state.deadlines_s[KEY] = 10.0
    with pytest.raises(AuthorizationError):
        transaction_requests.throttled(
            of.state, KEY, 5_000, now_s=0, now_ms=of.now_ms, principal="billing"
        )
    assert of.state.deadlines_s[KEY] == 10.0
    transaction_requests.throttled(
        of.state, KEY, 5_000, now_s=0, now_ms=of.now_ms, principal="orders"
    )
    assert of.state.deadlines_s[KEY] == 15.0


def test_the_ten_latest_former_owners_are_known() -> None:
    of = Coordinator()
    for number in range(12):
        of.init(f"o{number}")
    former = tuple(f"o{number}" for number in range(1, 11))
    assert of.state.ids["id"].former_owners == former
    for owner in former:
        with pytest.raises(ProducerFencedError):
            of.init(owner)
    of.init("o0")
    assert of.state.ids["id"].owner == "o0", "that one is forgotten"


@pytest.mark.parametrize(
    "timeout_ms, is_taken", [(999, False), (1_000, True), (900_000, True), (900_001, False)]
)
@pytest.mark.parametrize("owner", ["a", "b"])
def test_a_time_out_is_one_second_to_fifteen_minutes(
    owner: str, timeout_ms: int, is_taken: bool
) -> None:
    of = begun()
    if is_taken:
        init(of, owner, timeout_ms)
        return
    with pytest.raises(InvalidRequestError, match=f"1000 to 900000, not {timeout_ms}"):
        init(of, owner, timeout_ms)


def test_the_last_of_all_ids_finds_room() -> None:
    assert changes.IDS_MAX == 100_000
    of = begun()
    of.state.ids.update((f"id{number}", VALUE) for number in range(99_998))
    of.state.families = [1, 2]
    of.apply(init(of, "a", name="last"))
    with pytest.raises(TransactionLimitError, match="has 100000 transactional ids"):
        init(of, "a", name="more")
    assert of.state.families == [1], "no family is lost"
    init(of, "b", name="id1")


@pytest.mark.parametrize(
    "epoch, needs", [(0, False), (EPOCH_MAX - 1, False), (EPOCH_MAX, True), (None, True)]
)
def test_a_family_is_needed_for_a_new_id_and_after_the_last_epoch(
    epoch: int | None, needs: bool
) -> None:
    key = TransactionKey(9, 0 if epoch is None else epoch)
    of = begun(replace(VALUE, next=key), None)
    name = "other" if epoch is None else "id"
    assert changes.needs_family(of.state, name) is needs
    if needs:
        with pytest.raises(CoordinatorLoadingError, match="no producer ids in hand"):
            init(of, "b", name=name)
    of.state.families = [3]
    of.apply(init(of, "b", name=name))
    following = of.state.ids[name].next
    assert following == (TransactionKey(3, 0) if needs else TransactionKey(9, key.epoch + 1))
    assert of.state.families == ([] if needs else [3])


# --- participants ---------------------------------------------------------------------------------


def join(of: Coordinator, key: TransactionKey, participant: tuple[str, int]) -> list[Record]:
    return transaction_requests.join(of.state, key, participant, now_s=of.now_s, now_ms=of.now_ms)


def test_the_first_participant_opens_the_transaction_and_its_time() -> None:
    of = begun(transaction=None)
    opened = TransactionValue("id", "open", NOW_MS, frozenset({P2}))
    assert join(of, KEY, P2) == [TransactionRecord(KEY, opened)]
    assert of.state.deadlines_s == {KEY: 1_060.0}


@pytest.mark.parametrize("participant", [P0, P2])
def test_a_further_participant_changes_nothing_else(participant: tuple[str, int]) -> None:
    of = begun(transaction=replace(OPEN, is_touched=True))
    joined = replace(OPEN, participants=frozenset({P0, P1, participant}), is_touched=True)
    assert join(of, KEY, participant) == [TransactionRecord(KEY, joined)]
    assert of.state.deadlines_s == {}


@pytest.mark.parametrize("state", ["sealed", "committing", "aborting"])
def test_only_an_open_transaction_is_joined(state: Any) -> None:
    of = begun(transaction=replace(OPEN, state=state))
    for participant in (P0, P2):
        why = "takes no more records" if state == "sealed" else "has ended"
        with pytest.raises(TransactionEndedError, match=f"Transaction 5 of family 9 {why}"):
            join(of, KEY, participant)


@pytest.mark.parametrize("key", [TransactionKey(9, 4), NEXT, TransactionKey(8, 5)])
def test_a_transaction_that_nobody_has_open_is_not_joined(key: TransactionKey) -> None:
    of = begun(transaction=None)
    with pytest.raises(TransactionEndedError):
        join(of, key, P0)
    assert of.state.deadlines_s == {}


def test_the_last_of_all_participants_finds_room() -> None:
    assert changes.PARTICIPANTS_MAX == 10_000
    many = frozenset(("U", number) for number in range(9_999))
    of = begun(transaction=replace(OPEN, participants=many))
    of.apply(join(of, KEY, P0))
    with pytest.raises(TransactionLimitError, match="at most 10000 partitions; one of 'id'"):
        join(of, KEY, P1)
    assert join(of, KEY, P0)


@pytest.mark.parametrize("unfinished, is_joined", [(4, True), (5, False), (6, False)])
def test_so_many_transactions_of_an_id_may_lack_markers(unfinished: int, is_joined: bool) -> None:
    of = begun(transaction=None)
    for number in range(unfinished):
        ended = replace(OPEN, state="committing")
        of.apply([TransactionRecord(TransactionKey(8, number), ended)])
    of.apply([TransactionRecord(TransactionKey(7, 0), replace(OPEN, transactional_id="other"))])
    if is_joined:
        assert join(of, KEY, P0)
        return
    with pytest.raises(TransactionOrderError, match="5 earlier transactions of 'id'"):
        join(of, KEY, P0)


# --- touches and seals ----------------------------------------------------------------------------


def test_the_first_touch_is_kept_and_each_begins_the_time_out_again() -> None:
    of = begun(transaction=replace(OPEN, start_ms=NOW_MS - 20_000))
    touched = replace(OPEN, start_ms=NOW_MS - 20_000, is_touched=True)
    assert of.touch(KEY) == [TransactionRecord(KEY, touched)]
    assert of.state.deadlines_s == {KEY: 1_060.0}
    of.now_s += 30
    assert of.touch(KEY) == []
    assert of.state.deadlines_s == {KEY: 1_090.0}


@pytest.mark.parametrize("passed_s, left_s", [(0, 60), (3_540, 60), (3_541, 59), (3_600, 0)])
def test_all_touches_together_keep_a_transaction_for_an_hour(passed_s: int, left_s: int) -> None:
    of = begun(transaction=replace(OPEN, start_ms=NOW_MS - passed_s * 1_000))
    of.touch(KEY)
    assert of.state.deadlines_s == {KEY: 1_000.0 + left_s}


@pytest.mark.parametrize("state", [None, "open"])
def test_a_seal_keeps_who_takes_part(state: Any) -> None:
    of = begun(transaction=None if state is None else OPEN)
    sealed = (
        TransactionValue("id", "sealed", NOW_MS, frozenset())
        if state is None
        else replace(OPEN, state="sealed")
    )
    assert of.seal(KEY) == [TransactionRecord(KEY, sealed)]
    assert of.seal(KEY) == []


@pytest.mark.parametrize("does", ["touch", "seal"])
@pytest.mark.parametrize(
    "transactional_id, owner, key, error",
    [
        ("id", "b", KEY, ProducerFencedError),
        ("id", "a", NEXT, TransactionEndedError),
        ("id", "a", TransactionKey(9, 4), TransactionEndedError),
        ("other", "a", KEY, TransactionEndedError),
    ],
)
def test_only_the_owner_s_present_transaction_is_touched_or_sealed(
    does: str, transactional_id: str, owner: str, key: TransactionKey, error: type[Exception]
) -> None:
    of = begun()
    now = {"now_ms": NOW_MS} if does == "seal" else {"now_ms": NOW_MS, "now_s": 1_000.0}
    with pytest.raises(error):
        getattr(transaction_requests, does)(of.state, transactional_id, owner, key, **now)
    assert of.state.deadlines_s == {}


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "is_commit, name, is_committed, last_name",
    [
        (True, None, True, "n"),
        (True, "m", True, "m"),
        (True, "n", False, "n"),
        (False, None, False, "n"),
        (False, "m", False, "n"),
        (False, "n", False, "n"),
    ],
)
def test_an_end_is_written_with_the_id_that_goes_on(
    is_commit: bool, name: str | None, is_committed: bool, last_name: str
) -> None:
    of = begun()
    changed = replace(
        VALUE, next=NEXT, used_ms=NOW_MS, last=Outcome(KEY, is_committed), last_name=last_name
    )
    decided = replace(OPEN, state="committing" if is_committed else "aborting")
    records = end(of, is_commit=is_commit, name=name)
    assert records == [IdRecord("id", changed), TransactionRecord(KEY, decided)]
    of.apply(records)
    assert end(of, is_commit=not is_commit) == [], "it has ended"
    how = {"is_commit": is_commit, "name": name}
    if is_commit and not is_committed:
        with pytest.raises(AlreadyCommittedError, match="of 'id' with the name 'n' is committed"):
            transaction_requests.ended(of.state, "id", "a", KEY, **how)
    else:
        assert transaction_requests.ended(of.state, "id", "a", KEY, **how) == (is_committed, NEXT)
        assert transaction_requests.ended(of.state, "id", "b", KEY, **how) == (is_committed, KEY)
    asked = {"is_commit": True, "name": None}
    assert transaction_requests.ended(of.state, "id", "a", KEY, **asked) == (is_committed, NEXT)


def test_a_transaction_that_its_name_s_owner_aborted_is_told_as_such() -> None:
    of = begun()
    of.apply(end(of, is_commit=False))
    for is_commit, name in ((False, "n"), (True, "m"), (True, None)):
        how = {"is_commit": is_commit, "name": name}
        assert transaction_requests.ended(of.state, "id", "a", KEY, **how) == (False, NEXT)
    with pytest.raises(AlreadyCommittedError):
        transaction_requests.ended(of.state, "id", "a", KEY, is_commit=True, name="n")


@pytest.mark.parametrize("transaction", [None, replace(OPEN, participants=frozenset(), state="sealed")])
def test_where_nobody_took_part_nothing_is_left_to_mark(transaction: TransactionValue | None) -> None:
    of = begun(transaction=transaction)
    changed = replace(VALUE, next=NEXT, used_ms=NOW_MS, last=Outcome(KEY, True))
    expected: list[Record] = [IdRecord("id", changed)]
    if transaction is not None:
        expected.append(TransactionRecord(KEY, None))
    assert end(of) == expected


@pytest.mark.parametrize(
    "owner, key, error",
    [
        ("b", KEY, ProducerFencedError),
        ("b", NEXT, ProducerFencedError),
        ("a", NEXT, TransactionEndedError),
        ("a", TransactionKey(9, 3), TransactionEndedError),
        ("a", TransactionKey(8, 5), TransactionEndedError),
    ],
)
def test_nobody_ends_another_transaction_than_the_owner_s_present_one(
    owner: str, key: TransactionKey, error: type[Exception]
) -> None:
    with pytest.raises(error):
        end(begun(), key, owner)


def test_an_id_that_never_ended_anything_has_a_first_end() -> None:
    of = begun(replace(VALUE, last=None, last_name=None))
    changed = replace(
        VALUE, next=NEXT, used_ms=NOW_MS, last=Outcome(KEY, True), last_name=None
    )
    assert end(of)[0] == IdRecord("id", changed)


@pytest.mark.parametrize(
    "state, is_aborted",
    [("open", True), ("sealed", True), ("committing", False), ("aborting", False), (None, False)],
)
def test_an_abort_by_others_writes_what_any_abort_does(state: Any, is_aborted: bool) -> None:
    of = begun(transaction=None if state is None else replace(OPEN, state=state))
    changed = replace(VALUE, next=NEXT, used_ms=NOW_MS, last=Outcome(KEY, False))
    aborted = [
        IdRecord("id", changed), TransactionRecord(KEY, replace(OPEN, state="aborting")),
    ]
    assert of.abort(KEY) == (aborted if is_aborted else [])


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start_s, is_touched, left_s",
    [
        (1_000, False, 60),
        (960, False, 20),
        (946, False, 6),
        (945, False, 5),
        (900, False, 5),
        (1_100, False, 60),
        (900, True, 60),
        (-2_545, True, 55),
        (-2_600, True, 5),
    ],
)
def test_a_new_coordinator_grants_what_is_left_and_five_seconds_at_least(
    start_s: int, is_touched: bool, left_s: int
) -> None:
    of = begun(transaction=replace(OPEN, start_ms=start_s * 1_000, is_touched=is_touched))
    assert changes.expired(of.state, now_s=500.0, now_ms=NOW_MS) == []
    assert of.state.deadlines_s == {KEY: 500.0 + left_s}
    of.state.deadlines_s[KEY] = 500.5
    assert changes.expired(of.state, now_s=500.4, now_ms=NOW_MS) == []
    assert changes.expired(of.state, now_s=500.5, now_ms=NOW_MS) == [KEY]
    assert of.state.deadlines_s == {KEY: 500.5}


def test_what_is_decided_has_no_time_and_does_not_hide_the_others() -> None:
    of = begun()
    of.apply([
        TransactionRecord(TransactionKey(9, 1), replace(OPEN, state="committing")),
        TransactionRecord(TransactionKey(9, 2), replace(OPEN, state="aborting")),
        TransactionRecord(TransactionKey(9, 9), replace(OPEN, state="sealed")),
    ])
    assert changes.expired(of.state, now_s=0.0, now_ms=NOW_MS) == []
    assert set(of.state.deadlines_s) == {KEY, (9, 9)}
    changes.prolong(of.state, 2.5)
    assert set(of.state.deadlines_s.values()) == {7.5}
    assert changes.expired(of.state, now_s=7.5, now_ms=NOW_MS) == [KEY, (9, 9)]


@pytest.mark.parametrize(
    "value, used_before_ms, has_open, is_forgotten",
    [
        (VALUE, 7 * DAY_MS + 1, False, False),
        (replace(VALUE, last_name=None), 7 * DAY_MS, False, False),
        (replace(VALUE, last_name=None), 7 * DAY_MS + 1, False, True),
        (replace(VALUE, last_name=None), 7 * DAY_MS + 1, True, False),
    ],
)
def test_an_id_without_a_name_is_forgotten_after_a_week(
    value: IdValue, used_before_ms: int, has_open: bool, is_forgotten: bool
) -> None:
    of = begun(replace(value, used_ms=5_000), OPEN if has_open else None)
    of.apply([IdRecord("other", replace(VALUE, next=TransactionKey(8, 0), used_ms=10**13))])
    records = changes.forget_unused(of.state, now_ms=5_000 + used_before_ms)
    assert records == ([IdRecord("id", None)] if is_forgotten else [])


# --- markers and outcomes -------------------------------------------------------------------------


def test_a_transaction_waits_for_the_marker_of_each_participant() -> None:
    of = begun(transaction=replace(OPEN, state="committing"))
    assert changes.unmarked(of.state, KEY) == {P0, P1}
    for _ in range(2):
        assert changes.marker_written(of.state, KEY, P1) == []
        assert changes.unmarked(of.state, KEY) == {P0}
    assert changes.marker_written(of.state, KEY, P0) == [TransactionRecord(KEY, None)]
    assert of.state.written == {KEY: {P0, P1}}
    of.apply([TransactionRecord(KEY, None)])
    assert of.state.written == {}


@pytest.mark.parametrize(
    "transaction, key, outcome",
    [
        *((state, KEY, state) for state in ("open", "sealed", "committing", "aborting")),
        (None, KEY, "unknown"),
        (None, TransactionKey(9, 4), "committed"),
        ("open", TransactionKey(9, 4), "committed"),
        (None, TransactionKey(9, 3), "unknown"),
        (None, TransactionKey(8, 4), "unknown"),
        (None, TransactionKey(7, 4), "aborted"),
        (None, TransactionKey(6, 4), "unknown"),
    ],
)
def test_what_is_known_of_an_outcome(transaction: Any, key: TransactionKey, outcome: str) -> None:
    of = begun(transaction=None if transaction is None else replace(OPEN, state=transaction))
    aborted = Outcome(TransactionKey(7, 4), False)
    of.apply([
        IdRecord("other", replace(VALUE, next=TransactionKey(7, 5), last=aborted)),
        IdRecord("new", replace(VALUE, next=TransactionKey(6, 4), last=None)),
    ])
    assert changes.outcome(of.state, key) == outcome


# --- the state ------------------------------------------------------------------------------------


def test_each_record_sets_what_it_names_and_its_tombstone_ends_it() -> None:
    of = begun()
    later, other = TransactionKey(10, 0), replace(VALUE, next=TransactionKey(11, 2))
    of.apply([IdRecord("id", replace(VALUE, next=later)), IdRecord("other", other)])
    assert of.state.ids == {"id": replace(VALUE, next=later), "other": other}
    keys = (KEY, later, TransactionKey(10, 1), TransactionKey(11, 2))
    assert [of.state.id_of(key) for key in keys] == [None, "id", None, "other"]
    assert of.state.last_of_family(9) is None
    assert of.state.last_of_family(11) == VALUE.last
    of.apply([IdRecord("id", None), IdRecord("id", None)])
    assert of.state.ids == {"other": other}
    assert (of.state.id_of(later), of.state.last_of_family(10)) == (None, None)
    assert of.state.transactions == {KEY: OPEN}
    of.apply([TransactionRecord(KEY, None), TransactionRecord(KEY, None)])
    assert of.state.transactions == {} and of.state.under_way("id") == []


@pytest.mark.parametrize(
    "later, has_deadline, has_written",
    [
        (replace(OPEN, is_touched=True), True, True),
        (replace(OPEN, state="sealed"), True, True),
        (replace(OPEN, state="committing"), False, True),
        (replace(OPEN, state="aborting"), False, True),
        (None, False, False),
    ],
)
def test_a_decided_transaction_has_no_deadline_and_a_forgotten_one_no_markers(
    later: TransactionValue | None, has_deadline: bool, has_written: bool
) -> None:
    of = begun()
    of.state.deadlines_s = {KEY: 1.0, NEXT: 2.0}
    of.state.written = {KEY: {P0}, NEXT: {P1}}
    of.apply([TransactionRecord(KEY, later)])
    assert of.state.deadlines_s == ({KEY: 1.0, NEXT: 2.0} if has_deadline else {NEXT: 2.0})
    assert of.state.written == ({KEY: {P0}, NEXT: {P1}} if has_written else {NEXT: {P1}})


def test_the_transactions_of_an_id_are_told_oldest_first() -> None:
    state = TransactionState()
    for key, start_ms, name in (
        ((9, 2), 30, "id"), ((3, 0), 40, "id"), ((9, 1), 30, "id"), ((8, 7), 10, "id"), ((1, 1), 0, "x"),
    ):
        value = replace(OPEN, start_ms=start_ms, transactional_id=name)
        for _ in range(2):
            state.replay(TransactionRecord(TransactionKey(*key), value))
    assert state.under_way("id") == [(8, 7), (9, 1), (9, 2), (3, 0)]
    state.replay(TransactionRecord(TransactionKey(9, 1), None))
    assert state.under_way("id") == [(8, 7), (9, 2), (3, 0)]
    assert state.under_way("x") == [(1, 1)]
    assert state.under_way("nobody") == []
    for key in list(state.transactions):
        state.replay(TransactionRecord(key, None))
    assert state._of_id == {}, "ids whose transactions ended take no room"
