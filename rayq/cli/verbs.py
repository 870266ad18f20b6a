"""What every group of verbs is: `rayq` itself, `rayq topic` and the others."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class Verbs(TyperGroup):
    """A group of verbs. Without a verb it prints its help and succeeds, as with --help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads what follows the group's name."""
        return super().parse_args(ctx, args or ctx.help_option_names[:1])
