"""The record batch: the unit that is produced, stored, replicated, fetched and checked.

Disks, the wire and every replica have the same bytes. Only producers and consumers look into the
body, and the leader, to check it. Little endian::

    base_offset u64 | length u32 | leader_epoch u32 | magic u8 | append_time_ms i64
    header_crc u32        crc32c of all before it: the leader stamps the fields above, and this
    body_crc u32          crc32c of all after it: it never changes on the way
    attributes u16 | record_count u32 | last_offset_delta u32
    first_timestamp_ms i64 | max_timestamp_ms i64
    producer_id i64 (-1: none) | producer_epoch u16 | base_sequence i32 (-1: none)
    body

`length` counts the whole batch, header included. Attributes: bits 0-2 compression (0 none, 1 lz4),
bit 3 records carry the append time, bit 4 transactional, bit 5 control, bit 6 some record has no
key, bit 7 abort, bit 8 the one record is the manifest of a large value, bit 9 some record has the
header `rayq.due` (see `due`), bit 10 the one record is a chunk of a large value. Producers set
neither bit 5 nor bit 7, and bit 4 with the producer ids of transactions, always. A control batch is
the marker of a transaction: see `marker`. Readers refuse a batch with a bit that they do not know.

The body is a msgpack array of columns. It is compressed as one lz4 block (with its plain size in
front) only when that is smaller::

    [offset_deltas | nil, timestamp_deltas | nil, keys | nil, values, headers | nil]

`nil` stands for the usual case: offsets without gaps, one timestamp for all, no keys, no headers.
Compaction takes records out of a batch and leaves the others at their offsets. The first and the
last offset of the batch stay, even when none of its records does.

One of the two CRCs notices a torn write. The bytes after a bad batch have no meaning.
"""

from rayq.storage.batch.body import *
from rayq.storage.batch.due import *
from rayq.storage.batch.header import *
from rayq.storage.batch.marker import *
