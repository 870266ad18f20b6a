"""The table of a group coordinator's decisions that need only its state and the time. The others
have several steps, and are methods of the coordinator."""

from __future__ import annotations

from rayq import messages
from rayq.core.decision import DecisionTable, Times
from rayq.core.groups import descriptions, offsets, transactions
from rayq.core.groups.records import Record
from rayq.core.groups.state import GroupState

DECISIONS: DecisionTable[GroupState, Times, Record] = DecisionTable()
decides = DECISIONS.decides

decides(messages.FetchCommitted)(offsets.fetch_committed)
decides(messages.SetGroupOffsets)(offsets.set_offsets)
decides(messages.DeleteGroup)(offsets.delete_group)

decides(messages.WriteMarker)(transactions.write_marker)
decides(messages.DescribeOpenTransactions)(transactions.describe_open)

decides(messages.ListGroups)(descriptions.list_groups)
decides(messages.DescribeGroup)(descriptions.describe_group)
