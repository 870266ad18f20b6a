"""The admin of a cluster: `AsyncAdmin`, and `Admin` for threads.

Once a change returns, every later call sees it, whichever broker answers.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rayq.client.admin.access import AccessAdmin
from rayq.client.admin.audit import AuditAdmin
from rayq.client.admin.brokers import BrokerAdmin
from rayq.client.admin.capacity import CapacityAdmin
from rayq.client.admin.groups import GroupAdmin
from rayq.client.admin.moves import MoveAdmin
from rayq.client.admin.queues import QueueAdmin
from rayq.client.admin.quotas import QuotaAdmin
from rayq.client.admin.remote import RemoteAdmin
from rayq.client.admin.topics import TopicAdmin
from rayq.client.admin.transactions import TransactionAdmin
from rayq.client.background import BackgroundLoop
from rayq.client.client import Client
from rayq.client.user_objects import no_pickle_error

P = ParamSpec("P")
T = TypeVar("T")


class AdminCore:
    """The inner half of an async admin (see `finalizers`): its hold on the shared client."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        self._on_closed = on_closed

    def unsent_count(self) -> int:
        return 0

    async def leave(self, _timeout_s: float | None) -> None:
        self.close()

    def loop_has_ended(self) -> None:
        self.close()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._on_closed()


# The reference shows the methods of the last class first.
class AsyncAdmin(
    CapacityAdmin,
    AuditAdmin,
    QuotaAdmin,
    AccessAdmin,
    QueueAdmin,
    RemoteAdmin,
    TransactionAdmin,
    GroupAdmin,
    BrokerAdmin,
    MoveAdmin,
    TopicAdmin,
):
    """The admin of the cluster on the running event loop, made by `cluster.async_admin()`. Its
    methods are those of `Admin`, as coroutines. Use it as an async context manager, or call
    `close`."""

    def __init__(self, client: Client, core: AdminCore | None = None) -> None:
        super().__init__(client, awaits_callbacks=core is not None)  # otherwise for `Admin`
        self._core = core

    async def close(self) -> None:
        """Gives its connections back. Idempotent. Calls in flight may fail."""
        if self._core is not None:
            self._core.close()

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "an async admin")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


def _blocking(
    method: Callable[Concatenate[AsyncAdmin, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Admin, P], T]:
    """Makes a method of `Admin` that runs the coroutine of a method of `AsyncAdmin`, and waits for
    it. It has the signature and documentation of that method; `docs/hooks/reference.py` shows it in
    the reference."""

    @functools.wraps(method)
    def call(admin: Admin, /, *args: P.args, **kwargs: P.kwargs) -> T:
        client, background = admin._shared()
        return background.run(method(AsyncAdmin(client), *args, **kwargs))

    call.__qualname__ = f"Admin.{method.__name__}"
    return call


class Admin:
    """The admin of the cluster from any thread, `cluster.admin`. Its methods are those of
    `AsyncAdmin`, and each returns when it is done.

    Every call that asks servers takes `timeout_s` and raises TimeoutError when that time has
    passed; a change may still take effect afterwards. Within that time a change whose answer was
    lost is requested again; it happens once.
    """

    def __init__(self, shared: Callable[[], tuple[Client, BackgroundLoop]]) -> None:
        self._shared = shared

    create_topic = _blocking(AsyncAdmin.create_topic)
    delete_topic = _blocking(AsyncAdmin.delete_topic)
    list_topics = _blocking(AsyncAdmin.list_topics)
    describe_topic = _blocking(AsyncAdmin.describe_topic)
    create_partitions = _blocking(AsyncAdmin.create_partitions)
    alter_topic_config = _blocking(AsyncAdmin.alter_topic_config)
    describe_cluster = _blocking(AsyncAdmin.describe_cluster)
    delete_records = _blocking(AsyncAdmin.delete_records)
    list_groups = _blocking(AsyncAdmin.list_groups)
    describe_group = _blocking(AsyncAdmin.describe_group)
    set_group_offsets = _blocking(AsyncAdmin.set_group_offsets)
    delete_group = _blocking(AsyncAdmin.delete_group)
    list_transactions = _blocking(AsyncAdmin.list_transactions)
    describe_transaction = _blocking(AsyncAdmin.describe_transaction)
    abort_transaction = _blocking(AsyncAdmin.abort_transaction)
    find_hanging_transactions = _blocking(AsyncAdmin.find_hanging_transactions)
    abort_hanging_transaction = _blocking(AsyncAdmin.abort_hanging_transaction)
    elect_leaders = _blocking(AsyncAdmin.elect_leaders)
    reassign_partitions = _blocking(AsyncAdmin.reassign_partitions)
    set_replication_factor = _blocking(AsyncAdmin.set_replication_factor)
    list_reassignments = _blocking(AsyncAdmin.list_reassignments)
    cancel_reassignments = _blocking(AsyncAdmin.cancel_reassignments)
    plan_drain = _blocking(AsyncAdmin.plan_drain)
    drain_broker = _blocking(AsyncAdmin.drain_broker)
    undrain_broker = _blocking(AsyncAdmin.undrain_broker)
    plan_spread = _blocking(AsyncAdmin.plan_spread)
    remove_broker = _blocking(AsyncAdmin.remove_broker)
    describe_object_store = _blocking(AsyncAdmin.describe_object_store)
    describe_remote_storage = _blocking(AsyncAdmin.describe_remote_storage)
    verify_remote = _blocking(AsyncAdmin.verify_remote)
    unpin = _blocking(AsyncAdmin.unpin)
    read_audit = _blocking(AsyncAdmin.read_audit)
    create_queue = _blocking(AsyncAdmin.create_queue)
    alter_queue = _blocking(AsyncAdmin.alter_queue)
    delete_queue = _blocking(AsyncAdmin.delete_queue)
    list_queues = _blocking(AsyncAdmin.list_queues)
    describe_queue = _blocking(AsyncAdmin.describe_queue)
    describe_queues = _blocking(AsyncAdmin.describe_queues)
    list_queue_records = _blocking(AsyncAdmin.list_queue_records)
    purge_queue = _blocking(AsyncAdmin.purge_queue)
    move_queue_records = _blocking(AsyncAdmin.move_queue_records)
    discard_queue_records = _blocking(AsyncAdmin.discard_queue_records)
    create_principal = _blocking(AsyncAdmin.create_principal)
    delete_principal = _blocking(AsyncAdmin.delete_principal)
    list_principals = _blocking(AsyncAdmin.list_principals)
    describe_principal = _blocking(AsyncAdmin.describe_principal)
    describe_principals = _blocking(AsyncAdmin.describe_principals)
    create_token = _blocking(AsyncAdmin.create_token)
    rotate_token = _blocking(AsyncAdmin.rotate_token)
    revoke_token = _blocking(AsyncAdmin.revoke_token)
    revoke_tokens = _blocking(AsyncAdmin.revoke_tokens)
    list_tokens = _blocking(AsyncAdmin.list_tokens)
    create_acls = _blocking(AsyncAdmin.create_acls)
    delete_acls = _blocking(AsyncAdmin.delete_acls)
    list_acls = _blocking(AsyncAdmin.list_acls)
    check_acl = _blocking(AsyncAdmin.check_acl)
    set_quota = _blocking(AsyncAdmin.set_quota)
    remove_quota = _blocking(AsyncAdmin.remove_quota)
    list_quotas = _blocking(AsyncAdmin.list_quotas)
    describe_quotas = _blocking(AsyncAdmin.describe_quotas)
    plan = _blocking(AsyncAdmin.plan)
    check_plan = _blocking(AsyncAdmin.check_plan)
