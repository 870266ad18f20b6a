"""Requests to a transaction coordinator, and what it decides on them."""

from __future__ import annotations

from typing import Any

from rayq import messages
from rayq.core.decision import Times
from rayq.core.transactions import changes
from rayq.core.transactions.decisions import DECISIONS
from rayq.core.transactions.records import Record, TransactionKey
from rayq.core.transactions.state import TransactionState

WHERE = ("transactions", 0, 1)
"""Topic id, partition and leader epoch of the coordinator's partition."""


def decide(
    state: TransactionState, request: Any, *, now_s: float = 0, now_ms: int = 0
) -> list[Record]:
    return [*DECISIONS[type(request)](state, request, Times(now_s, now_ms)).records]


def init_producer(
    state: TransactionState,
    name: str,
    owner: str,
    *,
    transaction_timeout_ms: int,
    now_ms: int,
    principal: str | None = None,
) -> list[Record]:
    request = messages.InitProducer(*WHERE, name, owner, transaction_timeout_ms)
    return [*changes.init_producer(state, request, Times(0, now_ms), principal).records]


def join(
    state: TransactionState,
    key: TransactionKey,
    participant: tuple[str, int],
    *,
    now_s: float,
    now_ms: int,
    principal: str | None = None,
) -> list[Record]:
    request = messages.JoinTransaction(*WHERE, *key, *participant, principal)
    return decide(state, request, now_s=now_s, now_ms=now_ms)


def touch(
    state: TransactionState,
    name: str,
    owner: str,
    key: TransactionKey,
    *,
    now_s: float,
    now_ms: int,
) -> list[Record]:
    request = messages.TouchTransaction(*WHERE, name, owner, *key)
    return decide(state, request, now_s=now_s, now_ms=now_ms)


def throttled(
    state: TransactionState,
    key: TransactionKey,
    throttle_ms: int,
    *,
    now_s: float,
    now_ms: int,
    principal: str | None = None,
) -> list[Record]:
    request = messages.ProlongTransaction(*WHERE, *key, throttle_ms, principal)
    return decide(state, request, now_s=now_s, now_ms=now_ms)


def seal(
    state: TransactionState, name: str, owner: str, key: TransactionKey, *, now_ms: int
) -> list[Record]:
    return decide(state, messages.SealTransaction(*WHERE, name, owner, *key), now_ms=now_ms)


def _end(id_: str, owner: str, key: TransactionKey, **how: Any) -> messages.EndTransaction:
    return messages.EndTransaction(*WHERE, id_, owner, *key, **how, wait_ms=0)


def end(
    state: TransactionState, id_: str, owner: str, key: TransactionKey, *, now_ms: int, **how: Any
) -> list[Record]:
    return [*changes.end(state, _end(id_, owner, key, **how), Times(0, now_ms)).records]


def ended(
    state: TransactionState, id_: str, owner: str, key: TransactionKey, **how: Any
) -> tuple[bool, TransactionKey]:
    return changes.ended(state, _end(id_, owner, key, **how))
