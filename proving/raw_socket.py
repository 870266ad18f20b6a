"""A client without rayq's client: it writes any bytes, and reads only when it is told to."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from rayq.messages import AnyRequest
from rayq.wire.authentication import (
    HANDSHAKE_VERSION,
    NONCE_BYTES,
    ClientHandshake,
    Identity,
)
from rayq.wire.codec import ENCODER, decode_error
from rayq.wire.frames import FLAG_ERROR, HANDSHAKE_API, PREFIX, PREFIX_BYTES, encode_head

TIMEOUT_S = 5.0


class RawSocket:
    """A connection that breaks every rule but those of TCP."""

    def __init__(self, at: tuple[str, int], *, timeout_s: float = TIMEOUT_S) -> None:
        self.socket = socket.create_connection(at, timeout=timeout_s)

    def authenticate(self, key: bytes) -> None:
        """Does the handshake. Raises RayqError, OSError."""
        identity = Identity(role="client", key=key, cluster_id=None, broker=None)
        handshake = ClientHandshake(identity, os.urandom(NONCE_BYTES), None)
        for answer in (handshake.hello, lambda: handshake.answer(self.read_header())):
            header = answer()
            self.write(encode_head(HANDSHAKE_VERSION, 0, HANDSHAKE_API, 0, header, 0))
        handshake.finish(self.read_header())

    def write(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, requests: Sequence[AnyRequest], payload: bytes = b"") -> None:
        self.write(
            b"".join(
                encode_head(1, 0, request.api, number, ENCODER.encode(request), len(payload))
                + payload
                for number, request in enumerate(requests, start=1)
            )
        )

    def read_header(self) -> bytes:
        length, _, flags, _, _, header_bytes = PREFIX.unpack(self._read(PREFIX_BYTES))
        header = self._read(length + 4 - PREFIX_BYTES)[:header_bytes]
        if flags & FLAG_ERROR:
            raise decode_error(header)
        return header

    def _read(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            some = self.socket.recv(size - len(received))
            if not some:
                raise ConnectionError("closed by the server")
            received += some
        return received

    def close(self) -> None:
        self.socket.close()
