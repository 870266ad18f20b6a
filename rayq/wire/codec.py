"""Messages to bytes and back. The encoder is made once, and one decoder for each type."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from rayq.environment import Buffer
from rayq.errors import InvalidRequestError, ProtocolError, RayqError, from_wire, to_wire
from rayq.messages import AnyRequest

Message = TypeVar("Message")

ENCODER = msgspec.msgpack.Encoder()


class _Decoders(dict[type[Any], msgspec.msgpack.Decoder[Any]]):
    """One decoder for each type of message, made when it is first needed."""

    def __missing__(self, kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
        decoder = self[kind] = msgspec.msgpack.Decoder(kind)
        return decoder


DECODERS = _Decoders()
_ERROR_DECODER = msgspec.msgpack.Decoder(tuple[str, str])


def decode(decoder: msgspec.msgpack.Decoder[Message], header: Buffer, what: str) -> Message:
    """The message in `header`. Raises ProtocolError, whatever the bytes are."""
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise ProtocolError(f"Not a valid {what} message: {error}") from error


def encode_request(request: AnyRequest) -> bytes:
    """Raises InvalidRequestError for integers beyond 64 bits and for text that is not UTF-8."""
    try:
        return ENCODER.encode(request)
    except OverflowError as error:
        raise InvalidRequestError(
            f"{type(request).__name__} cannot be sent: a number in it has more than 64 bits."
        ) from error
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{type(request).__name__} cannot be sent: {error.object!r} cannot be encoded as "
            "UTF-8."
        ) from error


def encode_error(error: BaseException) -> bytes:
    code, message = to_wire(error)
    # The message may name a path that is not valid UTF-8.
    return ENCODER.encode((code, message.encode(errors="backslashreplace").decode()))


def decode_error(header: Buffer) -> RayqError:
    """The error in an error answer. Raises ProtocolError for any other bytes."""
    return from_wire(*decode(_ERROR_DECODER, header, "error"))
