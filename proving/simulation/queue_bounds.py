"""Small blocks and low bounds of queues: a run has few records, and meets them all the same."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from unittest import mock

from rayq.core.queues import block as queue_block
from rayq.core.queues import offset_states
from rayq.core.queues import state as queue_state

BLOCK_BITS = (2, 4, 8)
BOUNDS = {
    "LOCKS_MAX": (7, 40),
    "DELAYED_MAX": (4, 15),
    "READY_MAX": (10, 60),
    "BLOCKED_MAX": (3, 20),
    "BLOCKS_MAX": (4, 10),
    "HELD_BYTES_MAX": (0, 2_000, 20_000),
    "RESERVE_BYTES": (0, 1_000),
    "WRITE_BYTES_MAX": (500, 2_000),
    "PASSED_AT_ONCE": (1, 3),
}
"""Values to which a seed may lower each bound. A block has four offsets at least, and the start is
in one."""
BOUND_SHARE = 0.3
READERS = (f"{queue_block.__package__}.", "proving.simulation.")
"""The modules that know these constants by their names."""


@contextlib.contextmanager
def lowered(seed: int) -> Iterator[None]:
    """Returns a context with the bounds of a seed, while it runs."""
    rng = random.Random(f"{seed}/queue bounds")
    bits = rng.choice(BLOCK_BITS)
    values = {
        "BLOCK_BITS": bits,
        "BLOCK_OFFSETS": 1 << bits,
        "LAST_INDEX": (1 << bits) - 1,
        "ALL": (1 << (1 << bits)) - 1,
        "_MASK_BYTES": max(1, (1 << bits) // 8),
    }
    for name, choices in BOUNDS.items():
        if rng.random() < BOUND_SHARE:
            values[name] = rng.choice(choices)
    with contextlib.ExitStack() as stack:
        readers = [module for name, module in sys.modules.items() if name.startswith(READERS)]
        for name, value in values.items():
            holders = [module for module in readers if name in vars(module)]
            assert holders, f"No module has {name} any more."
            for module in holders:
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def fault_of(state: queue_state.QueueState) -> str | None:
    """Returns the bound that a queue's leader has passed (rule 55). A batch that is learned may
    hold more delayed records than fit, and what consumers give back is delayed beyond the bound."""
    locked = sum(block.locked.bit_count() for block in state.offsets.blocks.values())
    blocked = sum(block.blocked.bit_count() for block in state.offsets.blocks.values())
    if locked > queue_state.LOCKS_MAX:
        return f"{locked} records are locked, and {queue_state.LOCKS_MAX} may be"
    # Later records of a key may have been locked with the first one, which was given back.
    if blocked > queue_state.BLOCKED_MAX + queue_state.LOCKS_MAX:
        return f"{blocked} records are blocked, and {queue_state.BLOCKED_MAX} may be"
    if len(state.offsets.blocks) > offset_states.BLOCKS_MAX + 1:
        return f"{len(state.offsets.blocks)} blocks of {queue_block.BLOCK_OFFSETS} are open"
    return None
