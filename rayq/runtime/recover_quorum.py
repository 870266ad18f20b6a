"""After the loss of a majority of the voters' directories: one broker's copy of the metadata
becomes the whole truth. Offline, on the directories themselves; the last resort.

What it costs: metadata that only the lost voters had agreed on is gone. The surviving copy may lack
the newest topics, changes and elections. Records are another matter: each partition is as good as
the replicas that are left of it.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    ProducerIdsAllocated,
    Voter,
    VotersChanged,
    decode_entry,
    decode_records,
    encode_record,
)
from rayq.core.cluster.remote_changes import doubt_everything
from rayq.core.cluster.state import ClusterState
from rayq.core.cluster.topic_changes import INTERNAL_PREFIX
from rayq.environment import Environment
from rayq.errors import DirectoryInUseError, InvalidRequestError
from rayq.runtime.layout import Directory, find_directories, metadata_path, of_one_cluster
from rayq.storage.data_directory import BROKER_LOCK, DataDirectory, lock_holder, read_meta
from rayq.storage.metadata_log import MetadataLog

EPOCH_LEAP = 1000
"""The new epoch is so much higher than any that is known here. A majority of the old voters, taken
for lost, may come back with promises of their own: this log is then the better one wherever the two
meet, and theirs is cut (docs/protocol.md, rules 3 and 4)."""
PRODUCER_ID_LEAP = 1 << 26
FAMILY_LEAP = 1 << 20
"""Numbers that the lost voters had granted since this copy was written must not be granted again:
leader epochs leap by `EPOCH_LEAP`, producer ids and families by these. A replica that is away may
hold batches of an epoch that is not known here; batches under an id that is used twice would pass
for retries. There are 2^32 families: so there is room for thousands of recoveries."""
READ_BYTES_MAX = 1 << 30


class Survivor(NamedTuple):
    """A directory that is left, and how far its copy of the metadata goes."""

    directory: Directory
    epoch: int
    last_index: int
    voters: tuple[Voter, ...]
    """The voters that this copy knows."""

    @property
    def is_voter(self) -> bool:
        own = (self.directory.broker, self.directory.directory_id)
        return any((voter.broker, voter.directory_id) == own for voter in self.voters)


class RecoveredQuorum(NamedTuple):
    """The result: `directory` is the only voter now, under controller epoch `epoch`."""

    directory: Directory
    epoch: int
    record_index: int
    voters_before: tuple[Voter, ...]
    topics: int
    """Number of topics without rayq's own."""


def survivors(environment: Environment, path: str) -> list[Survivor]:
    """The directories at `path` (one broker's, or the one above), the copy that goes furthest
    first. Where other machines have some too, recover from the one with the greatest (epoch,
    index). Changes nothing. Raises InvalidRequestError where there is none, StorageError,
    UnsupportedFormatError."""
    found = []
    for directory in _directories(environment, path):
        log = MetadataLog.inspect(environment.disk, metadata_path(directory.path))
        state = _state(log)
        found.append(Survivor(directory, log.last_epoch, log.last_index, state.voters))
    return sorted(
        found,
        key=lambda survivor: (survivor.epoch, survivor.last_index, survivor.is_voter),
        reverse=True,
    )


def recover_quorum(environment: Environment, path: str) -> RecoveredQuorum:
    """Makes the broker of `path` the only voter, in a new epoch and marked as unclean. Others join
    as voters again once they have a session. All brokers must be stopped.

    Raises DirectoryInUseError where a broker runs, also on a directory beside the one that `path`
    names; InvalidRequestError where `path` holds no data of a broker, or a majority of the voters
    is there or beside it (then nothing needs to be recovered: start them), or the copy is empty;
    StorageError where the copy itself is damaged.
    """
    beside = _beside(environment, _directories(environment, path))
    for neighbour in beside:
        _check_idle(environment, neighbour)
    best = survivors(environment, path)[0]
    _check_needed(beside, best.voters)
    directory = DataDirectory.open(environment, best.directory.path)
    try:
        log = MetadataLog.open(environment.disk, metadata_path(best.directory.path))
        try:
            state = _state(log)
            epoch = max(log.promised_epoch, log.last_epoch) + EPOCH_LEAP
            first = log.last_index + 1
            voter = Voter(directory.meta.broker, directory.meta.directory_id)
            # The one that makes the directory the only voter comes last. A crash on the way leaves
            # a promise and gaps between epochs, which do no harm; run it once more.
            records = [*_leaps(state), VotersChanged((voter,), clean=False)]
            log.promise(epoch)
            log.append(
                [(first + at, epoch, encode_record(record)) for at, record in enumerate(records)]
            )
            index = log.last_index
        finally:
            log.close()
        users_topics = sum(not name.startswith(INTERNAL_PREFIX) for name in state.topic_ids)
    finally:
        directory.close()
    return RecoveredQuorum(
        directory=best.directory,
        epoch=epoch,
        record_index=index,
        voters_before=best.voters,
        topics=users_topics,
    )


def _leaps(state: ClusterState) -> list[MetadataRecord]:
    """Returns records that leave room for everything granted that this copy does not know of."""
    records: list[MetadataRecord] = [
        ProducerIdsAllocated(
            state.next_producer_id + PRODUCER_ID_LEAP,
            (state.next_family or state.next_producer_id) + FAMILY_LEAP,
        )
    ]
    for topic, number, partition in state.all_partitions():
        value = partition.value
        if value.leader_epoch > 0:
            value = msgspec.structs.replace(
                value,
                leader_epoch=value.leader_epoch + EPOCH_LEAP,
                partition_epoch=value.partition_epoch + 1,
            )
            records.append(PartitionChanged(topic.topic_id, number, value))
    return [*records, *doubt_everything(state)]


def _directories(environment: Environment, path: str) -> list[Directory]:
    meta = read_meta(environment.disk, path)
    if meta is not None:
        return [Directory(meta.broker, path, meta.cluster_id, meta.directory_id)]
    found = of_one_cluster(find_directories(environment, path), path)
    if not found:
        raise InvalidRequestError(
            f"{path} holds no broker's directory: name a directory such as DIR/broker-0, or DIR as "
            "given to `rayq start`."
        )
    return found


def _beside(environment: Environment, directories: list[Directory]) -> list[Directory]:
    """These directories, and all others of their cluster in the same place. To recover from one of
    three that are there would lose what the other two have agreed on since."""
    found = {directory.path: directory for directory in directories}
    root = directories[0].path.rpartition("/")[0] or "/"
    for directory in find_directories(environment, root):
        if directory.cluster_id == directories[0].cluster_id:
            found[directory.path] = directory
    return list(found.values())


def _state(log: MetadataLog) -> ClusterState:
    """All that the copy holds, committed or not: the voters that knew the difference are lost."""
    state = ClusterState()
    if log.snapshot_data is not None:
        for record in decode_records(log.snapshot_data):
            state.replay(record)
    for _, _, data in log.read(log.first_index, READ_BYTES_MAX):
        for record in decode_entry(data):
            state.replay(record)
    return state


def _check_idle(environment: Environment, directory: Directory) -> None:
    holder = lock_holder(environment.disk, f"{directory.path}/{BROKER_LOCK}")
    if holder is not None:
        raise DirectoryInUseError(
            f"{directory.path} is in use by process {holder.pid}: stop all brokers first. While "
            "brokers run, the metadata may still have its majority."
        )


def lost_voters(directories: list[Directory], voters: tuple[Voter, ...]) -> list[int]:
    """The voters whose directories are not among these."""
    here = {(directory.broker, directory.directory_id) for directory in directories}
    return [voter.broker for voter in voters if (voter.broker, voter.directory_id) not in here]


def _check_needed(directories: list[Directory], voters: tuple[Voter, ...]) -> None:
    if not voters:
        raise InvalidRequestError(
            f"{directories[0].path} holds no metadata: recover from another broker's directory."
        )
    left = len(voters) - len(lost_voters(directories, voters))
    if left > len(voters) // 2:
        raise InvalidRequestError(
            f"Nothing to recover: {left} of the {len(voters)} voters' directories are here, a "
            "majority. Start the cluster with them; where some are damaged, move them away first."
        )
