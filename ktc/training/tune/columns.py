"""Columns of the user's data under the names of a format: `--column prompt=question`.

In: words NAME=COLUMN, and rows. Out: the mapping from names to columns, and rows with these names. Faults: a word of
another form and a name or a column that is given twice (in words, for T503), and a row without such a column (T514).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ktc.diagnostics import listing, suggest
from ktc.training.tune.data_files import RowFault

Columns = Mapping[str, str]
"""The column of each name of a format; other columns keep their names."""


def columns_of(words: Sequence[str]) -> Columns:
    """Return the mapping of valid words."""
    return {name: column for name, _, column in (word.partition("=") for word in words)}


def faults_of(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of words, with a hint."""
    names, columns = set[str](), set[str]()
    for word in words:
        name, equals, column = word.partition("=")
        if not (name and equals and column):
            yield f"`column` is NAME=COLUMN, found `{word:.100}`", "for example `prompt=question`"
        elif name in names or column in columns:
            yield f"`column` gives `{name if name in names else column:.100}` twice", "leave one of the two out"
        names.add(name)
        columns.add(column)


def renamed(row: object, columns: Columns) -> object:
    """Return a row with its columns under the names of a format, or the RowFault of a row that lacks one.

    A column that has such a name already is left out.
    """
    if not columns or not isinstance(row, dict):
        return row
    fields = cast("dict[str, Any]", row)
    missing = [column for column in columns.values() if column not in fields]
    if missing:
        named = next(name for name, column in columns.items() if column == missing[0])
        hint = suggest(missing[0], fields) or f"the row has {listing(fields, 6)}"
        return RowFault("T514", f"the row has no column `{missing[0]}`, which `--column {named}=...` names", hint)
    taken = {*columns, *columns.values()}
    others = {key: value for key, value in fields.items() if key not in taken}
    return {**others, **{name: fields[column] for name, column in columns.items()}}
