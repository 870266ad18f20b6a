"""Principals by TLS certificates that the clients' authority has signed."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import rayq
from rayq import Acl, Cluster
from rayq.config import ClusterConfig
from rayq.errors import AuthenticationError, AuthorizationError, ConfigError, RayqError
from rayq.testing import LocalCluster
from rayq.wire.certificates import CertificatePrincipals
from tests.local.support import FAST, eventually, read_all, values

LATER = datetime.timedelta(days=1)


def subject(names: Sequence[str]) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])


class Authority:
    """An authority of a test's own, with its certificate in a file."""

    def __init__(self, path: Path, name: str) -> None:
        path.mkdir(exist_ok=True)
        self._key, self._name, self._path = ec.generate_private_key(ec.SECP256R1()), name, path
        self.file = str(path / f"{name}.pem")
        self._write(self.file, self._signed([name], self._key, is_authority=True))

    def issue(self, file: str, names: Sequence[str], uris: Sequence[str] = ()) -> dict[str, str]:
        """The TLS fields of a program with a new certificate, except `tls_ca`."""
        key = ec.generate_private_key(ec.SECP256R1())
        at = str(self._path / file)
        self._write(f"{at}.pem", self._signed(names, key, uris))
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        Path(f"{at}.key").write_bytes(private)
        return {"tls_certificate": f"{at}.pem", "tls_key": f"{at}.key"}

    def _signed(
        self,
        names: Sequence[str],
        key: ec.EllipticCurvePrivateKey,
        uris: Sequence[str] = (),
        *,
        is_authority: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject(names))
            .issuer_name(subject([self._name]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - LATER)
            .not_valid_after(now + LATER)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )
        alternatives = [x509.DNSName("localhost"), *map(x509.UniformResourceIdentifier, uris)]
        if not is_authority:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        return builder.sign(self._key, hashes.SHA256())

    @staticmethod
    def _write(path: str, certificate: x509.Certificate) -> None:
        Path(path).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


@pytest.fixture
def nodes(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "nodes")


@pytest.fixture
def people(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "people")


@pytest.fixture(params=["san_uri", "cn"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def secure(
    tmp_path: Path, nodes: Authority, people: Authority, kind: Any
) -> Iterator[LocalCluster]:
    with LocalCluster(
        1,
        data_dir=tmp_path / "data",
        **FAST,
        **nodes.issue("node", ["node"]),
        tls_ca=nodes.file,
        tls_check_hostname=False,
        tls_client_ca=people.file,
        tls_principals=kind,
    ) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def nobody_has_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYQ_TOKEN", raising=False)
    monkeypatch.setenv("RAYQ_HOME", str(tmp_path / "home"))


ANNA = {"san_uri": "spiffe://example.com/anna", "cn": "anna"}


def login(cluster: LocalCluster, nodes: Authority, shown: dict[str, str], **more: Any) -> Cluster:
    return rayq.connect(
        cluster.addresses[0], **shown, tls_ca=nodes.file, tls_check_hostname=False, **more
    )


def named(kind: str, authority: Authority, file: str, name: str) -> dict[str, str]:
    """A certificate that names a principal at the place, and another at the other place."""
    return (
        authority.issue(file, ["other"], [name])
        if kind == "san_uri"
        else authority.issue(file, [name], ["spiffe://example.com/other"])
    )


def test_a_certificate_of_the_clients_authority_is_its_principal_without_a_token(
    secure: LocalCluster, nodes: Authority, people: Authority, kind: str
) -> None:
    anna = ANNA[kind]
    shown = named(kind, people, "anna", anna)
    with login(secure, nodes, shown) as connection:
        with pytest.raises(AuthenticationError, match=f"rayq principal create {anna}"):
            connection.admin.list_topics(timeout_s=5)
        secure.admin.create_principal(anna)
        secure.admin.create_acls(Acl(anna, "allow", "all", "topic", "hers"))
        connection.create_topic("hers")
        with connection.producer() as producer:
            producer.send("hers", b"v").result(60)
        assert values(read_all(connection, "hers")) == [b"v"]
        with pytest.raises(AuthorizationError, match=f"Principal '{anna}' may not create"):
            connection.create_topic("others")
        with pytest.raises(ConfigError, match="has no token"):
            _ = connection.token
        secure.admin.delete_principal(anna)

        def is_refused() -> bool:
            try:
                connection.admin.list_topics(timeout_s=5)
            except (AuthenticationError, AuthorizationError):
                return True
            return False

        eventually(is_refused, "the connection of a principal that is gone")


def test_a_token_wins_over_the_certificate(
    secure: LocalCluster, nodes: Authority, people: Authority, kind: str
) -> None:
    shown = named(kind, people, "anna", ANNA[kind])
    for name in (ANNA[kind], "ben"):
        secure.admin.create_principal(name)
    ben = secure.admin.create_token("ben").token
    for token, name in ((ben, "ben"), (None, ANNA[kind])):
        with login(secure, nodes, shown, token=token) as connection:
            assert connection.admin.list_principals() == [name]
    with login(secure, nodes, shown, token=secure.token) as connection:
        connection.create_topic("t")


def test_only_the_clients_authority_names_principals(
    secure: LocalCluster, nodes: Authority, people: Authority, kind: str, tmp_path: Path
) -> None:
    secure.admin.create_principal(ANNA[kind])
    of_a_node = named(kind, nodes, "of-a-node", ANNA[kind])
    strange = named(kind, Authority(tmp_path / "elsewhere", "people"), "s", ANNA[kind])
    nobody = people.issue("nobody", ["a", "b"], ["spiffe://a", "spiffe://b"])
    superuser = people.issue("superuser", ["superuser"], ["superuser"])
    for shown, error, text in (
        (of_a_node, AuthenticationError, "no TLS certificate that tls_client_ca"),
        (nobody, AuthenticationError, "names one principal as tls_principals says"),
        (superuser, AuthenticationError, "names one principal as tls_principals says"),
        (strange, RayqError, "TLS"),
    ):
        with login(secure, nodes, shown) as connection, pytest.raises(error, match=text):
            connection.admin.list_topics(timeout_s=5)
    with login(secure, nodes, of_a_node, token=secure.token) as connection:
        connection.admin.list_topics()


def test_a_principals_certificate_cannot_pose_as_a_server(
    nodes: Authority, people: Authority
) -> None:
    shown = people.issue("anna", ["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown["tls_certificate"], shown["tls_key"])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        def pose() -> None:
            while True:
                try:
                    connected, _ = listening.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError):
                    context.wrap_socket(connected, server_side=True).close()

        posing = threading.Thread(target=pose, daemon=True)
        posing.start()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        config = {**nodes.issue("n", ["n"]), "tls_ca": nodes.file, "tls_check_hostname": False}
        with (
            rayq.connect(address, token="rayq-" + "A" * 43, **config) as connection,
            pytest.raises(RayqError, match="certificate verify failed"),
        ):
            connection.admin.list_topics(timeout_s=2)
        listening.shutdown(socket.SHUT_RDWR)
    posing.join(10)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tls_client_ca": None}, "set together"),
        ({"tls_principals": None}, "set together"),
        ({"tls_ca": None, "tls_certificate": None, "tls_key": None}, "need TLS"),
        ({"tls_client_ca": "nodes.pem"}, "has the name of one of tls_ca"),
        ({"tls_client_ca": "node.pem"}, "no certificate of an authority"),
        ({"tls_client_ca": "missing.pem"}, r"missing\.pem"),
    ],
)
def test_files_that_could_not_tell_principals_from_nodes_are_refused(
    tmp_path: Path, nodes: Authority, people: Authority, given: dict[str, Any], text: str
) -> None:
    config: dict[str, Any] = {
        **nodes.issue("node", ["node"]),
        "tls_ca": nodes.file,
        "tls_client_ca": people.file,
        "tls_principals": "cn",
    }
    config |= {key: name and str(tmp_path / name) for key, name in given.items()}
    with pytest.raises(ConfigError, match=text):
        CertificatePrincipals(ClusterConfig(**config))
