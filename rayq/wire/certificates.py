"""Principals by TLS certificates: a client whose certificate `tls_client_ca` has signed is the
principal that the certificate names, without a token.

The authority of an accepted certificate is known by its name, so no authority of `tls_client_ca`
may have a name that one of `tls_ca` has. A certificate that an authority below `tls_client_ca` has
signed counts only if that authority is in the file, too.
"""

from __future__ import annotations

import itertools
import re
import ssl
from collections.abc import Mapping
from typing import Any

from rayq.config import ClusterConfig
from rayq.errors import ConfigError
from rayq.messages.acls import PRINCIPAL_NAME, PRINCIPAL_NAME_LENGTH_MAX, SUPERUSER


class CertificatePrincipals:
    """Reads the principal out of the certificate of a client."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises ConfigError."""
        assert config.tls_ca and config.tls_client_ca and config.tls_principals
        self._kind = config.tls_principals
        self._issuers = _authorities(config.tls_client_ca)
        if not self._issuers:
            raise ConfigError(
                f"tls_client_ca {config.tls_client_ca} holds no certificate of an authority "
                "(basicConstraints CA:TRUE)."
            )
        both = self._issuers & _authorities(config.tls_ca)
        if both:
            raise ConfigError(
                f"An authority of tls_client_ca {config.tls_client_ca} has the name of one of "
                f"tls_ca {config.tls_ca}: {min(both)}. Make an authority for principals alone, "
                "with a subject of its own."
            )

    def named_in(self, certificate: Mapping[str, Any] | None) -> str | None:
        """The principal that a verified certificate names. None: another authority has signed it,
        or it does not name exactly one that may be the name of a principal. `certificate` is as
        `ssl.SSLSocket.getpeercert` has it."""
        if not certificate or certificate["issuer"] not in self._issuers:
            return None
        if self._kind == "san_uri":
            wanted, named = "URI", certificate.get("subjectAltName", ())
        else:
            wanted, named = "commonName", itertools.chain(*certificate["subject"])
        names = [value for kind, value in named if kind == wanted]
        if len(names) != 1:
            return None
        [name] = names
        is_legal = re.fullmatch(PRINCIPAL_NAME, name) and len(name) <= PRINCIPAL_NAME_LENGTH_MAX
        return name if is_legal and name != SUPERUSER else None


def _authorities(path: str) -> set[Any]:
    """The subjects of the authorities in a PEM file. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"TLS cannot use {path}: {error}. It must be a readable PEM file."
        ) from error
    return {certificate["subject"] for certificate in context.get_ca_certs()}
