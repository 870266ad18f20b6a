"""Consumer pools on Ray, as any process of that Ray starts and reaches them.

`ray_pool_actors` has the actors that they run in.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolControl, PoolSpec
from rayq.errors import HandlerError, PoolExistsError, RayqError, TimeoutError, UnknownPoolError
from rayq.records import PoolStatus
from rayq.runtime.ray.lookup import NAMESPACE, actors_with, names_with
from rayq.runtime.ray.pool_actors import (
    PoolActor,
    PoolWork,
    consumer_prefix,
    consumers_of,
    in_one_line,
    pool_name,
)
from rayq.user_functions import told

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 30.0
RETRY_S = 0.2
"""While Ray starts a pool again."""
STOP_WITH_CLUSTER_S = 10.0
"""The maximum time that the stop of a cluster lets each pool's consumers finish."""
STOP_SLACK_S = 10.0
"""On top of the time that a stop is given, for the pool to say that it is done."""


class RayPool:
    """A pool as any process of its Ray reaches it; pickles."""

    def __init__(self, cluster_name: str, name: str) -> None:
        self._cluster_name = cluster_name
        self._name = name

    def status(self) -> PoolStatus:
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                status: PoolStatus = ray.get(
                    self._actor().status.remote(), timeout=ANSWER_TIMEOUT_S
                )
                return status
            except ActorDiedError as error:
                raise self._unknown() from error
            except (RayActorError, GetTimeoutError) as error:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"The consumer pool {self._name!r} has not answered for "
                        f"{ANSWER_TIMEOUT_S:.0f} s: {in_one_line(error)}"
                    ) from error
                time.sleep(RETRY_S)

    def stop(self, drain: bool, timeout_s: float) -> None:
        try:
            actor = self._actor()
        except UnknownPoolError:
            actor = None
        if actor is not None:
            try:
                ray.get(actor.stop.remote(drain, timeout_s), timeout=timeout_s + STOP_SLACK_S)
            except RayError as error:
                logger.warning("pool %r did not stop by itself: %s", self._name, error)
            ray.kill(actor)
        # A pool that died amid the stop leaves consumers behind.
        for _, consumer in consumers_of(self._cluster_name, self._name):
            ray.kill(consumer)

    def _actor(self) -> Any:
        try:
            return ray.get_actor(pool_name(self._cluster_name, self._name), namespace=NAMESPACE)
        except ValueError:
            raise self._unknown() from None

    def _unknown(self) -> UnknownPoolError:
        return UnknownPoolError(
            f"No consumer pool named {self._name!r} runs beside cluster {self._cluster_name!r}."
        )


def start_pool(cluster: Cluster, spec: PoolSpec, handler: Handler) -> PoolControl:
    """Returns when the pool has looked at its topic once. Raises PoolExistsError, HandlerError."""
    work = PoolWork(cluster, spec, _pickled(handler))
    try:
        actor: Any = (
            ray.remote(PoolActor)
            .options(
                name=pool_name(cluster.name, spec.name),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=1000,
            )
            .remote(work)
        )
    except ValueError as error:
        raise PoolExistsError(
            f"A consumer pool named {spec.name!r} runs beside cluster {cluster.name!r} already: "
            "cluster.consumer_pools() has it. Stop it, or name this one otherwise (name=)."
        ) from error
    try:
        ray.get(actor.ready.remote(), timeout=START_TIMEOUT_S)
    except RayError as error:
        ray.kill(actor)
        raise RayqError(
            f"Ray could not start the consumer pool {spec.name!r}: {in_one_line(error)}"
        ) from error
    return RayPool(cluster.name, spec.name)


def pools(cluster_name: str) -> dict[str, PoolControl]:
    """The pools that run, by name."""
    prefix = pool_name(cluster_name, "")
    return {
        name.removeprefix(prefix): RayPool(cluster_name, name.removeprefix(prefix))
        for name in names_with(prefix)
    }


def stop_pools(cluster_name: str) -> None:
    """Before their cluster stops."""
    for pool in pools(cluster_name).values():
        pool.stop(True, STOP_WITH_CLUSTER_S)
    for _, consumer in actors_with(consumer_prefix(cluster_name, "").removesuffix(":")):
        ray.kill(consumer)  # of pools that are gone


def _pickled(handler: Handler) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(handler)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise HandlerError(
            f"The handler cannot be sent to other processes: {told(error)} Make connections and "
            "locks inside of it: a class as handler is instantiated in each consumer."
        ) from error
    return pickled
