"""Addresses of brokers, as users write them and as rayq shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayq.client.arguments import shown
from rayq.environment import Address
from rayq.errors import ConfigError

DEFAULT_PORT = 9392


def parse_addresses(addresses: Any) -> list[Address]:
    """The addresses that a user gave: one, or several. Raises ConfigError, TypeError."""
    if isinstance(addresses, bytes) or not isinstance(addresses, Iterable):
        raise TypeError(f"Addresses are a list of host:port, not {shown(addresses)}.")
    given = [addresses] if isinstance(addresses, str) else addresses
    return [parse_address(address) for address in given]


def parse_address(address: str | Address) -> Address:
    """Reads `host:port`, `[IPv6 address]:port`, a host alone (the port is DEFAULT_PORT), or a pair.
    Raises ConfigError, TypeError."""
    if isinstance(address, tuple) and len(address) == 2 and isinstance(address[0], str):
        host, port = address[0], str(address[1])
    elif isinstance(address, str):
        host, colon, port = address.strip().rpartition(":")
        if not colon or port.endswith("]"):
            host, port = address.strip(), str(DEFAULT_PORT)
        host = host.removeprefix("[").removesuffix("]")
    else:
        raise TypeError(f"An address is a str, host:port, not {type(address).__name__}.")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(
            f"{address!r} is no address: give host:port, such as node1:{DEFAULT_PORT}."
        )
    return host, int(port)


def format_address(address: Address) -> str:
    """What `parse_address` reads."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
