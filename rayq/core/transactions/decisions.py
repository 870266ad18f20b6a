"""The table of a transaction coordinator's decisions that need only its state and the time. The
others are methods of the coordinator."""

from __future__ import annotations

from rayq import messages
from rayq.core.decision import DecisionTable, Times
from rayq.core.transactions import changes
from rayq.core.transactions.records import Record
from rayq.core.transactions.state import TransactionState

DECISIONS: DecisionTable[TransactionState, Times, Record] = DecisionTable()
decides = DECISIONS.decides

decides(messages.TouchTransaction)(changes.touch)
decides(messages.SealTransaction)(changes.seal)

decides(messages.JoinTransaction)(changes.join)
decides(messages.ProlongTransaction)(changes.prolong_throttled)
decides(messages.DescribeOutcome)(changes.describe_outcome)
