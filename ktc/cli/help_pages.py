"""The pages of `--help`: options in groups, with their defaults, in 80 columns, with every name whole.

In: the parameters that typer reads from a command. Out: plain text. The groups are typer's `rich_help_panel`; typer's
own pages cut long names, and give flags the type `<bool>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from ktc.cli.options import OUTPUT_GROUP

_ARGUMENTS: Final = "Arguments"
_OPTIONS: Final = "Options"
_COMMANDS: Final = "Commands"
_ORDER: Final = {_ARGUMENTS: 0, _OPTIONS: 1, OUTPUT_GROUP: 3}  # other groups are between the last two
_KEPT_SPACE: Final = "\N{NO-BREAK SPACE}"
# Words for types, by those of typer.
_KINDS: Final = {"path": "PATH", "str": "TEXT", "int": "N", "float": "NUMBER", "list[str]": "TEXT"}
_NAME_COLUMNS: Final = 26  # a longer name has its text below it
Rows = dict[str, list[tuple[str, str]]]


class Command(TyperCommand):
    """A command whose help has a section for each group of options."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return `[OPTIONS]` and the arguments, optional ones in brackets."""
        return _usage(super().collect_usage_pieces(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options."""
        _write(_parameters(self, ctx), formatter)


class Group(TyperGroup):
    """A group of commands; without a command it prints its help and ends with 2."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return `[OPTIONS] COMMAND [ARGS]...`."""
        return _usage(super().collect_usage_pieces(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command."""
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help(), err=True)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, then the commands, each with its whole first sentence."""
        commands: Rows = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            title = panel if isinstance(panel, str) else _COMMANDS
            commands.setdefault(title, []).append((name, _summary(command.help or "")))
        _write(commands | _parameters(self, ctx), formatter)


def _parameters(command: Any, ctx: Any) -> Rows:
    """Return the names and texts of the parameters by the title of their group."""
    rows: Rows = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        name, text = record
        if parameter.param_type_name == "argument":
            word = parameter.metavar or parameter.name.upper()
            rows.setdefault(_ARGUMENTS, []).append((word, _whole(text.replace("  [required]", ""))))
            continue
        panel = getattr(parameter, "rich_help_panel", None)
        title = OUTPUT_GROUP if parameter.name == "help" else panel if isinstance(panel, str) else _OPTIONS
        rows.setdefault(title, []).append((_named(name), _whole(text)))
    return {title: rows[title] for title in sorted(rows, key=lambda title: _ORDER.get(title, 2))}


def _named(name: str) -> str:
    """Convert typer's `--out, -o <path>` to `-o, --out PATH`."""
    names, _, kind = name.partition(" <")
    kind = kind.rstrip(">.").removesuffix(" range")
    kind = _KINDS.get(kind, kind)
    return f"{names} {kind}".rstrip()


def _whole(text: str) -> str:
    """Return the text with its `[default: ...]` kept on one line where it is short."""
    return re.sub(r"\s+(\[[^\[\]]+\])$", lambda facts: " " + _unbroken(facts[1]), text)


def _unbroken(facts: str) -> str:
    return facts.replace(" ", _KEPT_SPACE) if len(facts) < _NAME_COLUMNS else facts


def _usage(pieces: Iterable[str]) -> list[str]:
    """Convert typer's `{model}` and `[rules]` to `MODEL` and `[RULES]`."""
    return [re.sub(r"^\{(.*)\}", r"\1", piece).upper().replace("......", "...") for piece in pieces]


def _summary(text: str) -> str:
    """Return the first paragraph of a help text on one line."""
    return " ".join(text.split("\n\n")[0].split())


def _write(rows: Rows, formatter: Any) -> None:
    for title, lines in rows.items():
        with formatter.section(title):
            formatter.write_dl(lines, col_max=_NAME_COLUMNS)
    formatter.buffer[:] = [piece.replace(_KEPT_SPACE, " ") for piece in formatter.buffer]
