"""TLS with certificates on both sides."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import trustme

from rayq.config import ClusterConfig
from rayq.errors import AuthenticationError, ConfigError, DisconnectedError
from rayq.messages import ProduceResponse
from rayq.wire.network import AsyncioNetwork


def issue(directory: Path, ca: trustme.CA, name: str) -> ClusterConfig:
    """A config whose files hold a certificate for `name`, signed by the CA."""
    directory.mkdir(exist_ok=True)
    certificate = ca.issue_cert(name)
    paths = {kind: str(directory / f"{kind}.pem") for kind in ("certificate", "key", "ca")}
    for number, blob in enumerate(certificate.cert_chain_pems):
        blob.write_to_path(paths["certificate"], append=number > 0)
    certificate.private_key_pem.write_to_path(paths["key"])
    ca.cert_pem.write_to_path(paths["ca"])
    return ClusterConfig(
        tls_certificate=paths["certificate"], tls_key=paths["key"], tls_ca=paths["ca"]
    )


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def other_ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def config(tmp_path: Path, ca: trustme.CA) -> ClusterConfig:
    return issue(tmp_path / "node", ca, "127.0.0.1")


def test_requests_go_over_mutual_tls(
    run: Any, wire: Any, make_produce: Any, config: ClusterConfig
) -> None:
    async def scenario() -> None:
        client = await wire.connect(await wire.serve(config=config), config=config)
        for size in (0, 1000, 65_536, 3_000_000):
            _, payload = await client.request(make_produce(), b"x" * size, timeout_s=60)
            assert payload == b"x" * size
        futures = [client.request(make_produce(n), bytes(n * 100), timeout_s=60) for n in range(300)]
        for number, future in enumerate(futures):
            response, payload = await future
            assert (response.base_offset, len(payload)) == (number, number * 100)

    run(scenario)


def test_the_in_flight_limit_holds_over_tls_and_loses_nothing(
    run: Any, wire: Any, make_produce: Any, config: ClusterConfig
) -> None:
    async def scenario() -> None:
        at_once = most = 0

        async def slow(peer: Any, request: Any, payload: memoryview) -> Any:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            return ProduceResponse(request.partition, 0, 0)

        limited = dataclasses.replace(config, max_requests_in_flight=4)
        client = await wire.connect(await wire.serve(slow, limited), config=limited)
        futures = [client.request(make_produce(n), bytes(n * 50), timeout_s=60) for n in range(300)]
        assert [(await future)[0].base_offset for future in futures] == list(range(300))
        assert most <= 4

    run(scenario)


def test_a_client_of_another_ca_is_refused(
    run: Any, wire: Any, config: ClusterConfig, other_ca: trustme.CA, tmp_path: Path
) -> None:
    foreign = issue(tmp_path / "foreign", other_ca, "127.0.0.1")
    assert config.tls_ca is not None
    trusting = dataclasses.replace(foreign, tls_ca=config.tls_ca)

    async def scenario() -> None:
        server = await wire.serve(config=config)
        with pytest.raises(AuthenticationError, match="TLS"):
            await wire.connect(server, config=foreign)  # this client does not trust the server
        with pytest.raises((AuthenticationError, DisconnectedError)):
            await wire.connect(server, config=trusting)  # the server does not trust this client
        await wire.connect(server, config=config)

    run(scenario)


def test_a_certificate_for_another_host_is_refused_unless_asked_for(
    run: Any, wire: Any, ca: trustme.CA, tmp_path: Path
) -> None:
    elsewhere = issue(tmp_path / "elsewhere", ca, "elsewhere.example")
    lenient = dataclasses.replace(elsewhere, tls_check_hostname=False)

    async def scenario() -> None:
        server = await wire.serve(config=elsewhere)
        with pytest.raises(AuthenticationError, match=r"127\.0\.0\.1"):
            await wire.connect(server, config=elsewhere)
        await wire.connect(server, config=lenient)

    run(scenario)


def test_tls_on_one_side_only_is_an_error_that_says_so(
    run: Any, wire: Any, config: ClusterConfig
) -> None:
    async def scenario() -> None:
        with_tls, without = await wire.serve(config=config), await wire.serve()
        with pytest.raises(DisconnectedError, match="TLS on both sides"):
            await wire.connect(with_tls)
        with pytest.raises((AuthenticationError, DisconnectedError)):
            await wire.connect(without, config=config)

    run(scenario)


def test_unusable_files_are_a_config_error(config: ClusterConfig, tmp_path: Path) -> None:
    missing = dataclasses.replace(config, tls_key=str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        AsyncioNetwork(missing)
