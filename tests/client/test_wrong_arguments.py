"""What users get who give the wrong thing: an error that says what to give, from the call itself."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from ray import cloudpickle

from rayq.client.cluster import Cluster
from tests.client.fake_broker import FakeCluster


def test_what_stays_in_its_process_says_what_to_send(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    producer = cluster.producer()

    async def make() -> list[object]:
        return [cluster.async_producer(), cluster.async_consumer("t")]

    kept = [producer, cluster.consumer("t"), *asyncio.run(make())]
    for library in (pickle, cloudpickle):
        for made in (*kept, producer.send):
            with pytest.raises(TypeError, match=r"send the Cluster, and make a \w+ from it there"):
                library.dumps(made)
        for future in (producer.send("t", b"v"), producer.send_many("t", [b"v"])):
            with pytest.raises(TypeError, match=r"send its result\(\) instead"):
                library.dumps(future)
        admin = pickle.loads(library.dumps(cluster.admin))
        assert admin.list_topics() == ["t"]
