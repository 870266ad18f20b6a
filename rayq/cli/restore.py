"""`rayq topic restore`: restores a topic from the object store alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, DryRun, Json
from rayq.cli.topics import Configs
from rayq.cli.values import config_values
from rayq.config import TopicConfig
from rayq.errors import InvalidRequestError
from rayq.runtime import restore_topic as restoring
from rayq.runtime.object_store import open_store
from rayq.runtime.restore_topic import StoredTopic


def restore(
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC", help="The topic. Default: only list the topics in the store."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="The URL of the objects. This machine's credentials are used.",
            show_default="the cluster's remote_storage_url",
        ),
    ] = None,
    credentials: Annotated[
        str | None,
        typer.Option(
            "--credentials",
            metavar="FILE",
            help="As the config remote_storage_credentials: lines of NAME=value, of mode 0600.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="The name of the restored topic.", show_default="the same"
        ),
    ] = None,
    topic_id: Annotated[
        str | None,
        typer.Option(
            "--topic-id", metavar="ID", help="The topic's id, if several topics have the name."
        ),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Copy the objects, and leave the originals to their cluster."),
    ] = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            "-r",
            "--replicas",
            "--replication-factor",
            help="Replicas of each partition.",
            min=1,
            show_default="as before",
        ),
    ] = None,
    config: Configs = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Restore a topic from the object store alone, and show the offsets up to which it goes.

    The new topic takes the objects over: another cluster that has them stores and deletes nothing
    from then on, and must not be used any more (or give --copy). Retention waits for 24 hours.
    Producers are not remembered, nor are positions of groups.
    """
    check_can_ask(yes or dry_run or topic is None)
    values = config_values(TopicConfig, config or ())
    with connected(cluster) as connection:
        client, background = connection.shared_client()
        own_url = background.run(restoring.cluster_store_url(client))
        url = source or own_url
        store = open_store(url, client.environment, credentials=credentials)
        with output.waiting(f"Looking for topics in {url}"):
            found = background.run(restoring.find_topics(store))
        if topic is None:
            used = background.run(restoring.used_prefixes(client))
            _list(found, used, json=json)
            return
        chosen = _chosen(found, topic, topic_id, url)
        if not copy and url.rstrip("/") != own_url.rstrip("/"):
            raise InvalidRequestError(
                f"The objects are in {url}, and this cluster has its own in {own_url}: --copy "
                f"copies them, or start the cluster with remote_storage_url={url}."
            )
        with output.waiting(f"Checking the objects of {topic}"):
            chosen = background.run(restoring.check_topic(store, chosen))
        if not json:
            _show(chosen)
        if not dry_run:
            agree(_question(chosen, name or topic, copy=copy), yes)
            objects = sum(len(manifest.objects) for manifest in chosen.manifests.values())
            target = open_store(own_url, client.environment, credentials=credentials)
            with output.progress("copying", objects, wanted=copy) as advance:
                background.run(
                    restoring.restore_topic(
                        client,
                        store,
                        chosen,
                        name or topic,
                        config=values,
                        replication_factor=replicas,
                        copy_to=target if copy else None,
                        on_progress=advance,
                    )
                )
    if json:
        rows = [partition._asdict() for partition in restoring.described(chosen)]
        output.print_json({"topic": name or topic, "restored": not dry_run, "partitions": rows})
    elif dry_run:
        output.say("Nothing was changed: run it without --dry-run to restore.")
    else:
        output.say(f"Restored topic {name or topic}. Retention begins in 24 hours.")


def _chosen(
    found: list[StoredTopic], topic: str, topic_id: str | None, url: str
) -> StoredTopic:
    named = [
        stored for stored in found if stored.name == topic and topic_id in (None, stored.topic_id)
    ]
    if not named:
        names = ", ".join(sorted({stored.name for stored in found})) or "none"
        raise InvalidRequestError(f"There is no topic {topic!r} in {url}; there are: {names}.")
    if len(named) > 1:
        ids = ", ".join(f"{stored.topic_id} of cluster {stored.cluster_id}" for stored in named)
        raise InvalidRequestError(
            f"{len(named)} topics {topic!r} are in {url}: choose one by --topic-id, of {ids}."
        )
    return named[0]


def _list(found: list[StoredTopic], used: Mapping[str, str], *, json: bool) -> None:
    rows = [_overview(stored, used) for stored in found]
    if json:
        output.print_json(rows)
        return
    output.table(
        ("topic", "topic id", "cluster", "partitions", "size", "stored last", "used by"),
        [
            (
                row["topic"],
                row["topic_id"],
                row["cluster_id"],
                row["partitions"],
                output.human_size(row["size_bytes"]),
                output.moment(row["written_ms"]),
                row["used_by"],
            )
            for row in rows
        ],
        optional=("cluster", "partitions"),
    )


def _overview(topic: StoredTopic, used: Mapping[str, str]) -> dict[str, Any]:
    manifests = topic.manifests.values()
    return {
        "topic": topic.name,
        "topic_id": topic.topic_id,
        "cluster_id": topic.cluster_id,
        "partitions": topic.partitions,
        "size_bytes": sum(manifest.data_bytes for manifest in manifests),
        "written_ms": max(manifest.written_ms for manifest in manifests),
        "used_by": next((used[each.prefix] for each in manifests if each.prefix in used), None),
    }


def _show(topic: StoredTopic) -> None:
    output.heading(f"{topic.name} ({topic.topic_id}) of cluster {topic.cluster_id}")
    output.table(
        ("partition", "start", "end", "size", "last append"),
        [
            (
                partition.partition,
                partition.start_offset,
                partition.end_offset,
                output.human_size(partition.data_bytes),
                output.moment(partition.last_append_ms),
            )
            for partition in restoring.described(topic)
        ],
    )
    output.say("Records from `end` on were not in the object store, and are not restored.")


def _question(topic: StoredTopic, name: str, *, copy: bool) -> str:
    if copy:
        return f"Restore it as {name} from a copy of its objects?"
    return (
        f"Restore it as {name}? It takes the objects over: cluster {topic.cluster_id} must not use "
        "them any more, unless this is the same cluster."
    )
