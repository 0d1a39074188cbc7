"""Training data: named sources, read as rows of conversations, prompts with completions, preferences or plain text.

In: names of files, folders, patterns and data sets. Out: `TrainingData`, its rows with their places. Refused, all
invalid rows together: what the readers of files (T510 to T513, T545, T546) and formats (T514 to T516) refuse, and
sources without rows (T511).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation.regular_files import open_regular
from ktc.foundation.text_files import bounded
from ktc.training.tune.data_files import RowFault, Rows, read_rows
from ktc.training.tune.data_sources import DataSource, data_source
from ktc.training.tune.hub_data import read_hub_rows
from ktc.training.tune.row_formats import (
    Columns,
    Row,
    RowFormat,
    columns_of,
    detected,
    format_of,
    parsed,
    renamed,
    require_known_names,
)
from ktc.training.tune.settings import Format, Method, TrainSettings
from ktc.training.tune.turns import Turn

_HEAD: Final = 100  # rows of a file that are checked first
_DETECTED: Final = 1000  # rows of a file, one of which has the keys of its format


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a source; `line` is where it begins, from 1, and `source` the number of its source, from 0."""

    file: str
    line: int
    row: Row
    source: int = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.row.turns

    @property
    def place(self) -> Span:
        return Span(self.file, self.line, 1, self.line, 2)


@dataclass(frozen=True, slots=True)
class ReadSource:
    """A source that was read. `digests` has the SHA-256 of each of its files by name; it is empty for one of the hub.

    A row of it appears `weight` times in a pass over the data.
    """

    named: str
    weight: float
    formats: tuple[RowFormat, ...]
    rows: int
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StreamedExamples:
    """The rows of sources that have been checked, read again at each iteration and not kept.

    `share` of them are held out: each by a draw of its own, from `seed`. These are the rows where `held_out` is true.
    """

    sources: tuple[DataSource, ...]
    wanted: RowFormat | None
    rows: int
    share: float = 0.0
    seed: int = 0
    held_out: bool = False
    columns: Columns = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        draws = random.Random(self.seed)
        return sum((draws.random() < self.share) == self.held_out for _ in range(self.rows))

    def __iter__(self) -> Iterator[Example]:
        reader, draws = _Reader(self.wanted, "sft", self.columns), random.Random(self.seed)
        for number, source in enumerate(self.sources):
            for example in reader.examples_of(number, source):
                if (draws.random() < self.share) == self.held_out:
                    yield example
        if reader.faults:  # a file has changed since it was checked
            raise InputRefused(*bounded(reader.faults))


@dataclass(frozen=True, slots=True)
class TrainingData:
    """`detected`: the formats were found from the keys, not set by the user.

    `processor` is the one of the model's checkpoint, which reads the images of rows.
    """

    sources: tuple[ReadSource, ...]
    detected: bool
    examples: tuple[Example, ...] | StreamedExamples
    processor: Any = None

    @property
    def is_streamed(self) -> bool:
        """Whether the examples are read from their files whenever they are needed."""
        return isinstance(self.examples, StreamedExamples)

    @property
    def file(self) -> str:
        """The names of the sources."""
        return ", ".join(source.named for source in self.sources)

    @property
    def format(self) -> str:
        """The formats of the sources."""
        return ", ".join(dict.fromkeys(form for source in self.sources for form in source.formats))


def read_training_data(
    named: Path | str | Sequence[str], wanted: Format = "auto", method: Method = "sft", columns: Sequence[str] = ()
) -> TrainingData:
    """Return every row of the sources; a path names one. `columns` are words NAME=COLUMN.

    Raises InputRefused with the first faults by file and line.
    """
    names = [str(named)] if isinstance(named, str | Path) else named
    reader = _Reader(format_of(wanted), method, columns_of(columns))
    sources = tuple(reader.read(number, data_source(name)) for number, name in enumerate(names))
    if reader.faults:
        raise InputRefused(*bounded(reader.faults))
    return TrainingData(sources, wanted == "auto", tuple(reader.examples))


def stream_training_data(names: Sequence[str], wanted: Format = "auto", columns: Sequence[str] = ()) -> TrainingData:
    """Check every row of the sources as `read_training_data` does, and keep none of them."""
    reader = _Reader(format_of(wanted), "sft", columns_of(columns))
    sources = tuple(data_source(name) for name in names)
    read = tuple(reader.read(number, source, keep=False) for number, source in enumerate(sources))
    if reader.faults:
        raise InputRefused(*bounded(reader.faults))
    rows = StreamedExamples(
        sources, format_of(wanted), sum(source.rows for source in read), columns=columns_of(columns)
    )
    return TrainingData(read, wanted == "auto", rows)


def check_data(settings: TrainSettings) -> None:
    """Check the names of all sources and the first rows of their files, which takes no model and no torch.

    Data sets of the hub are not fetched. Raises InputRefused as `read_training_data` does.
    """
    reader = _Reader(format_of(settings.format), settings.method, columns_of(settings.column), _HEAD)
    for number, name in enumerate((*settings.data, *settings.eval_data)):
        source = data_source(name)
        if source.hub is None:
            reader.read(number, source)
    if reader.faults:
        raise InputRefused(*bounded(reader.faults))


class _Reader:
    """Reads source after source and collects the faults of all; of a file the first rows only, if `head` is a number.

    Without a `head`, it digests the files too.
    """

    def __init__(self, wanted: RowFormat | None, method: Method, columns: Columns, head: int | None = None) -> None:
        require_known_names(columns, method)
        self._head, self._columns = head, columns
        self._wanted: RowFormat | None = wanted
        self._method: Method = method
        self._formats: dict[RowFormat, None] = {}
        self.examples: list[Example] = []
        self.faults: list[Diagnostic] = []

    def read(self, number: int, source: DataSource, *, keep: bool = True) -> ReadSource:
        """Read one source. Raises InputRefused for one without rows (T511)."""
        faults, rows = len(self.faults), 0
        self._formats = {}
        for example in self.examples_of(number, source):
            rows += 1
            if keep:
                self.examples.append(example)
        if not rows and len(self.faults) == faults:
            hint = "add a row to it, or name another file"
            raise InputRefused(Diagnostic("T511", f"`{source.named}` has no data", hint=hint))
        digests = {} if self._head else {str(path): digest(path) for path in source.files}
        return ReadSource(source.named, source.weight, tuple(self._formats), rows, digests)

    def examples_of(self, number: int, source: DataSource) -> Iterator[Example]:
        """Yield the rows of a source one by one. Raises InputRefused for a file that cannot be read."""
        if source.hub is not None:
            yield from self._parsed(number, source.named, read_hub_rows(source.hub))
        for path in source.files:
            self._require_fit(path)
            yield from self._parsed(number, str(path), read_rows(path))

    def _require_fit(self, path: Path) -> None:
        if path.suffix.lower() == ".txt" and (self._wanted not in (None, "text") or self._method != "sft"):
            wanted = self._wanted or f"--method {self._method}"
            message = f"`{path}` is plain text, and cannot have the format `{wanted}`"
            raise InputRefused(Diagnostic("T514", message))

    def _parsed(self, number: int, file: str, rows: Rows) -> Iterator[Example]:
        rows = ((line, renamed(value, self._columns)) for line, value in rows)
        first = list(islice(rows, self._head or _DETECTED))
        if self._columns and (fault := _same_fault(value for _, value in first)):
            place = Span(file, first[0][0], 1, first[0][0], 2)  # one message for a column that no row has
            self.faults.append(Diagnostic(fault.code, fault.message, place, hint=fault.hint))
            return
        form = self._wanted or detected((value for _, value in first), self._method)
        self._formats[form] = None
        for line, value in first if self._head else chain(first, rows):
            try:
                yield from [Example(file, line, row, number) for row in parsed(form, value, self._method)]
            except RowFault as fault:
                place = Span(file, line, 1, line, 2)
                self.faults.append(Diagnostic(fault.code, fault.message, place, hint=fault.hint))


def _same_fault(values: Iterable[object]) -> RowFault | None:
    """Return the fault that all rows have, None where one has another or none."""
    first: RowFault | None = None
    for value in values:
        if not isinstance(value, RowFault) or (first is not None and value.message != first.message):
            return None
        first = first or value
    return first


def digest(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
