"""Maximum lengths of the lists and maps in requests.

A longer one is refused before any of it is decoded. The limits bound the work of one request, not
the size of a cluster: a client that needs more sends several requests.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from rayq.messages.base import CheckedInt

POSITIONS_MAX = 5_000
"""Maximum number of positions of a group that a request names."""
MOVES_MAX = 10_000
"""Maximum number of partition moves that begin together, or are cancelled together."""
PARTITIONS_LISTED_MAX = 10_000
"""Maximum number of partitions of a topic that a request names, which is the maximum of a topic."""
TOPICS_LISTED_MAX = 10_000
"""Maximum number of topics that a member of a group names, repetitions included."""
OWNED_MAX = 100_000
"""Maximum number of partitions that a member of a group reports as owned."""
REPLICAS_MAX = 1_000
"""Maximum number of replicas of a partition."""
HOSTED_MAX = 100_000
"""Maximum number of replicas that a server reports at once: far more than one node has."""
PROPOSALS_MAX = 500
"""Maximum number of in-sync sets that leaders propose together: they are one entry of the metadata
log, of half a MB."""
SEGMENT_PARTS_MAX = 1_000_000
"""Maximum number of pieces, or aborted transactions, of a segment."""
KEPT_KEY_BYTES_MAX = 1_024
"""Maximum size of a key of a queue's kept records."""
CONFIG_KEYS_MAX = 200
"""Maximum number of keys of a config: several times as many as exist."""

ConfigValue = bool | CheckedInt | float | Annotated[str, msgspec.Meta(max_length=4096)] | None
ConfigOptions = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=256)], ConfigValue],
    msgspec.Meta(max_length=CONFIG_KEYS_MAX),
]
"""Single keys of a config. A key that came later has a value of these types, too."""
