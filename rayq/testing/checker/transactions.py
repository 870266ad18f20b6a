"""Judges what clients saw of transactions; it knows nothing of rayq's insides.

Note what happens in a `TransactionHistory`; once everything has ended and was read to the end, ask
it for `faults`. Values have to be unique.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

TORN = "part of a transaction"
MISSING = "record of a committed transaction is missing"
ABORTED = "record of an aborted transaction"
TWICE = "record twice"
TAKEN_BACK = "record was read and is not there in the end"
INPUT_TWICE = "input dealt with twice"
INPUT_LEFT_OUT = "input left out"

Outcome = Literal["committed", "aborted", "unknown"]


@dataclass
class _Transaction:
    values: list[bytes] = field(default_factory=list)
    outcome: Outcome = "aborted"
    """The transaction can only be aborted until its commit is requested."""


@dataclass
class TransactionHistory:
    """See the module."""

    transactions: dict[str, _Transaction] = field(default_factory=dict)
    made_of: dict[bytes, bytes] = field(default_factory=dict)
    """The input of each value that was made of one."""
    seen: set[bytes] = field(default_factory=set)
    cuts: list[list[bytes]] = field(default_factory=list)
    final: list[bytes] = field(default_factory=list)
    inputs: set[bytes] = field(default_factory=set)

    def begun(self, name: str) -> None:
        assert name not in self.transactions, f"transaction {name} begins twice"
        self.transactions[name] = _Transaction()

    def sending(self, name: str, value: bytes, made_of: bytes | None = None) -> None:
        self.transactions[name].values.append(value)
        if made_of is not None:
            self.made_of[value] = made_of

    def ended(self, name: str, outcome: Outcome) -> None:
        """"unknown" from when the commit is asked for, until its outcome is known."""
        self.transactions[name].outcome = outcome

    def read(self, values: Iterable[bytes]) -> None:
        """A reader of what is committed got these values."""
        self.seen.update(values)

    def cut(self, values: Iterable[bytes]) -> None:
        """All values of one snapshot over all partitions."""
        self.cuts.append(list(values))

    def read_in_the_end(self, values: Iterable[bytes]) -> None:
        self.final.extend(values)

    def input(self, value: bytes) -> None:
        """A record that has to be dealt with once."""
        self.inputs.add(value)

    @property
    def committed(self) -> int:
        return sum(transaction.outcome == "committed" for transaction in self.transactions.values())

    def faults(self) -> list[str]:
        """The faults, one line for each."""
        faults: list[str] = []
        final = set(self.final)
        twice = [value for value, count in Counter(self.final).items() if count > 1]
        faults += [f"{TWICE}: {value!r}" for value in sorted(twice)]
        for name, transaction in self.transactions.items():
            found = final.intersection(transaction.values)
            missing = len(transaction.values) - len(found)
            if transaction.outcome == "committed" and missing:
                faults.append(f"{MISSING}: {missing} of {len(transaction.values)} of {name}")
            elif transaction.outcome == "aborted" and found:
                faults.append(f"{ABORTED}: {len(found)} of {len(transaction.values)} of {name}")
            elif found and missing:
                faults.append(
                    f"{TORN}: {len(found)} of {len(transaction.values)} of {name} (unknown)"
                )
        faults += [f"{TAKEN_BACK}: {value!r}" for value in sorted(self.seen - final)]
        of_value = {
            value: name
            for name, transaction in self.transactions.items()
            for value in transaction.values
        }
        for number, cut in enumerate(self.cuts):
            faults += self._faults_of_cut(number, cut, of_value)
        done = Counter(
            self.made_of[value] for value in final if value in self.made_of
        )
        faults += [
            f"{INPUT_TWICE}: {value!r}" for value, count in sorted(done.items()) if count > 1
        ]
        faults += [f"{INPUT_LEFT_OUT}: {value!r}" for value in sorted(self.inputs - done.keys())]
        return faults

    def _faults_of_cut(
        self, number: int, cut: list[bytes], of_value: dict[bytes, str]
    ) -> list[str]:
        faults = [
            f"{TWICE}: {value!r} in snapshot {number}"
            for value, count in Counter(cut).items()
            if count > 1
        ]
        shown = Counter(of_value[value] for value in set(cut) if value in of_value)
        for name, count in shown.items():
            whole = len(self.transactions[name].values)
            if self.transactions[name].outcome == "aborted":
                faults.append(f"{ABORTED}: {count} of {whole} of {name} in snapshot {number}")
            elif count != whole:
                faults.append(f"{TORN}: {count} of {whole} of {name} in snapshot {number}")
        return faults
