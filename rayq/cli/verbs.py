"""The base of every command group: `rayq` itself, `rayq topic` and the others."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

LONGEST_SENTENCE = 1000
"""Characters: more than any first sentence of a verb's help has."""


class Verbs(TyperGroup):
    """A group of verbs. Without a verb it prints its help and succeeds, as with --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads what follows the group's name."""
        return super().parse_args(ctx, args or ctx.help_option_names[:1])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Lists the verbs with the whole first sentence of each: it folds, where click cuts it."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, command.get_short_help_str(LONGEST_SENTENCE))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class VerbsOrAlone(Verbs):
    """A group of verbs that does something of its own where it is named alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return TyperGroup.parse_args(self, ctx, args)
