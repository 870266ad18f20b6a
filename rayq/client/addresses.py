"""Addresses of brokers, as users write them and as rayq shows them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Any

from rayq.client.arguments import shown
from rayq.environment import Address
from rayq.errors import ConfigError

DEFAULT_PORT = 9392
_IN_BRACKETS = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", re.DOTALL)
_NAME = re.compile(r"[\w.-]+")


def parse_addresses(addresses: Any) -> list[Address]:
    """Parses addresses given by a user: one text with commas between the addresses, or a list of
    addresses. Raises ConfigError, TypeError."""
    if isinstance(addresses, bytes) or not isinstance(addresses, Iterable):
        raise TypeError(f"Addresses must be a list of host:port, not {shown(addresses)}.")
    given = addresses.split(",") if isinstance(addresses, str) else addresses
    return [parse_address(address) for address in given]


def parse_address(address: str | Address) -> Address:
    """Reads `host:port`, `[IPv6 address]:port`, a host alone (the port is DEFAULT_PORT), or a pair.
    Raises ConfigError, TypeError."""
    if "@" in str(address) or "://" in str(address):
        raise ConfigError(
            "An address is host:port alone, without a scheme, a user or a password: the token is "
            "given as token=. (The address is not shown here.)"
        )
    if isinstance(address, tuple) and len(address) == 2 and isinstance(address[0], str):
        host, port = address[0], str(address[1])
    elif isinstance(address, str):
        host, port = _parts(address.strip())
    else:
        raise TypeError(f"An address must be a str, host:port, not {type(address).__name__}.")
    if ":" in host and not (port and _is_ipv6(host)):
        raise ConfigError(
            f"{address!r} is not an address: it is unclear where the host ends. An IPv6 address "
            f"stands in brackets, such as [::1]:{DEFAULT_PORT}; between addresses stand commas."
        )
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:9]) < 65_536
    if not is_port or not (_NAME.fullmatch(host) or _is_ipv6(host)):
        raise ConfigError(
            f"{address!r} is not an address: give host:port, such as node1:{DEFAULT_PORT}."
        )
    return host, int(port)


def _parts(text: str) -> tuple[str, str]:
    in_brackets = _IN_BRACKETS.fullmatch(text)
    if in_brackets is not None:
        host, given = in_brackets[1], in_brackets[2]
        return host, str(DEFAULT_PORT) if given is None else given
    if text.count(":") > 1:  # The last part may be a port or part of an IPv6 address.
        return text, ""
    host, colon, port = text.partition(":")
    return host, port if colon else str(DEFAULT_PORT)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def format_address(address: Address) -> str:
    """Formats an address as `parse_address` reads it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
