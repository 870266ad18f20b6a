"""Regular expressions over topic names, by which members of groups subscribe.

A pattern comes from a client and is matched on a server's event loop, so its cost is bounded: it
becomes a finite automaton, and a match takes time in proportion to the length of the name, whatever
the pattern. (Python's `re` backtracks: a pattern of 30 characters can keep it busy forever.)
Therefore references and look-around, which need backtracking, are refused. The rest is as in `re`:
characters, `.`, `[...]`, `\\d \\w \\s` and their opposites, groups, `|`, `* + ? {m,n}`. A pattern
always stands for the whole name, with or without `^` and `$` around it.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable
from typing import NamedTuple

from rayq.errors import InvalidRequestError

PATTERN_LENGTH_MAX = 1024
DEPTH_MAX = 20
"""Maximum depth of nested groups."""
REPEATS_MAX = 249
"""Maximum number of repeats in a pattern: a topic's name is no longer."""
STATES_MAX = 500
PARTS_MAX = 10_000
"""Maximum number of parts of an automaton while it is built, including parts that need no state."""
REMEMBERED_MAX = 1_000
"""Maximum number of steps that an automaton remembers."""

Chars = frozenset[str]
_END = 1
"""The bit of the end."""

_DIGITS = frozenset(string.digits)
_WORD = frozenset(string.ascii_letters + string.digits + "_")
LEGAL = _WORD | frozenset(".-")
"""The characters of topic names."""
_CLASSES: dict[str, Chars] = {
    "d": _DIGITS,
    "w": _WORD,
    "s": frozenset(),
    "D": LEGAL - _DIGITS,
    "W": LEGAL - _WORD,
    "S": LEGAL,
}


def check_pattern(pattern: str) -> None:
    """Checks a pattern. Raises InvalidRequestError."""
    _automaton(pattern)


def matches(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that match as a whole; rayq's own topics never do. Raises InvalidRequestError."""
    automaton = _automaton(pattern)
    return {name for name in names if not name.startswith("__") and automaton.matches(name)}


AUTOMATA_MAX = 256
"""Maximum number of cached automata, the most recently used: as many patterns as a coordinator may
have."""


@functools.lru_cache(AUTOMATA_MAX)
def _automaton(pattern: str) -> _Automaton:
    if len(pattern) > PATTERN_LENGTH_MAX:
        raise InvalidRequestError(
            f"A pattern has up to {PATTERN_LENGTH_MAX} characters, not {len(pattern)}."
        )
    return _Automaton(_Parser(pattern))


# --- the parsed pattern -------------------------------------------------------------------------


class _Set(NamedTuple):
    """One character out of a set."""

    chars: Chars


class _Sequence(NamedTuple):
    parts: list[_Node]


class _Choice(NamedTuple):
    options: list[_Node]


class _Repeat(NamedTuple):
    """A repeat; `most` is None if there is no maximum."""

    part: _Node
    least: int
    most: int | None


_Node = _Set | _Sequence | _Choice | _Repeat


class _Parser:
    """Reads a pattern into `tree`."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._text = pattern.removeprefix("^")
        is_escaped = (len(pattern) - len(pattern.removesuffix("$").rstrip("\\"))) % 2 == 0
        if self._text.endswith("$") and not is_escaped:
            self._text = self._text[:-1]
        self._at = 0
        self._depth = 0
        self.tree = self._choice()
        if self._at < len(self._text):
            raise self.error("an unbalanced ')'")

    def error(self, what: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"The pattern {self.pattern!r} has {what}. Topics are matched by characters, '.', "
            "[...], groups, '|' and the repeats * + ? {m,n}; a pattern stands for the whole name."
        )

    def _next(self) -> str:
        """The next character, '' at the end."""
        return self._text[self._at : self._at + 1]

    def _take(self, what: str) -> bool:
        if not self._text.startswith(what, self._at):
            return False
        self._at += len(what)
        return True

    def _choice(self) -> _Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else _Choice(options)

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeats(self._atom()))
        return _Sequence(parts)

    def _repeats(self, part: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return part
        self._take("?")  # Lazy or not: the same names match.
        if self._bounds() is not None:
            raise self.error("a repeat of a repeat")
        return _Repeat(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        if not self._take("{"):
            return None
        inside, closing, _ = self._text[self._at :].partition("}")
        least, comma, most = inside.partition(",")
        numbers = [number for number in (least, most) if number]
        if not closing or not numbers or any(set(number) - _DIGITS for number in numbers):
            raise self.error("a '{' that is not a repeat")
        if any(len(number) > 3 or int(number) > REPEATS_MAX for number in numbers):
            raise self.error(f"a repeat above {REPEATS_MAX}")
        self._at += len(inside) + 1
        low = int(least or 0)
        high = low if not comma else int(most) if most else None
        if high is not None and high < low:
            raise self.error("a repeat whose bounds are the wrong way round")
        return low, high

    def _atom(self) -> _Node:
        if self._take("("):
            return self._group()
        if self._take("["):
            return _Set(self._class())
        if self._take("."):
            return _Set(LEGAL)
        if self._take("\\"):
            return _Set(self._escaped())
        char = self._next()
        if char in "*+?{^$":
            raise self.error(f"{char!r} where it means nothing")
        self._at += 1
        return _Set(frozenset(char))

    def _group(self) -> _Node:
        if self._take("?") and not self._take(":"):
            raise self.error("a look-around, flag or named group, which are not supported,")
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self.error(f"more than {DEPTH_MAX} groups within each other")
        inside = self._choice()
        if not self._take(")"):
            raise self.error("an unbalanced '('")
        self._depth -= 1
        return inside

    def _escaped(self) -> Chars:
        """The characters that an escape means."""
        char = self._next()
        self._at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char == "" or char.isalnum():
            raise self.error(f"the escape '\\{char}', which is not supported,")
        return frozenset(char)

    def _class(self) -> Chars:
        is_negated = self._take("^")
        chars: set[str] = set()
        is_first = True
        while is_first or self._next() != "]":
            is_first = False
            low = self._member_of_class()
            is_range = self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]"
            if is_range:
                self._at += 1
                high = self._member_of_class()
                if len(low) != 1 or len(high) != 1 or min(low) > min(high):
                    raise self.error("a range that is none")
                chars |= {char for char in LEGAL if min(low) <= char <= min(high)}
            else:
                chars |= low
        self._at += 1
        return LEGAL - chars if is_negated else frozenset(chars)

    def _member_of_class(self) -> Chars:
        if self._take("\\"):
            return self._escaped()
        char = self._next()
        if not char:
            raise self.error("an unbalanced '['")
        self._at += 1
        return frozenset(char)


# --- the automaton ------------------------------------------------------------------------------


class _Automaton:
    """States are numbers; `_steps[state]` is `(chars, next)` and `_jumps[state]` lists the states
    that follow without a character. It is built from the end: a node gets the state after it and
    returns the state before it.

    A name is matched by sets of states that read a character, each an integer: bit i for the i-th
    such state, bit 0 for the end. So the most common step, to the state that was built before, is
    one shift for all of them.
    """

    def __init__(self, parser: _Parser) -> None:
        self._error = parser.error
        self._steps: list[tuple[Chars, int] | None] = []
        self._jumps: list[list[int]] = []
        self._parts = 0
        self._state(None, [])
        start = self._build(parser.tree, 0)
        readers = [state for state, step in enumerate(self._steps) if step is not None]
        reached = self._reached(readers)
        self._start = reached[start]
        self._accepting: dict[str, int] = {}
        """The states that read a character, by character."""
        self._not_before = 0
        """The states that are not followed by the state that was built before."""
        by_chars: dict[Chars, int] = {}
        by_further: dict[int, int] = {}
        for number, state in enumerate(readers, start=1):
            step = self._steps[state]
            assert step is not None
            bit = 1 << number
            by_chars[step[0]] = by_chars.get(step[0], 0) | bit
            follows = reached[step[1]]
            if not follows & bit >> 1:
                self._not_before |= bit
            further = follows & ~(bit >> 1)
            if further:
                by_further[further] = by_further.get(further, 0) | bit
        for chars, bits in by_chars.items():
            for char in chars:
                self._accepting[char] = self._accepting.get(char, 0) | bits
        self._further = [(states, further) for further, states in by_further.items()]
        """The states that follow some states besides the one that was built before."""
        self._remembered: dict[int, int] = {}
        """The reached states, by the states that read a character."""

    def matches(self, name: str) -> bool:
        states, remembered = self._start, self._remembered
        for char in name:
            reading = states & self._accepting.get(char, 0)
            if not reading:
                return False
            following = remembered.get(reading)
            if following is None:
                if len(remembered) >= REMEMBERED_MAX:
                    remembered.clear()
                following = remembered[reading] = self._next(reading)
            states = following
        return bool(states & _END)

    def _next(self, reading: int) -> int:
        following = (reading & ~self._not_before) >> 1
        for states, further in self._further:
            if reading & states:
                following |= further
        return following

    def _reached(self, readers: list[int]) -> list[int]:
        """The readers that follow each state without a character, itself and the end."""
        reached = [0] * len(self._steps)
        reached[0] = _END
        for number, state in enumerate(readers, start=1):
            reached[state] = 1 << number
        is_changed = True
        while is_changed:  # Once for each loop within loops, since most jumps go to earlier states.
            is_changed = False
            for state, jumps in enumerate(self._jumps):
                closure = reached[state]
                for target in jumps:
                    closure |= reached[target]
                if closure != reached[state]:
                    reached[state] = closure
                    is_changed = True
        return reached

    def _state(self, step: tuple[Chars, int] | None, jumps: list[int]) -> int:
        if len(self._steps) >= STATES_MAX:
            raise self._error(f"repeats that come to more than {STATES_MAX} states")
        self._steps.append(step)
        self._jumps.append(jumps)
        return len(self._steps) - 1

    def _build(self, node: _Node, behind: int) -> int:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise self._error(f"repeats that come to more than {PARTS_MAX} parts")
        if isinstance(node, _Set):
            return self._state((node.chars, behind), [])
        if isinstance(node, _Sequence):
            for part in reversed(node.parts):
                behind = self._build(part, behind)
            return behind
        if isinstance(node, _Choice):
            return self._state(None, [self._build(option, behind) for option in node.options])
        if node.most is None:
            loop = self._state(None, [behind])
            self._jumps[loop].append(self._build(node.part, loop))
            behind = loop
        else:
            end = behind
            for _ in range(node.most - node.least):
                behind = self._state(None, [end, self._build(node.part, behind)])
        for _ in range(node.least):
            behind = self._build(node.part, behind)
        return behind
