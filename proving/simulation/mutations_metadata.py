"""Planted bugs of the answers about metadata: what voters confirm and what controllers say."""

from __future__ import annotations

from typing import Any

import msgspec

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq import messages
from rayq.actors.broker.metadata_answers import MetadataAnswers
from rayq.actors.broker.placed_replicas import PlacedReplicas
from rayq.actors.controller.controller import Controller
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.core.cluster import state as cluster_state
from rayq.core.cluster.records import BrokerCordoned, BrokerFenced, RequestDone, TopicConfigChanged
from rayq.core.cluster.state import ClusterState
from rayq.errors import RayqError


@plants("3", "a voter that finds other records in its place appends behind them", "metadata")
def previous_record_not_compared() -> list[Patch]:
    append = MetadataKeeper.append

    async def mutated(self: Any, request: Any, payload: Any) -> Any:
        held = self._epoch_at(request.previous_index)
        if request.previous_index and held is not None:
            request = msgspec.structs.replace(request, previous_epoch=held)
        return await append(self, request, payload)

    return [(MetadataKeeper, "append", mutated)]


@plants("3", "a repeated change is answered before it is committed", "metadata")
def repetition_answered_at_once() -> list[Patch]:
    handle = Controller.handle

    async def mutated(self: Any, request: Any) -> Any:
        if isinstance(request, messages.Change) and request.request_id in self.state.requests_done:
            return messages.ChangeResponse(self._quorum.last_index)
        return await handle(self, request)

    return [(Controller, "handle", mutated)]


@plants("3", "a refusal does not wait until what it is based on is committed", "metadata")
def refusal_answered_at_once() -> list[Patch]:
    decide = Controller._decide
    handle = Controller.handle

    async def mutated(self: Any, request: Any) -> Any:
        if isinstance(request, messages.CreateTopic | messages.DeleteTopic):
            try:
                decide(self, request)
            except RayqError:
                if request.request_id not in self.state.requests_done:
                    raise
        return await handle(self, request)

    return [(Controller, "handle", mutated)]


@plants("3", "a change that is repeated is made again", "metadata")
def repetitions_forgotten() -> list[Patch]:
    def mutated(self: Any, record: RequestDone) -> None:
        pass

    replay: dict[Any, Any] = dict(cluster_state._REPLAY)
    replay[RequestDone] = mutated
    return [(cluster_state, "_REPLAY", replay)]


@plants("3", "a snapshot forgets which brokers have no session", "metadata")
def sessions_left_out_of_snapshots() -> list[Patch]:
    snapshot = ClusterState.snapshot

    def mutated(self: Any) -> Any:
        left_out = (BrokerFenced, BrokerCordoned)
        return [record for record in snapshot(self) if not isinstance(record, left_out)]

    return [(ClusterState, "snapshot", mutated)]


@plants("17", "clients are told a topic's old config until something else changes", "metadata")
def old_config_told() -> list[Patch]:
    forget = MetadataAnswers.forget

    def mutated(self: Any, records: Any) -> None:
        kept = (TopicConfigChanged, RequestDone)
        if records is None or not all(isinstance(record, kept) for record in records):
            forget(self, records)

    return [(MetadataAnswers, "forget", mutated)]


@plants("17", "a start puts directories aside by the metadata of its last snapshot", "metadata")
def put_aside_by_old_metadata() -> list[Patch]:
    return [(PlacedReplicas, "is_current", property(lambda self: True))]
