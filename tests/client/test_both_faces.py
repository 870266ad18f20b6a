"""What holds of a class for threads holds of its async twin: each test runs over both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rayq.client.cluster import Cluster
from rayq.errors import ClosedError, OutcomeUnknownError, TimeoutError
from rayq.wire.messages import Produce
from tests.client.faces import Faces, wait
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture(params=["threads", "async"])
def faces(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Faces]:
    made = Faces(cluster, is_async=request.param == "async")
    yield made
    made.close()


# --- the end of a producer ------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [0, 0.1])
def test_close_says_of_each_record_whether_it_may_be_written(
    faces: Faces, fake: FakeCluster, timeout_s: float
) -> None:
    fake.create_topic("t", partitions=2)
    fake.move_leader("t", 1, None)
    producer = faces.make("producer", max_in_flight_requests_per_connection=1)
    wait(producer.send("t", b"warm", partition=0), faces)
    fake.fault(Produce, times=1000, is_lost=True)
    sent = [producer.send_many("t", [b"v"] * 2, partition=0)]
    unsent = [producer.send("t", b"v", partition=1) for _ in range(3)]
    with pytest.raises(TimeoutError) as told:
        producer.close(timeout_s)
    assert "close: 5 records were not delivered" in str(told.value)
    assert "3 of them are not written. 2 were sent" in str(told.value)
    assert "flush" not in str(told.value)
    for future in sent:
        with pytest.raises(OutcomeUnknownError, match="may or may not be written") as unknown:
            wait(future, faces)
        assert "not written" not in str(unknown.value)
    for future in unsent:
        with pytest.raises(ClosedError, match="It was not written"):
            wait(future, faces)
    producer.close()
