"""`rayq topic produce`: records from stdin, one on each line, or as a format says."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Annotated, Any, BinaryIO

import msgspec
import typer

from rayq.cli import output
from rayq.cli.current import connected
from rayq.cli.formats import (
    JSON,
    Given,
    InputError,
    Parser,
    field_letters,
    parser,
    shown,
    to_bytes,
    unescape,
)
from rayq.cli.options import ClusterAddress, Json, TopicName
from rayq.cli.streams import read_some
from rayq.cli.values import config_values, pair, time_ms
from rayq.client.client import check_partition
from rayq.client.cluster import Cluster
from rayq.client.producing.producer import Producer
from rayq.config import ProducerConfig
from rayq.errors import (
    DeliveryError,
    InvalidRequestError,
    InvalidTimestampError,
    NullKeyError,
    RayqError,
    RecordTooLargeError,
    sentence,
)
from rayq.records import Headers, OffsetRange, RecordMetadata
from rayq.storage.batch import BATCH_BYTES_MAX

ANSWER_TIMEOUT_S = 30.0
END_PATIENCE_S = 2.0
PENDING_MAX = 200_000
"""The maximum number of writes without a known outcome; beyond it the command waits for the oldest.
"""


def produce(
    topic: TopicName,
    key: Annotated[
        str | None, typer.Option("-k", "--key", help="The key of every record.", show_default=False)
    ] = None,
    key_delimiter: Annotated[
        str | None,
        typer.Option(
            "-K", "--key-delimiter", help="Delimiter between key and value, e.g. : or \\t."
        ),
    ] = None,
    delimiter: Annotated[
        str, typer.Option("-D", "--delimiter", help="The delimiter after each record.")
    ] = r"\n",
    format_: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--format",
            help="Format of a record, e.g. '%k %s' or '%p\\t%k\\t%h\\t%s' (%T: timestamp), or json "
            "(what `consume --json` writes).",
        ),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("-H", "--header", metavar="NAME=VALUE", help="Add a header to every record."),
    ] = None,
    partition: Annotated[
        int | None,
        typer.Option(
            "-p",
            "--partition",
            help="The partition. Default: by key; records without a key are spread.",
            min=0,
        ),
    ] = None,
    timestamp: Annotated[
        str | None, typer.Option("-t", "--timestamp", help="The timestamp of every record.")
    ] = None,
    null_when_empty: Annotated[
        bool,
        typer.Option(
            "-Z",
            "--tombstone",
            help="Write an empty value or key as null (a null value is a tombstone).",
        ),
    ] = False,
    compression: Annotated[
        str | None,
        typer.Option("-z", "--compression", help="lz4 or none.", show_default="lz4"),
    ] = None,
    acks: Annotated[
        str | None, typer.Option("--acks", help="all, 1 or 0.", show_default="all")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("-X", "--config", metavar="KEY=VALUE", help="Set a config of the producer."),
    ] = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    r"""Write the lines of stdin as records; returns when all are on disk.

    Examples: `echo hello | rayq topic produce greetings`;
    `rayq topic produce flights -K '\t' < flights.tsv`;
    `rayq topic consume a --json -e | rayq topic produce b -f json`.
    """
    if format_ is not None and key_delimiter is not None:
        raise typer.BadParameter("give one of --format and --key-delimiter")
    _check_said_once(format_, key_delimiter, key=key, partition=partition, timestamp=timestamp)
    end = unescape(delimiter)
    if not end or key_delimiter == "":
        raise typer.BadParameter("a delimiter cannot be empty")
    source = Source(
        parse=None if format_ is None else parser(format_, end),
        key_delimiter=None if key_delimiter is None else unescape(key_delimiter),
        key=None if key is None else to_bytes(key),
        headers=[_header(text) for text in header or ()] or None,
        partition=partition,
        timestamp_ms=None if timestamp is None else time_ms(timestamp, output.now_ms()),
        null_when_empty=null_when_empty,
    )
    given = {"acks": acks, "compression_type": compression}
    options = config_values(
        ProducerConfig,
        [*(f"{name}={value}" for name, value in given.items() if value), *(config or ())],
    )
    with connected(cluster, topics=[topic]) as connection:
        _check(connection, topic, partition)
        output.hush()
        stdin = sys.stdin.buffer
        total = _size(stdin)
        with (
            output.progress(f"producing to {topic}", total, wanted=not stdin.isatty()) as advance,
            connection.producer(**options) as producer,
            _told_of_a_long_end(),
        ):
            number, tally = _send_all(producer, topic, stdin, end, source, advance)
    if json:
        output.print_json(
            {
                "topic": topic,
                "records": number,
                "partitions": {str(number): count for number, count in sorted(tally.items())},
            }
        )
    else:
        output.say(f"Produced {output.counted(number, 'record')} to {topic}.")


def _check_said_once(format_: str | None, key_delimiter: str | None, **options: object) -> None:
    """Refuses an option that says of every record what each line says, too. (What records in JSON
    say gives way to the options.)"""
    letters = set() if format_ in (None, JSON) else field_letters(format_ or "")
    for name, letter in (("key", "k"), ("partition", "p"), ("timestamp", "T")):
        if options[name] is None:
            continue
        if letter in letters:
            raise typer.BadParameter(f"give one of --{name} and %{letter} in --format")
        if name == "key" and key_delimiter is not None:
            raise typer.BadParameter("give one of --key and --key-delimiter")


@contextlib.contextmanager
def _told_of_a_long_end() -> Iterator[None]:
    """After an interrupt the records that were read are still delivered. Where the cluster is down
    that takes long, and the user is told."""
    try:
        yield
    except KeyboardInterrupt:
        text = "Delivering what was read before; interrupt again to give it up."
        note = threading.Timer(END_PATIENCE_S, output.note, (text,))
        note.daemon = True
        note.start()
        raise


class Source(msgspec.Struct, frozen=True):
    """The source of records: the parser of lines, and what the options set for every record."""

    parse: Parser | None
    key_delimiter: bytes | None
    key: bytes | None
    headers: Headers | None
    partition: int | None
    timestamp_ms: int | None
    null_when_empty: bool

    @property
    def is_plain(self) -> bool:
        """True if lines hold only keys and values, so that many records can be sent at once."""
        return self.parse is None and self.headers is None and self.timestamp_ms is None

    def columns(self, lines: list[bytes]) -> tuple[list[bytes | None], list[bytes | None] | None]:
        """Values and keys of plain records, up to the first line that has no key."""
        delimiter = self.key_delimiter
        keys: list[bytes | None] | None = None if self.key is None else [self.key] * len(lines)
        values: list[bytes | None] = list(lines)
        if delimiter is not None:
            keys, values = [], []
            for line in lines:
                key, found, value = line.partition(delimiter)
                if not found:
                    break
                keys.append(key)
                values.append(value)
        if self.null_when_empty:
            values = [value or None for value in values]
            keys = None if keys is None else [key or None for key in keys]
        return values, keys

    def record(self, line: bytes) -> Given:
        given = Given(line) if self.parse is None else self.parse(line)
        value, key = given.value, given.key
        if self.key_delimiter is not None:
            key, found, value = line.partition(self.key_delimiter)
            if not found:
                raise self.no_key_error(line)
        if self.null_when_empty:
            value, key = value or None, key or None
        return Given(
            value=value,
            key=key if self.key is None else self.key,
            headers=[*(self.headers or ()), *(given.headers or ())] or None,
            partition=given.partition if self.partition is None else self.partition,
            timestamp_ms=given.timestamp_ms if self.timestamp_ms is None else self.timestamp_ms,
        )

    def no_key_error(self, line: bytes) -> InvalidRequestError:
        return InvalidRequestError(
            f"{shown(line)} has no key: there is no {shown(self.key_delimiter or b'')} in it."
        )


def _header(text: str) -> tuple[str, bytes]:
    name, value = pair(text, "header")
    return name, to_bytes(value)


def _check(cluster: Cluster, topic: str, partition: int | None) -> None:
    """Checks topic and partition before stdin is read, since a person may be about to type."""
    client, background = cluster.shared_client()
    known = background.run(client.topic(topic, timeout_s=ANSWER_TIMEOUT_S))
    if partition is not None:
        check_partition(known, partition)


def _size(stream: BinaryIO) -> int | None:
    """The number of bytes left in a file; None where the stream is not a file."""
    status = os.fstat(stream.fileno())
    return status.st_size - stream.tell() if stat.S_ISREG(status.st_mode) else None


def records_of(descriptor: int, delimiter: bytes, bytes_max: int) -> Iterator[list[bytes]]:
    """Whole records, as many as have arrived; the last one may lack its delimiter. Raises
    InputError for one above `bytes_max`."""
    rest = bytearray()
    while chunk := read_some(descriptor):
        new = max(0, len(rest) - len(delimiter) + 1)
        rest += chunk
        if rest.find(delimiter, new) >= 0:
            lines = bytes(rest).split(delimiter)
            rest = bytearray(lines.pop())
            yield lines
        if len(rest) > bytes_max:
            raise InputError(
                f"A record is longer than {bytes_max} bytes, the most that is read of one: is the "
                "delimiter right? (Those before it are written.)"
            )
    if rest:
        yield [bytes(rest)]


def _send_all(
    producer: Producer,
    topic: str,
    stream: BinaryIO,
    delimiter: bytes,
    source: Source,
    advance: output.Advance,
) -> tuple[int, Counter[int]]:
    """Returns the number of records, and the number for each partition (unknown under acks=0)."""
    answers = Answers(PENDING_MAX, producer._core.trouble)
    done_bytes = number = 0
    sends_many = source.is_plain and producer.config.large_values is None
    with output.patience(answers.waits_for):
        for lines in records_of(stream.fileno(), delimiter, BATCH_BYTES_MAX):
            if sends_many:
                values, keys = source.columns(lines)
                try:
                    sent = producer.send_many(topic, values, keys=keys, partition=source.partition)
                except RecordTooLargeError as error:
                    raise _too_large(error, topic) from error
                answers.add(sent)
                number += len(values)
                if len(values) < len(lines):
                    raise _at(number + 1, source.no_key_error(lines[len(values)]))
            else:
                for line in lines:
                    number += 1
                    _send(producer, topic, source, line, number, answers)
            done_bytes += sum(map(len, lines)) + len(lines) * len(delimiter)
            answers.take_those_there()
            advance(done_bytes)
        with contextlib.suppress(DeliveryError):  # The answers tell more.
            producer.flush()
        return number, answers.all()


def _send(
    producer: Producer, topic: str, source: Source, line: bytes, number: int, answers: Answers
) -> None:
    try:
        given = source.record(line)
        answers.add(
            producer.send(
                topic,
                given.value,
                key=given.key,
                headers=given.headers,
                partition=given.partition,
                timestamp_ms=given.timestamp_ms,
            )
        )
    except RecordTooLargeError as error:
        raise _at(number, _too_large(error, topic)) from error
    except (InvalidRequestError, InvalidTimestampError, NullKeyError) as error:
        raise _at(number, error) from error


def _too_large(error: RecordTooLargeError, topic: str) -> RecordTooLargeError:
    return error.with_message(
        f"{error} From the shell: `rayq topic alter {topic} -c max_message_bytes=SIZE`, or "
        "`-X large_values=chunks` here."
    )


def _at(number: int, error: RayqError) -> RayqError:
    return InputError(f"Record {number}: {error} (Those before it are produced.)")


class Answers:
    """The outcomes of the writes, in their order, of which at most `pending_max` may be unknown.
    The first failure ends the work. `trouble` says why they are not there yet."""

    def __init__(
        self, pending_max: int, trouble: Callable[[], RayqError | None] = lambda: None
    ) -> None:
        self._pending_max = pending_max
        self._trouble = trouble
        self._told_at = 0
        self._taken = 0
        self._pending: deque[Any] = deque()
        self._tally: Counter[int] = Counter()

    def add(self, future: Any) -> None:
        self._pending.append(future)
        if len(self._pending) > self._pending_max:
            self._take()

    def take_those_there(self) -> None:
        while self._pending and self._pending[0].done():
            self._take()

    def all(self) -> Counter[int]:
        while self._pending:
            self._take()
        return self._tally

    def waits_for(self) -> str | None:
        """For `output.patience`. None where something came since it was asked last."""
        has_moved, self._told_at = self._told_at != self._taken, self._taken
        left = sum(not future.done() for future in list(self._pending))
        if has_moved or not left:
            return None
        trouble = self._trouble()
        reason = "" if trouble is None else f": {trouble}"
        told = sentence(f"Waiting for {output.counted(left, 'write')} to be acknowledged{reason}")
        return f"{told} `rayq cluster health` says what is wrong."

    def _take(self) -> None:
        self._taken += 1
        try:
            result: RecordMetadata | list[OffsetRange] = self._pending[0].result()
        except RayqError as error:
            before = output.counted(sum(self._tally.values()), "record")
            raise type(error)(f"Acknowledged {before} before this error: {error}") from error
        finally:
            self._pending.popleft()
        if isinstance(result, RecordMetadata):
            self._tally[result.partition] += 1
        else:
            for appended in result:
                self._tally[appended.partition] += appended.end - appended.start
