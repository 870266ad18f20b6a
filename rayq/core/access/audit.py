"""Lines of the audit, and the bound on their rate.

A line is a record of `__audit`: JSON, whose fields are those of `AuditLine`. It has names, ids and
addresses, and never a record's key or value, a token, or a URL.
"""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from rayq.messages.acls import SUPERUSER
from rayq.messages.audit import AuditedChange

KINDS = ("change", "denied", "login", "failed_login", "urls", "redrive", "lost")
"""The kinds of lines."""
LINE_INTERVAL_S = 1.0
"""One line of a kind and principal is written in this time, and the others are counted."""
LINES_MAX = 1_000
"""Maximum number of lines that wait to be written."""
KEYS_MAX = 1_000
"""Maximum number of pairs of kind and principal that are told apart at a time."""
WHAT_LENGTH_MAX = 500
OTHERS = "(others)"
"""The principal of lines beyond `KEYS_MAX`."""


class AuditLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event. Fields that say nothing are left out of the JSON; later versions may add some."""

    time_ms: int
    """Wall clock of the server that saw it; for a change, of the controller."""
    kind: str
    """One of `KINDS`, or of a later version's."""
    principal: str
    """Whoever asked. For `failed_login`, the name that somebody claimed."""
    address: str = ""
    client_id: str = ""
    """The name that the client gave itself. Nothing proves it."""
    token_id: str = ""
    request: str = ""
    """Name of the request."""
    what: str = ""
    """For `change`, the fields of the request as JSON; else a text."""
    objects: int = 0
    """Number of objects of signed URLs, or records of a redrive; with those of lines left out."""
    bytes: int = 0
    """Their size, with that of lines left out."""
    left_out: int = 0
    """Number of events of this kind and principal, just before this one, that have no line."""
    server: str = ""
    """The server that saw it."""
    id: str = ""
    """No two events have the same. A line that was sent twice may be there twice."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AuditLine)


def encode_line(line: AuditLine) -> bytes:
    return _encoder.encode(line)


def decode_line(data: bytes | memoryview) -> AuditLine:
    """The line of these bytes. Raises msgspec.MsgspecError."""
    return _decoder.decode(data)


def line_of(change: AuditedChange) -> AuditLine:
    """The line that tells a change of the metadata."""
    return AuditLine(
        time_ms=change.time_ms,
        kind="change",
        principal=change.principal or SUPERUSER,
        address=change.address,
        client_id=change.client_id,
        token_id=change.token_id or "",
        request=change.request,
        what=change.what,
        id=f"change-{change.time_ms}",
    )


class _Key:
    """A kind and principal whose last line is younger than `LINE_INTERVAL_S`."""

    __slots__ = ("counted", "from_s", "newest")

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        """Time from which on the next line is written."""
        self.counted = 0
        """Number of events since the last line, those that these left out included."""
        self.newest: AuditLine | None = None
        """The newest of them, with the sums of all."""


class AuditLines:
    """Lines that wait to be written, at a bounded rate for each kind and principal.

    The first line of a while is there at once. Those that follow within `LINE_INTERVAL_S` are
    counted, and the newest of them is written after that time with their number.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], _Key] = {}
        self._waiting: deque[AuditLine] = deque()
        self.dropped: Counter[str] = Counter()
        """Number of events by kind that are in no line, since too many lines waited."""

    def __bool__(self) -> bool:
        """True while there is something to write, now or later."""
        return bool(self._waiting) or any(key.newest is not None for key in self._keys.values())

    def add(self, line: AuditLine, now_s: float) -> None:
        """Takes a line, or counts it."""
        kind, principal = line.kind, line.principal
        if len(self._keys) >= KEYS_MAX and (kind, principal) not in self._keys:
            self._take_counted(now_s)
            if len(self._keys) >= KEYS_MAX:
                principal = OTHERS
        key = self._keys.get((kind, principal))
        if key is None:
            self._keys[kind, principal] = _Key(now_s + LINE_INTERVAL_S)
            self._wait(line)
            return
        key.counted += 1 + line.left_out
        before = key.newest
        key.newest = line if before is None else msgspec.structs.replace(
            line, objects=before.objects + line.objects, bytes=before.bytes + line.bytes
        )
        self._take_counted(now_s, (kind, principal))

    def due(self, now_s: float, count_max: int) -> list[AuditLine]:
        """The oldest lines that are to be written now. They wait until `written` is told."""
        self._take_counted(now_s)
        return [self._waiting[number] for number in range(min(count_max, len(self._waiting)))]

    def written(self, count: int) -> None:
        """Forgets the oldest lines."""
        for _ in range(count):
            self._waiting.popleft()

    def _take_counted(self, now_s: float, *only: tuple[str, str]) -> None:
        """Writes the lines that have become due, and forgets who has been silent since."""
        for name in only or list(self._keys):
            key = self._keys[name]
            if now_s < key.from_s:
                continue
            if key.newest is None:
                del self._keys[name]
                continue
            self._wait(msgspec.structs.replace(key.newest, left_out=key.counted - 1))
            key.newest, key.counted, key.from_s = None, 0, now_s + LINE_INTERVAL_S

    def _wait(self, line: AuditLine) -> None:
        if len(self._waiting) >= LINES_MAX:
            self.dropped[line.kind] += 1 + line.left_out
        else:
            self._waiting.append(line)
