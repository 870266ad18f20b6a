"""One moment over many partitions: it shows all or nothing of each transaction, and waits for none.

Each partition is asked twice. First for its high watermark g, of all partitions; then for its high
watermark h, for the transactions that are open there, and for those whose marker lies from g to h.
The cut ends at each h, and leaves out every transaction that any partition has named, in all
partitions and for ever.

Why: let a cut show some record of a transaction. Then that partition has the marker, below its g. A
marker is written once the transaction is decided, after all its records were acknowledged; so they
lie below every h, which was asked for later. And they are shown in every partition, or the
transaction would be left out.

That holds for an h of the leader of that moment. A process that leads no more, and does not know it
yet, may answer with an older one: so the leaders' epochs are confirmed after the second pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rayq.errors import TransactionLimitError
from rayq.messages import DescribeOpenTransactionsResponse

TRANSACTIONS_MAX = 10_000
"""How many transactions a cut leaves out at most: each task of a job gets all of them."""


class Cut(NamedTuple):
    ends: list[int]
    """Of each partition, in their order."""
    without: tuple[tuple[int, int], ...]
    """`(family, epoch)` of the transactions that are left out."""


def cut_of_one_pass(first: Sequence[DescribeOpenTransactionsResponse]) -> Cut | None:
    """The cut, where nobody uses transactions: it shows none. None: ask again."""
    if any(one.is_used for one in first):
        return None
    return Cut([one.high_watermark for one in first], ())


def cut_of_two_passes(
    first: Sequence[DescribeOpenTransactionsResponse],
    second: Sequence[DescribeOpenTransactionsResponse],
) -> Cut | None:
    """The cut. None: begin anew, because compaction has removed markers in between, or an unclean
    election has cut a log off. Raises TransactionLimitError."""
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
    return Cut([one.high_watermark for one in second], tuple(sorted(without)))
