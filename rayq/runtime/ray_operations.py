"""What operators do to the brokers of a running cluster on Ray, one at a time."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rayq.errors import RayqError, UnknownBrokerError
from rayq.runtime.ray_runtime import NAMESPACE, START_TIMEOUT_S, broker_name

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
RESTART_TIMEOUT_S = 120.0
POLL_S = 0.1


def restart_broker(cluster_name: str, broker: int) -> None:
    """Stops a broker and its replica processes in a controlled way and has Ray start it again where
    it was, with the software that is installed there now. Returns once the new process has its
    session; the replicas catch up after that.

    One that does not stop by itself is killed: its replica processes go on then, and come under the
    new process. Raises UnknownBrokerError (no such broker in this Ray), RayqError (it does not come
    back).
    """
    actor = _broker_actor(cluster_name, broker)
    before = _pid(actor)
    try:
        ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
    except RayError as error:
        logger.warning("broker %d did not stop by itself, it is killed: %s", broker, error)
    ray.kill(actor, no_restart=False)
    deadline_s = time.monotonic() + RESTART_TIMEOUT_S
    while not _is_back(actor, before):
        if time.monotonic() > deadline_s:
            raise RayqError(
                f"Broker {broker} was stopped and is not back after {RESTART_TIMEOUT_S:.0f} s: see "
                f"`ray list actors` for {broker_name(cluster_name, broker)}, and its log below the "
                "Ray session's directory on its node."
            )
        time.sleep(POLL_S)


def _broker_actor(cluster_name: str, broker: int) -> Any:
    try:
        return ray.get_actor(broker_name(cluster_name, broker), namespace=NAMESPACE)
    except ValueError:
        raise UnknownBrokerError(
            f"No broker {broker} of cluster {cluster_name!r} runs in this Ray; see "
            "`rayq cluster info`."
        ) from None


def _pid(actor: Any) -> int | None:
    """The process of an actor; None while it has none that answers."""
    try:
        pid: int = ray.get(actor.__ray_call__.remote(_own_pid), timeout=START_TIMEOUT_S)
    except (RayActorError, GetTimeoutError):
        return None
    return pid


def _own_pid(_actor: object) -> int:
    return os.getpid()


def _is_back(actor: Any, before: int | None) -> bool:
    """Whether another process than `before` runs and is registered with the controller."""
    try:
        if _pid(actor) in (None, before):
            return False
        return bool(ray.get(actor.is_registered.remote(), timeout=START_TIMEOUT_S))
    except (RayActorError, GetTimeoutError):
        return False
