"""Named principals in a whole cluster: they connect by a token, and may what ACLs allow."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import rayq
from rayq import Cluster
from rayq.errors import AuthenticationError, AuthorizationError, ConfigError
from rayq.testing import LocalCluster
from tests.local.principal_support import Named
from tests.local.support import eventually


def test_a_principal_changes_what_it_may_and_is_told_what_it_may_not(
    cluster: LocalCluster, topic: str
) -> None:
    anna = Named(cluster, ("create", "topic", f"of-{topic}"))
    with anna.connect() as connection:
        connection.create_topic(f"of-{topic}")
        for change, command in (
            (lambda: connection.admin.delete_topic(topic), f"delete topic {topic}"),
            (lambda: connection.create_topic("other"), "create topic other"),
            (lambda: connection.admin.elect_leaders(topic), "alter cluster cluster"),
        ):
            with pytest.raises(AuthorizationError) as caught:
                change()
            assert str(caught.value).startswith(f"Principal {anna.name!r} may not ")
            assert str(caught.value).endswith(f"rayq acl add {anna.name} {command}")
    assert topic in cluster.admin.list_topics()


@pytest.mark.parametrize("way", ["argument", "environment", "file"])
def test_each_way_to_give_a_token_takes_that_of_a_principal(
    cluster: LocalCluster, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna = Named(cluster)
    monkeypatch.delenv("RAYQ_TOKEN", raising=False)
    monkeypatch.setenv("RAYQ_HOME", str(tmp_path))
    text = f" {anna.token.text}\n"
    if way == "environment":
        monkeypatch.setenv("RAYQ_TOKEN", text)
    elif way == "file":
        (tmp_path / "token").write_text(text)
    given = text if way == "argument" else None
    with rayq.connect(cluster.addresses[0], token=given) as connection:
        assert connection.token == anna.token.text
        with pytest.raises(AuthorizationError, match=f"Principal '{anna.name}' may not create"):
            connection.create_topic("other")
        with pickle.loads(pickle.dumps(connection)) as again:
            assert again.token == anna.token.text
    cluster.make_current()


def test_principals_of_one_process_share_no_connection(cluster: LocalCluster, topic: str) -> None:
    anna, ben = Named(cluster, ("delete", "topic", topic)), Named(cluster)
    with anna.connect() as hers, ben.connect() as his:
        assert hers.admin.list_topics() == [topic]
        assert his.admin.list_topics() == []  # Both are connected.
        with pytest.raises(AuthorizationError, match=ben.name):
            his.admin.delete_topic(topic)
        hers.admin.delete_topic(topic)


def test_a_token_that_is_cut_or_wrong_tells_so_without_showing_itself(
    cluster: LocalCluster,
) -> None:
    anna, other = Named(cluster), Named(cluster)
    at = cluster.addresses[0]
    with pytest.raises(ConfigError, match="no token of a principal") as cut:
        rayq.connect(at, token=anna.token.text[:-1])
    assert anna.token.text[-20:-1] not in str(cut.value)
    swapped = anna.token.text.replace(anna.name, other.name)
    nobody = anna.token.text.replace(anna.name, "nobody")
    for text, name in ((swapped, other.name), (nobody, "nobody")):
        with (
            rayq.connect(at, token=text) as connection,
            pytest.raises(AuthenticationError, match=f"'{name}'.*revoked or expired") as caught,
        ):
            connection.admin.list_topics()
        assert text not in str(caught.value)
    cluster.make_current()


def test_a_client_id_that_is_none_is_refused_before_anybody_is_asked() -> None:
    for name in ("x" * 65, "a\nb"):
        with pytest.raises(ConfigError, match="client_id"):
            Cluster("127.0.0.1:1", b"key", client_id=name)


def test_a_revoked_token_ends_its_connections_and_no_others(cluster: LocalCluster) -> None:
    anna = Named(cluster)
    _, new = anna.create_token()
    with anna.connect() as old_connection, anna.connect(new) as connection:
        old_connection.admin.list_topics()
        connection.admin.list_topics()
        anna.revoke()

        def is_refused() -> bool:
            try:
                old_connection.admin.list_topics(timeout_s=5)
            except AuthenticationError:
                return True
            return False

        eventually(is_refused, "the old token is refused")
        connection.admin.list_topics()
