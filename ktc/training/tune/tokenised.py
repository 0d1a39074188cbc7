"""Training data as tokens with labels.

In: `TrainingData`, a tokenizer and the longest sequence. Out: `TokenisedData`, rows of `input_ids` and `labels` (-100
for positions without a loss), with a summary, and warnings about turns without a template (T520) and answers that begin
inside a token (T543). Refused: sequences that are too long without `truncate` (T517), a template in which the answers
cannot be found (T518), no answer left (T519).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.foundation.stage_progress import counted
from ktc.foundation.text_files import bounded
from ktc.training.tune.examples import Example, TrainingData
from ktc.training.tune.labels import NOT_LEARNED, BorderInToken, Labeller
from ktc.training.tune.row_texts import CHAT, AnswerNotFound, RowWriter
from ktc.training.tune.settings import Template

if TYPE_CHECKING:
    from datasets import Dataset

_BINS: Final = 8
_SHOWN: Final = 40  # characters of a prompt's end in a message


@dataclass(frozen=True, slots=True)
class Bin:
    """The number of rows with `low` to `high` tokens."""

    low: int
    high: int
    rows: int


@dataclass(frozen=True, slots=True)
class DataSummary:
    """Counts over the rows. `template` is "chat", "plain" or "none"; `learned` counts tokens with a loss."""

    file: str
    format: str
    detected: bool
    template: str
    rows: int
    tokens: int
    learned: int
    shortest: int
    median: float
    longest: int
    limit: int
    cut: int
    dropped: int
    lengths: tuple[Bin, ...]
    first: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class TokenisedData:
    """`input_ids` and `labels` row by row; `notes` are warnings about how they were made."""

    input_ids: tuple[list[int], ...]
    labels: tuple[list[int], ...]
    summary: DataSummary
    notes: tuple[Diagnostic, ...]

    def dataset(self) -> Dataset:
        """Return the rows as a dataset of TRL's tokenised form."""
        from datasets import Dataset

        return Dataset.from_dict({"input_ids": list(self.input_ids), "labels": list(self.labels)})


def tokenise(
    data: TrainingData,
    tokenizer: Any,
    *,
    limit: int,
    truncate: bool = False,
    template: Template = "auto",
    train_on_prompt: bool = False,
) -> TokenisedData:
    """Return every row as at most `limit` tokens.

    Raises:
        InputRefused: T517 for rows that are too long without `truncate`, T518 for a template in which answers cannot be
            found, T519 if no answer is left.
    """
    writer, labeller = RowWriter(tokenizer, template), Labeller(tokenizer)
    faults, dropped = list[Diagnostic](), 0
    too_long, joined = list[tuple[int, int]](), list[tuple[int, BorderInToken]]()
    rows: list[tuple[list[int], list[int]]] = []
    for example in counted(data.examples, len(data.examples)):
        try:
            row = labeller.label(writer.write(example.turns, train_on_prompt))
        except AnswerNotFound as error:
            faults.append(_at(data.file, example, "T518", str(error)))
            continue
        ids, labels = row.ids[:limit], row.labels[:limit]
        if len(row.ids) > limit:
            too_long.append((example.line, len(row.ids)))
        if all(label == NOT_LEARNED for label in labels[1:]):
            dropped += 1
            continue
        rows.append((ids, labels))
        if row.joined is not None:
            joined.append((example.line, row.joined))
    if too_long and not truncate:
        faults += _too_long(data.file, too_long, limit)
    if faults:
        raise InputRefused(*bounded(faults))
    if not rows:
        hint = "give more `--length`" if too_long else "`--train-on-prompt` trains on questions too"
        raise InputRefused(Diagnostic("T519", f"no row of `{data.file}` has an answer left to train on", hint=hint))
    used_template = ("chat" if writer.uses_template else "plain") if _is_chat(data) else "none"
    return TokenisedData(
        tuple(ids for ids, _ in rows),
        tuple(labels for _, labels in rows),
        _summary(data, rows, tokenizer, template=used_template, limit=limit, cut=len(too_long), dropped=dropped),
        (*_without_template(data, writer, template), *_empty(data), *_joined(data.file, joined)),
    )


def _at(file: str, example: Example, code: str, message: str) -> Diagnostic:
    hint = "`--train-on-prompt` trains on everything, `--template plain` uses no template"
    return Diagnostic(code, message, Span(file, example.line, 1, example.line, 2), hint=hint)


def _too_long(file: str, too_long: Sequence[tuple[int, int]], limit: int) -> Iterator[Diagnostic]:
    hint = f"`--truncate` cuts them, `--length {max(length for _, length in too_long)}` accepts all of them"
    for line, length in too_long:
        message = f"a row of {length} tokens, where {limit} are the longest"
        yield Diagnostic("T517", message, Span(file, line, 1, line, 2), hint=hint)


# Warnings ------------------------------------------------------------------------------------------------------------
def _without_template(data: TrainingData, writer: RowWriter, asked: Template) -> Iterator[Diagnostic]:
    """Yield a warning if conversations are formatted without a template by default."""
    if writer.has_template or asked == "plain" or not _is_chat(data):
        return
    message = "the tokenizer has no chat template: turns are joined by line breaks, and an answer ends the text"
    hint = "prompt the tuned model the same way; `--template plain` silences this warning"
    yield Diagnostic("T520", message, hint=hint, severity="warning")


def _empty(data: TrainingData) -> Iterator[Diagnostic]:
    """Yield one warning for all rows with an answer that has no text."""
    has_empty = (any(turn.is_answer and not turn.content.strip() for turn in row.turns) for row in data.examples)
    lines = [row.line for row, empty in zip(data.examples, has_empty, strict=True) if empty]
    if lines:
        message = "the answer is empty: the row teaches the model to stop at once"
        message += "" if len(lines) == 1 else f" ({len(lines)} rows have such an answer)"
        hint = "remove such rows if that is not intended"
        yield Diagnostic("T544", message, Span(data.file, lines[0], 1, lines[0], 2), hint=hint, severity="warning")


def _joined(file: str, borders: Sequence[tuple[int, BorderInToken]]) -> Iterator[Diagnostic]:
    """Yield one warning for all rows, with the first of them and their number."""
    if not borders:
        return
    line, first = borders[0]
    alone, within = _shown(first.alone), _shown(first.within)
    message = (
        f"the answer begins inside the token `{within}`, which is learned whole; the prompt alone ends with `{alone}`"
    )
    hint = "the tuned model is asked with other tokens than it learned from: end a prompt where a token ends"
    if first.rewritten:
        message = f"the template ends the prompt alone with `{alone}`; the row has `{within}` there, which is learned"
        hint = "the tuned model is asked with a prompt that it did not learn from: mend the template"
    elif first.spaces:
        hint = "move the white space at the prompt's end to the answer's start, here and when the model is asked"
    message += "" if len(borders) == 1 else f" ({len(borders)} rows have such a border)"
    yield Diagnostic("T543", message, Span(file, line, 1, line, 2), hint=hint, severity="warning")


def _shown(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# Summary -------------------------------------------------------------------------------------------------------------
def _summary(
    data: TrainingData, rows: Sequence[tuple[list[int], list[int]]], tokenizer: Any, *,
    template: str, limit: int, cut: int, dropped: int,
) -> DataSummary:  # fmt: skip
    lengths = [len(ids) for ids, _ in rows]
    return DataSummary(
        file=data.file,
        format=data.format,
        detected=data.detected,
        template=template,
        rows=len(rows),
        tokens=sum(lengths),
        learned=sum(label != NOT_LEARNED for _, labels in rows for label in labels),
        shortest=min(lengths),
        median=median(lengths),
        longest=max(lengths),
        limit=limit,
        cut=cut,
        dropped=dropped,
        lengths=tuple(_bins(lengths)),
        first=tuple(_pieces(tokenizer, *rows[0])),
    )


def _is_chat(data: TrainingData) -> bool:
    return data.examples[0].turns[0].role in CHAT


def _pieces(tokenizer: Any, ids: list[int], labels: list[int]) -> Iterator[tuple[str, bool]]:
    """Return a row as text again, cut where the loss begins and ends.

    A piece is the text that its tokens add: tokenizers drop a space at the start of a decoded text.
    """
    start, before = 0, ""
    for place in range(1, len(ids) + 1):
        if place == len(ids) or (labels[place] == NOT_LEARNED) != (labels[start] == NOT_LEARNED):
            until = tokenizer.decode(ids[:place])
            added = until.removeprefix(before) if until.startswith(before) else tokenizer.decode(ids[start:place])
            yield added, labels[start] != NOT_LEARNED
            start, before = place, until


def _bins(lengths: Sequence[int]) -> Iterator[Bin]:
    longest = max(lengths)
    width = max(1, -(-longest // _BINS))
    for low in range(1, longest + 1, width):
        yield Bin(low, low + width - 1, sum(low <= length < low + width for length in lengths))
