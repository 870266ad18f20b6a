"""Maximum lengths of the lists and maps in requests.

A longer one is refused before any of it is decoded. The limits bound the work of one request, not
the size of a cluster: a client that needs more sends several requests.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from rayq.messages.base import CheckedInt

POSITIONS_MAX = 5_000
"""The most positions of a group that one request names."""
MOVES_MAX = 10_000
"""The most moves of partitions that begin together, or are taken back together."""
PARTITIONS_LISTED_MAX = 10_000
"""The most partitions of one topic that a request names: so many a topic may have."""
TOPICS_LISTED_MAX = 10_000
"""The most topics that a member of a group names, repetitions included."""
OWNED_MAX = 100_000
"""The most partitions that a member of a group says that it owns."""
REPLICAS_MAX = 1_000
"""The most replicas of one partition."""
HOSTED_MAX = 100_000
"""The most replicas that a server tells of at once: far more than one node has."""
SEGMENT_PARTS_MAX = 1_000_000
"""The most pieces, or aborted transactions, of one segment."""
KEPT_KEY_BYTES_MAX = 1_024
"""The longest key of what a keeper keeps of a queue."""
CONFIG_KEYS_MAX = 200
"""The most keys of a config: several times as many as there are."""

ConfigValue = bool | CheckedInt | float | Annotated[str, msgspec.Meta(max_length=4096)] | None
ConfigOptions = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=256)], ConfigValue],
    msgspec.Meta(max_length=CONFIG_KEYS_MAX),
]
"""Single keys of a config. A key that came later has a value of these types, too."""
