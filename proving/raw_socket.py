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
from rayq.wire.tokens import PrincipalToken

TIMEOUT_S = 5.0


class RawSocket:
    """A connection that breaks every rule but those of TCP."""

    def __init__(self, at: tuple[str, int], *, timeout_s: float = TIMEOUT_S) -> None:
        self.socket = socket.create_connection(at, timeout=timeout_s)

    def authenticate(self, key: bytes | PrincipalToken) -> None:
        """Does the handshake. Raises RayqError, OSError."""
        identity = Identity.of_client(key, None)
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
        """The header of the next answer. Raises the error that it is."""
        _, is_error, header, _ = self.read_frame()
        if is_error:
            raise decode_error(header)
        return header

    def read_frame(self) -> tuple[int, bool, bytes, bytes]:
        """The number of a request, whether the answer is an error, its header and its payload."""
        length, _, flags, _, number, header_bytes = PREFIX.unpack(self._read(PREFIX_BYTES))
        rest = self._read(length + 4 - PREFIX_BYTES)
        return number, bool(flags & FLAG_ERROR), rest[:header_bytes], rest[header_bytes:]

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
