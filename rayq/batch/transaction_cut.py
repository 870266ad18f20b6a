"""A cut: one moment over many partitions, which shows all or nothing of each transaction, and waits
for none.

Each partition is asked twice. First for its high watermark g, of all partitions; then for its high
watermark h, for the transactions that are open there, and for those whose marker lies from g to h.
The cut ends at each h, and leaves out every transaction that any partition has named, in all
partitions and forever.

Why: let a cut show some record of a transaction. Then that partition has the marker, below its g. A
marker is written once the transaction is decided, after all its records were acknowledged; so they
lie below every h, which was asked for later. And they are shown in every partition, or the
transaction would be left out.

That holds for an h of the leader of that moment. A process that no longer leads, and does not know
it yet, may answer with an older one, so the leaders' epochs are confirmed after the second pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rayq.errors import TransactionLimitError
from rayq.messages import DescribeOpenTransactionsResponse

TRANSACTIONS_MAX = 10_000
"""Maximum number of transactions that a cut leaves out: each task of a job gets all of them."""


class Cut(NamedTuple):
    ends: list[int]
    """The end of each partition, in their order."""
    without: tuple[tuple[int, int], ...]
    """`(family, epoch)` of the transactions that are left out."""


def cut_of_one_pass(first: Sequence[DescribeOpenTransactionsResponse]) -> Cut | None:
    """The cut if nobody uses transactions: it leaves out none. None: ask again."""
    if any(log.is_used for log in first):
        return None
    return Cut([log.high_watermark for log in first], ())


def cut_of_two_passes(
    first: Sequence[DescribeOpenTransactionsResponse],
    second: Sequence[DescribeOpenTransactionsResponse],
) -> Cut | None:
    """The cut. None: begin again, because compaction has removed markers in between, or an unclean
    election has truncated a log. Raises TransactionLimitError."""
    without: set[tuple[int, int]] = set()
    for before, after in zip(first, second, strict=True):
        if after.ended is None or after.high_watermark < before.high_watermark:
            return None
        without.update(after.ended)
        without.update((family, epoch) for family, epoch, _ in after.open)
    if len(without) > TRANSACTIONS_MAX:
        raise TransactionLimitError(
            f"{len(without)} transactions are open, or have just ended, in the partitions to read; "
            f'one read leaves out at most {TRANSACTIONS_MAX}. ending_offsets="last_stable" leaves '
            "out none."
        )
    return Cut([log.high_watermark for log in second], tuple(sorted(without)))
