"""acks="all" and `min_insync_replicas`; retries of batches that were written already."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rayq.actors.replica.replica_host import ReplicaHost
from rayq.errors import (
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    RayqError,
    UnknownProducerError,
)
from rayq.messages import Produce
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from tests.local.support import (
    FAST,
    eventually,
    partition_of,
    produce_raw,
    read_all,
    values,
    wait_in_sync,
)


def batch(value: bytes, **numbers: int) -> bytearray:
    return encode_batch([value], timestamps_ms=1000, **numbers)


def test_below_min_insync_a_write_is_refused_before_the_append(fragile: LocalCluster) -> None:
    fragile.create_topic("t", min_insync_replicas=3)
    produce_raw(fragile, "t", batch(b"0"))
    (follower, *_) = [one for one in partition_of(fragile, "t").isr if one != _leader(fragile)]
    fragile.kill_broker(follower)
    eventually(lambda: len(partition_of(fragile, "t").isr) == 2, "it left the in-sync set")
    with pytest.raises(NotEnoughReplicasError, match="needs min_insync_replicas = 3"):
        produce_raw(fragile, "t", batch(b"refused"))
    # acks=1 does not need min_insync_replicas; the record is readable once the follower is back.
    produce_raw(fragile, "t", batch(b"1"), acks=1)
    with fragile.producer(delivery_timeout_ms=3000) as producer:
        with pytest.raises(RayqError, match="min_insync_replicas"):
            producer.send("t", b"refused too").result(60)
        fragile.start_broker(follower)
        wait_in_sync(fragile, "t")
        with pytest.raises(RayqError, match="not delivered"):
            producer.flush()
        producer.send("t", b"2").result(60)
    assert values(read_all(fragile, "t")) == [b"0", b"1", b"2"]


def test_a_set_that_shrinks_after_the_append_leaves_the_outcome_unknown(tmp_path: Path) -> None:
    with LocalCluster(3, data_dir=tmp_path, **FAST | {"session_timeout_ms": 4000}) as cluster:
        cluster.create_topic("t", min_insync_replicas=3)
        with cluster.producer() as producer:
            producer.send("t", b"0").result(60)
            follower = next(
                one for one in partition_of(cluster, "t").isr if one != _leader(cluster)
            )
            cluster.kill_broker(follower)
            # The follower's session has not ended: the leader appends and waits for it.
            future = producer.send("t", b"1")
            with pytest.raises(NotEnoughReplicasAfterAppendError, match="may or may not"):
                produce_raw(cluster, "t", batch(b"2"))
            cluster.start_broker(follower)
            assert future.result(60).offset == 1
        assert values(read_all(cluster, "t")) == [b"0", b"1", b"2"]


def _leader(cluster: LocalCluster) -> int | None:
    return partition_of(cluster, "t").leader


def test_the_same_numbered_batch_is_appended_once(cluster: LocalCluster, topic: str) -> None:
    first = produce_raw(cluster, topic, batch(b"0", producer_id=77, base_sequence=0))
    again = produce_raw(cluster, topic, batch(b"0", producer_id=77, base_sequence=0))
    assert (first.base_offset, again.base_offset) == (0, 0)
    assert first.append_time_ms == again.append_time_ms
    assert (
        produce_raw(cluster, topic, batch(b"1", producer_id=77, base_sequence=1)).base_offset == 1
    )
    with pytest.raises(OutOfOrderSequenceError):
        produce_raw(cluster, topic, batch(b"3", producer_id=77, base_sequence=3))
    with pytest.raises(UnknownProducerError):
        produce_raw(cluster, topic, batch(b"x", producer_id=78, base_sequence=5))
    produce_raw(cluster, topic, batch(b"2", producer_id=77, producer_epoch=1, base_sequence=0))
    with pytest.raises(ProducerFencedError):
        produce_raw(cluster, topic, batch(b"x", producer_id=77, base_sequence=2))
    assert values(read_all(cluster, topic)) == [b"0", b"1", b"2"]


def test_a_producer_whose_answers_are_lost_appends_once_and_in_order(
    fragile: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third answer is lost; the records were appended all the same."""
    original = ReplicaHost._handle
    lock = threading.Lock()
    produced = 0

    def lossy(self: ReplicaHost, peer: Any, request: Any, payload: Any) -> Any:
        nonlocal produced
        result = original(self, peer, request, payload)
        if isinstance(request, Produce):
            with lock:
                produced += 1
                if produced % 3 == 1:
                    return asyncio.get_running_loop().create_future()
        return result

    # A server binds the method at its start, so this acts on processes that start from now on.
    monkeypatch.setattr(ReplicaHost, "_handle", lossy)
    fragile.create_topic("lossy")
    with fragile.producer(request_timeout_ms=300, batch_size=500) as producer:
        futures = [producer.send("lossy", b"%03d" % number) for number in range(150)]
        producer.flush(timeout_s=60)
    assert produced > 5
    assert [future.result(0).offset for future in futures] == list(range(150))
    assert values(read_all(fragile, "lossy")) == [b"%03d" % number for number in range(150)]
