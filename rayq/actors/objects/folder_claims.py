"""Check of the objects that this cluster may write and delete: its own, and those it took over.

Object names come from metadata, manifests and lists, and the object server has rights to the whole
bucket. So each object that is changed must have a rayq name, in the folder of this cluster or in a
folder that has this cluster's mark. `rayq topic restore` leaves that mark before it restores a
topic from another cluster's folder; from then on the other cluster stores and deletes nothing
there.
"""

from __future__ import annotations

from collections.abc import Iterable

from rayq.actors.objects.store_client import StoreClient
from rayq.environment import Clock
from rayq.errors import InvalidRequestError, RemoteStorageError
from rayq.messages.remote_names import (
    TAKEOVER_EPOCH,
    is_owner_mark_of,
    owner_mark,
    owners_prefix,
    parse_name,
    takeover_mark,
)

CLAIM_S = 60.0
"""Time for which a mark that was seen counts."""


class FolderClaims:
    """See the module."""

    def __init__(self, clock: Clock, client: StoreClient, cluster_id: str) -> None:
        self._clock = clock
        self._client = client
        self._cluster_id = cluster_id
        self._seen_s: dict[str, float] = {}
        """Time at which this cluster's mark was seen in a cluster's folder, by cluster id."""

    async def check(self, names: Iterable[str]) -> None:
        """Raises InvalidRequestError for a name that is not a partition's object, and
        RemoteStorageError for an object in another cluster's folder."""
        foreign_ids = set()
        for name in names:
            parsed = parse_name(name)
            if parsed is None:
                raise InvalidRequestError(
                    f"{name!r} is not the name of an object of rayq's: it is not written or "
                    "deleted."
                )
            if parsed.cluster_id != self._cluster_id:
                foreign_ids.add(parsed.cluster_id)
        for cluster_id in sorted(foreign_ids):
            await self._check_taken_over(cluster_id)

    async def check_blob(self, name: str) -> None:
        """Does `check`, but the name may also be a mark of this cluster."""
        if not is_owner_mark_of(self._cluster_id, name):
            await self.check([name])

    async def _check_taken_over(self, cluster_id: str) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._seen_s.get(cluster_id, -CLAIM_S) < CLAIM_S:
            return
        prefix, mark = owners_prefix(cluster_id), takeover_mark(cluster_id, self._cluster_id)
        latest = await self._client.list(prefix, owner_mark(cluster_id, TAKEOVER_EPOCH, ""))
        if [meta.name for meta in latest] != [mark]:
            names = [meta.name.removeprefix(prefix) for meta in latest]
            raise RemoteStorageError(
                f"The objects in the folder {cluster_id} are of another cluster, and are neither "
                f"written nor deleted: `rayq topic restore` takes them over by the mark {mark}, "
                f"and beside the other cluster's own there are the marks {names} now."
            )
        fresh = {seen_id: at_s for seen_id, at_s in self._seen_s.items() if now_s - at_s < CLAIM_S}
        self._seen_s = {**fresh, cluster_id: now_s}
