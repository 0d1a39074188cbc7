"""Training data as tokens with labels.

In: `TrainingData`, a tokenizer and the longest sequence. Out: `TokenisedData`, rows of `input_ids` and `labels` (-100
for positions without a loss), with a summary, and warnings about turns without a template (T520) and answers that begin
inside a token (T543). Refused: sequences that are too long without `truncate` (T517), a template in which the answers
cannot be found (T518), no answer left (T519).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.stage_progress import counted
from ktc.foundation.text_files import bounded
from ktc.training.tune.examples import Example, ReadSource, TrainingData
from ktc.training.tune.labels import NOT_LEARNED, BorderInToken, Labelled, Labeller
from ktc.training.tune.row_formats import Row
from ktc.training.tune.row_texts import CHAT, AnswerNotFound, RowWriter
from ktc.training.tune.settings import Template
from ktc.training.tune.turns import Turn

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
    """Counts over the rows; `learned` counts tokens with a loss. A pair of answers is one row of two sequences.

    `template` is "chat", "plain" or "none". `lengths` counts sequences.
    """

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
    sources: tuple[ReadSource, ...]


@dataclass(frozen=True, slots=True)
class TokenisedData:
    """`input_ids` and `labels` row by row; `notes` are warnings about how they were made.

    Of pairs these are the chosen answers after their prompts, and `rejected` the others. `good` judges each row.
    """

    input_ids: tuple[list[int], ...]
    labels: tuple[list[int], ...]
    summary: DataSummary
    notes: tuple[Diagnostic, ...]
    rejected: tuple[Labelled, ...] = ()
    good: tuple[bool, ...] = ()

    def dataset(self) -> Dataset:
        """Return the rows as a dataset of TRL's tokenised form."""
        from datasets import Dataset

        return Dataset.from_dict(self._columns())

    def _columns(self) -> dict[str, list[Any]]:
        if not self.rejected and not self.good:
            return {"input_ids": list(self.input_ids), "labels": list(self.labels)}
        starts = [_first_learned(labels) for labels in self.labels]
        if self.good:
            return {
                "prompt_ids": [ids[:at] for ids, at in zip(self.input_ids, starts, strict=True)],
                "completion_ids": [ids[at:] for ids, at in zip(self.input_ids, starts, strict=True)],
                "label": list(self.good),
            }
        # Both answers begin at the first token that either of them has for its own.
        starts = [min(at, _first_learned(row.labels)) for at, row in zip(starts, self.rejected, strict=True)]
        return {
            "prompt_ids": [ids[:at] for ids, at in zip(self.input_ids, starts, strict=True)],
            "chosen_ids": [ids[at:] for ids, at in zip(self.input_ids, starts, strict=True)],
            "rejected_ids": [row.ids[at:] for row, at in zip(self.rejected, starts, strict=True)],
        }


@dataclass(slots=True)
class _Tokenised:
    """The rows until now. A row is one sequence, of a pair two; each row has its source's number."""

    rows: list[tuple[Labelled, ...]]
    examples: list[Example]
    faults: list[Diagnostic]
    too_long: list[tuple[Example, int]]
    joined: list[tuple[Example, BorderInToken]]
    dropped: int = 0


def tokenise(
    data: TrainingData,
    tokenizer: Any,
    *,
    limit: int,
    truncate: bool = False,
    template: Template = "auto",
    train_on_prompt: bool = False,
    seed: int = 0,
) -> TokenisedData:
    """Return every row as at most `limit` tokens, as often as the weight of its source says.

    Raises:
        InputRefused: T517 for rows that are too long without `truncate`, T518 for a template in which answers cannot be
            found, T519 if no answer is left.
    """
    writer, labeller = RowWriter(tokenizer, template), Labeller(tokenizer)
    known = _Tokenised([], [], [], [], [])
    for example in counted(data.examples, len(data.examples)):
        try:
            row = _sequences(example.row, writer, labeller, train_on_prompt)
        except AnswerNotFound as error:
            known.faults.append(_at(example, "T518", str(error)))
            continue
        _add(known, example, row, limit)
    faults = known.faults + ([] if truncate else list(_too_long(known.too_long, limit)))
    if faults:
        raise InputRefused(*bounded(faults))
    if not known.rows:
        hint = "give more `--length`" if known.too_long else "`--train-on-prompt` trains on questions too"
        raise InputRefused(Diagnostic("T519", f"no row of `{data.file}` has an answer left to train on", hint=hint))
    notes = (
        *_without_template(data, writer, template),
        *_empty(data),
        *_joined(known.joined),
        *_tools_not_written(data, writer),
    )
    order = weighted([example.source for example in known.examples], [source.weight for source in data.sources], seed)
    rows = [known.rows[number] for number in order]
    used_template = ("chat" if writer.uses_template else "plain") if _is_chat(data) else "none"
    cut = (len(known.too_long), known.dropped)
    return TokenisedData(
        tuple(row[0].ids for row in rows),
        tuple(row[0].labels for row in rows),
        _summary(data, rows, tokenizer, template=used_template, limit=limit, cut=cut),
        notes,
        tuple(row[1] for row in rows if len(row) > 1),
        tuple(good for number in order if (good := known.examples[number].row.good) is not None),
    )


def _sequences(row: Row, writer: RowWriter, labeller: Labeller, everything: bool) -> tuple[Labelled, ...]:
    """Return the sequences of a row: of a pair the chosen one and the rejected one. Raises AnswerNotFound."""
    if row.rejected is None and row.good is None:
        return (labeller.label(writer.write(row.turns, everything, row.tools)),)
    answers = (row.turns,) if row.rejected is None else (row.turns, row.rejected)
    return tuple(labeller.label(writer.write_completion(turns, row.tools)) for turns in answers)


def _add(known: _Tokenised, example: Example, row: tuple[Labelled, ...], limit: int) -> None:
    """Add a row, cut to `limit` tokens. It is dropped if nothing of an answer is left."""
    longest = max(len(sequence.ids) for sequence in row)
    if longest > limit:
        known.too_long.append((example, longest))
    cut = tuple(Labelled(sequence.ids[:limit], sequence.labels[:limit], sequence.joined) for sequence in row)
    if any(all(label == NOT_LEARNED for label in sequence.labels[1:]) for sequence in cut):
        known.dropped += 1
        return
    known.rows.append(cut)
    known.examples.append(example)
    if joined := next((sequence.joined for sequence in cut if sequence.joined is not None), None):
        known.joined.append((example, joined))


def weighted(sources: Sequence[int], weights: Sequence[float], seed: int) -> list[int]:
    """Return the numbers of the rows, each as often as the weight of its source says.

    A weight of 2.5 takes every row twice, and half of them, chosen by `seed`, a third time. At least one row of a
    source remains.
    """
    order = list[int]()
    for source, weight in enumerate(weights):
        rows = [number for number, of_source in enumerate(sources) if of_source == source]
        total = max(1, round(len(rows) * weight)) if rows else 0
        times, rest = divmod(total, len(rows) or 1)
        order += rows * times + sorted(random.Random(f"{seed} {source}").sample(rows, rest))
    return order


def _at(example: Example, code: str, message: str) -> Diagnostic:
    hint = "`--template plain` uses no template"
    if example.row.rejected is None and example.row.good is None:
        hint = f"`--train-on-prompt` trains on everything, {hint}"
    return Diagnostic(code, message, example.place, hint=hint)


def _too_long(too_long: Sequence[tuple[Example, int]], limit: int) -> Iterator[Diagnostic]:
    hint = (
        f"`--truncate` cuts them, `--length {max((length for _, length in too_long), default=0)}` accepts all of them"
    )
    for example, length in too_long:
        yield Diagnostic("T517", f"a row of {length} tokens, where {limit} are the longest", example.place, hint=hint)


def _first_learned(labels: Sequence[int]) -> int:
    return next((at for at, label in enumerate(labels) if label != NOT_LEARNED), len(labels))


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
    rows = [row for row in data.examples if any(_is_empty_answer(turn) for turn in row.turns)]
    if rows:
        message = "the answer is empty: the row teaches the model to stop at once"
        message += "" if len(rows) == 1 else f" ({len(rows)} rows have such an answer)"
        hint = "remove such rows if that is not intended"
        yield Diagnostic("T544", message, rows[0].place, hint=hint, severity="warning")


def _is_empty_answer(turn: Turn) -> bool:
    return turn.is_answer and not turn.content.strip() and not turn.calls_tools


def _tools_not_written(data: TrainingData, writer: RowWriter) -> Iterator[Diagnostic]:
    """Yield a warning if the template leaves the descriptions of tools out, by the first row that has some."""
    rows = [row for row in data.examples if row.row.tools]
    if rows and not writer.writes_tools(rows[0].turns, rows[0].row.tools):
        message = f"the chat template does not write `tools`: the model will not see them ({len(rows)} rows have some)"
        hint = "take a tokenizer whose chat template writes tools, or remove them from the rows"
        yield Diagnostic("T547", message, rows[0].place, hint=hint, severity="warning")


def _joined(borders: Sequence[tuple[Example, BorderInToken]]) -> Iterator[Diagnostic]:
    """Yield one warning for all rows, with the first of them and their number."""
    if not borders:
        return
    example, first = borders[0]
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
    yield Diagnostic("T543", message, example.place, hint=hint, severity="warning")


def _shown(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# Summary -------------------------------------------------------------------------------------------------------------
def _summary(
    data: TrainingData,
    rows: Sequence[tuple[Labelled, ...]],
    tokenizer: Any,
    *,
    template: str,
    limit: int,
    cut: tuple[int, int],
) -> DataSummary:
    """Return the counts; `cut` are the numbers of rows that were cut and that were dropped."""
    sequences = [sequence for row in rows for sequence in row]
    lengths = [len(sequence.ids) for sequence in sequences]
    return DataSummary(
        file=data.file,
        format=data.format,
        detected=data.detected,
        template=template,
        rows=len(rows),
        tokens=sum(lengths),
        learned=sum(label != NOT_LEARNED for sequence in sequences for label in sequence.labels),
        shortest=min(lengths),
        median=median(lengths),
        longest=max(lengths),
        limit=limit,
        cut=cut[0],
        dropped=cut[1],
        lengths=tuple(_bins(lengths)),
        first=tuple(_pieces(tokenizer, sequences[0].ids, sequences[0].labels)),
        sources=data.sources,
    )


def _is_chat(data: TrainingData) -> bool:
    return any(example.turns[0].role in CHAT for example in data.examples)


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
