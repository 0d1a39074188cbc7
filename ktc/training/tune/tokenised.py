"""Training data as tokens with labels.

In: `TrainingData`, a tokenizer and the longest sequence. Out: `TokenisedData`, rows of `input_ids` and `labels` (-100
for positions without a loss), with a summary, and warnings about turns without a template (T520) and answers that begin
inside a token (T543). Refused: sequences that are too long without `truncate` (T517), a template in which the answers
cannot be found (T518), no answer left (T519).
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.stage_progress import counted
from ktc.foundation.text_files import bounded
from ktc.training.tune.examples import Example, ReadSource, TrainingData
from ktc.training.tune.image_rows import FILES, TEXT, RejectedRow, RowImages, located, with_placeholders
from ktc.training.tune.labels import NOT_LEARNED, BorderInToken, Labelled, Labeller
from ktc.training.tune.row_formats import Row
from ktc.training.tune.row_texts import CHAT, AnswerNotFound, RowWriter
from ktc.training.tune.settings import Template
from ktc.training.tune.token_rows import TokenFile
from ktc.training.tune.turns import Turn

if TYPE_CHECKING:
    from datasets import Dataset

_BINS: Final = 8
_FIRST: Final = 2  # rows of a file that are kept in memory too
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
class StoredRows:
    """Rows in a file, and the numbers of those to learn from."""

    file: TokenFile
    order: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenisedData:
    """`input_ids` and `labels` row by row; `notes` are warnings about how they were made.

    Of pairs these are the chosen answers after their prompts, and `rejected` the others. `good` judges each row. Of
    `stored` rows, only the first ones are here.
    """

    input_ids: tuple[list[int], ...]
    labels: tuple[list[int], ...]
    summary: DataSummary
    notes: tuple[Diagnostic, ...]
    rejected: tuple[Labelled, ...] = ()
    good: tuple[bool, ...] = ()
    stored: StoredRows | None = None
    images: tuple[RowImages, ...] = ()
    digest: str = ""
    """Of the tokens and labels of all rows, before weights repeat them."""

    def first_rows(self, count: int) -> TokenisedData:
        """Return the first rows alone, in memory."""
        return replace(
            self, input_ids=self.input_ids[:count], labels=self.labels[:count], rejected=self.rejected[:count],
            good=self.good[:count], images=self.images[:count], stored=None,
        )  # fmt: skip

    def dataset(self) -> Dataset:
        """Return the rows as a dataset of TRL's tokenised form."""
        from datasets import Dataset

        if self.stored is not None:
            return self.stored.file.dataset(self.stored.order)
        return Dataset.from_dict(self._columns())

    def _columns(self) -> dict[str, list[Any]]:
        if not self.rejected and not self.good:
            columns: dict[str, list[Any]] = {"input_ids": list(self.input_ids), "labels": list(self.labels)}
            if self.images:
                columns[TEXT] = [row.text for row in self.images]
                columns[FILES] = [list(row.files) for row in self.images]
            return columns
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
class _Noted:
    """The first row with something to warn of, and the number of all."""

    first: Example | None = None
    rows: int = 0

    def note(self, example: Example) -> None:
        self.first = self.first or example
        self.rows += 1


@dataclass(slots=True)
class _Tokenised:
    """The rows until now. A row is one sequence, of a pair two; `file` has them if they are not kept in `rows`."""

    file: TokenFile | None
    rows: list[tuple[Labelled, ...]]
    sources: array[int]
    lengths: list[array[int]]
    learned: list[array[int]]
    good: list[bool]
    faults: list[Diagnostic]
    too_long: list[tuple[Example, int]]
    empty: _Noted
    with_tools: _Noted
    chats: _Noted
    joined: _Noted
    border: BorderInToken | None = None  # of the first row of `joined`
    images: list[RowImages] = field(default_factory=list[RowImages])
    digest: Any = field(default_factory=hashlib.sha256)
    dropped: int = 0
    cut: int = 0


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
    known = _nothing(file := TokenFile() if data.is_streamed else None)
    for example in counted(data.examples, len(data.examples)):
        _note(known, example)
        try:
            row = _sequences(example.row, writer, labeller, train_on_prompt)
            images = _images(data, example, writer, train_on_prompt)
            if images.files:
                row = (with_placeholders(data.processor, images, row[0], everything=train_on_prompt),)
        except RejectedRow as error:
            known.faults.append(Diagnostic("T549", str(error), example.place, hint=error.hint))
            continue
        except AnswerNotFound as error:
            known.faults.append(_at(example, "T518", str(error)))
            continue
        _add(known, example, row, limit, keeps_long=not truncate, images=images)
    faults = known.faults + list(_too_long(known.too_long, limit))
    if faults:
        raise InputRefused(*bounded(faults))
    if not known.sources:
        hint = "give more `--length`" if known.cut else "`--train-on-prompt` trains on questions too"
        raise InputRefused(Diagnostic("T519", f"no row of `{data.file}` has an answer left to train on", hint=hint))
    notes = (
        *_without_template(known, writer, template),
        *_empty(known.empty),
        *_joined(known.joined, known.border),
        *_tools_not_written(known.with_tools, writer),
    )
    order = weighted(known.sources, [source.weight for source in data.sources], seed)
    used_template = ("chat" if writer.uses_template else "plain") if known.chats.rows else "none"
    # Of rows in a file, the first ones are kept for show.
    rows = known.rows if file else [known.rows[number] for number in order]
    return TokenisedData(
        tuple(row[0].ids for row in rows),
        tuple(row[0].labels for row in rows),
        _summary(data, known, tokenizer, template=used_template, limit=limit, order=order),
        notes,
        tuple(row[1] for row in rows if len(row) > 1),
        tuple(known.good[number] for number in order) if known.good else (),
        None if file is None else StoredRows(file, order),
        tuple(known.images[number] for number in order) if any(row.files for row in known.images) else (),
        known.digest.hexdigest(),
    )


def _nothing(file: TokenFile | None) -> _Tokenised:
    numbers = [array("I") for _ in range(4)]
    return _Tokenised(
        file, [], array("H"), numbers[:2], numbers[2:], [], [], [], _Noted(), _Noted(), _Noted(), _Noted()
    )  # fmt: skip


def _note(known: _Tokenised, example: Example) -> None:
    """Count a row with an empty answer, with tools, and of a conversation."""
    if any(_is_empty_answer(turn) for turn in example.turns):
        known.empty.note(example)
    if example.row.tools:
        known.with_tools.note(example)
    if example.turns[0].role in CHAT:
        known.chats.note(example)


def _sequences(row: Row, writer: RowWriter, labeller: Labeller, everything: bool) -> tuple[Labelled, ...]:
    """Return the sequences of a row: of a pair the chosen one and the rejected one. Raises AnswerNotFound."""
    if row.rejected is None and row.good is None:
        return (labeller.label(writer.write(row.turns, everything, row.tools)),)
    answers = (row.turns,) if row.rejected is None else (row.turns, row.rejected)
    return tuple(labeller.label(writer.write_completion(turns, row.tools)) for turns in answers)


def _images(data: TrainingData, example: Example, writer: RowWriter, everything: bool) -> RowImages:
    """Return the images of a row with its text; none for a row of text. Raises AnswerNotFound and RejectedRow."""
    files = tuple(located(image, example.file) for turn in example.turns for image in turn.images)
    if not files:
        return RowImages()
    if example.row.rejected is not None or example.row.good is not None:
        raise RejectedRow("preferences with images are not learned", "`--method sft` learns from answers about images")
    if not writer.uses_template:
        raise RejectedRow("images are placed by a chat template", "leave `--template plain` out")
    if data.processor is None:
        raise RejectedRow("rows with images are not streamed", "leave `streaming` out")
    return RowImages(writer.write(example.turns, everything, example.row.tools).text, files)


def _add(
    known: _Tokenised, example: Example, row: tuple[Labelled, ...], limit: int, *, keeps_long: bool, images: RowImages
) -> None:
    """Add a row, cut to `limit` tokens. It is dropped if nothing of an answer is left."""
    longest = max(len(sequence.ids) for sequence in row)
    known.cut += longest > limit
    if longest > limit and (keeps_long or images.files):  # no image is cut
        known.too_long.append((example, longest))
    cut = tuple(Labelled(sequence.ids[:limit], sequence.labels[:limit], sequence.joined) for sequence in row)
    if any(all(label == NOT_LEARNED for label in sequence.labels[1:]) for sequence in cut):
        known.dropped += 1
        return
    if known.file is not None:
        known.file.add(cut[0])
    if known.file is None or len(known.rows) < _FIRST:
        known.rows.append(cut)
    known.sources.append(example.source)
    if known.file is None:  # streamed rows have none
        known.images.append(images)
    known.digest.update(array("q", [len(cut), example.row.good is True]))
    for number, sequence in enumerate(cut):
        known.digest.update(array("q", [len(sequence.ids), *sequence.ids, *sequence.labels]))
        known.lengths[number].append(len(sequence.ids))
        known.learned[number].append(sum(label != NOT_LEARNED for label in sequence.labels))
    if example.row.good is not None:
        known.good.append(example.row.good)
    if joined := next((sequence.joined for sequence in cut if sequence.joined is not None), None):
        known.joined.note(example)
        known.border = known.border or joined


def weighted(sources: Sequence[int], weights: Sequence[float], seed: int) -> Sequence[int]:
    """Return the numbers of the rows, each as often as the weight of its source says.

    A weight of 2.5 takes every row twice, and half of them, chosen by `seed`, a third time. At least one row of a
    source remains.
    """
    if all(weight == 1 for weight in weights):
        return range(len(sources))
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
def _without_template(known: _Tokenised, writer: RowWriter, asked: Template) -> Iterator[Diagnostic]:
    """Yield a warning if conversations are formatted without a template by default."""
    if writer.has_template or asked == "plain" or not known.chats.rows:
        return
    message = "the tokenizer has no chat template: turns are joined by line breaks, and an answer ends the text"
    hint = "prompt the tuned model the same way; `--template plain` silences this warning"
    yield Diagnostic("T520", message, hint=hint, severity="warning")


def _empty(noted: _Noted) -> Iterator[Diagnostic]:
    """Yield one warning for all rows with an answer that has no text."""
    if noted.first is not None:
        message = "the answer is empty: the row teaches the model to stop at once"
        message += "" if noted.rows == 1 else f" ({noted.rows} rows have such an answer)"
        hint = "remove such rows if that is not intended"
        yield Diagnostic("T544", message, noted.first.place, hint=hint, severity="warning")


def _is_empty_answer(turn: Turn) -> bool:
    return turn.is_answer and not turn.content.strip() and not turn.calls_tools


def _tools_not_written(noted: _Noted, writer: RowWriter) -> Iterator[Diagnostic]:
    """Yield a warning if the template leaves the descriptions of tools out, by the first row that has some."""
    first = noted.first
    if first is not None and not writer.writes_tools(first.turns, first.row.tools):
        message = f"the chat template does not write `tools`: the model will not see them ({noted.rows} rows have some)"
        hint = "take a tokenizer whose chat template writes tools, or remove them from the rows"
        yield Diagnostic("T547", message, first.place, hint=hint, severity="warning")


def _joined(noted: _Noted, first: BorderInToken | None) -> Iterator[Diagnostic]:
    """Yield one warning for all rows, with the first of them and their number."""
    if noted.first is None or first is None:
        return
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
    message += "" if noted.rows == 1 else f" ({noted.rows} rows have such a border)"
    yield Diagnostic("T543", message, noted.first.place, hint=hint, severity="warning")


def _shown(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# Summary -------------------------------------------------------------------------------------------------------------
def _summary(
    data: TrainingData, known: _Tokenised, tokenizer: Any, *, template: str, limit: int, order: Sequence[int]
) -> DataSummary:
    """Return the counts over the rows in their `order`."""
    lengths = [column[number] for column in known.lengths if column for number in order]
    first = known.rows[order[0] if known.file is None else 0][0]
    return DataSummary(
        file=data.file,
        format=data.format,
        detected=data.detected,
        template=template,
        rows=len(order),
        tokens=sum(lengths),
        learned=sum(column[number] for column in known.learned if column for number in order),
        shortest=min(lengths),
        median=median(lengths),
        longest=max(lengths),
        limit=limit,
        cut=known.cut,
        dropped=known.dropped,
        lengths=tuple(_bins(lengths)),
        first=tuple(_pieces(tokenizer, first.ids, first.labels)),
        sources=data.sources,
    )


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
