"""Training data as tokens with labels: the tokenizer's template applied, and the answers located in its output.

In: `TrainingData`, a tokenizer and the longest sequence. Out: `TokenisedData`, rows of `input_ids` and `labels` (-100
for positions without a loss), with a summary. Refused: sequences that are too long without `truncate` (T517), a
template in which the answers cannot be found (T518), no answer left (T519).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from ktc.diagnostics import Diagnostic, InputRefused, Span
from ktc.stage_progress import counted
from ktc.text_files import bounded
from ktc.tune.examples import Example, TrainingData, Turn
from ktc.tune.settings import Template

if TYPE_CHECKING:
    from datasets import Dataset

NOT_LEARNED: Final = -100
_CHAT = frozenset({"system", "user", "assistant", "tool"})
_BINS = 8

Stretch = tuple[int, int]


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
    """Return every row as at most `limit` tokens. Raise InputRefused (T517, T518, T519)."""
    writer = _Writer(tokenizer, template)
    faults, too_long, dropped = list[Diagnostic](), list[tuple[int, int]](), 0
    rows: list[tuple[list[int], list[int]]] = []
    for example in counted(data.examples, len(data.examples)):
        try:
            ids, labels = writer.encode(example.turns, train_on_prompt)
        except _Unfound as error:
            faults.append(_at(data.file, example, "T518", str(error)))
            continue
        if len(ids) > limit:
            too_long.append((example.line, len(ids)))
            ids, labels = ids[:limit], labels[:limit]
        if all(label == NOT_LEARNED for label in labels[1:]):
            dropped += 1
        else:
            rows.append((ids, labels))
    if too_long and not truncate:
        faults += _too_long(data.file, too_long, limit)
    if faults:
        raise InputRefused(*bounded(faults))
    if not rows:
        hint = "give more `--length`" if too_long else "`--train-on-prompt` trains on questions too"
        raise InputRefused(Diagnostic("T519", f"no row of `{data.file}` has an answer left to train on", hint=hint))
    summary = _summary(data, writer, rows, limit, len(too_long), dropped)
    return TokenisedData(
        tuple(ids for ids, _ in rows), tuple(labels for _, labels in rows), summary, writer.notes(data)
    )


def _at(file: str, example: Example, code: str, message: str) -> Diagnostic:
    hint = "`--train-on-prompt` trains on everything, `--template plain` uses no template"
    return Diagnostic(code, message, Span(file, example.line, 1, example.line, 2), hint=hint)


def _too_long(file: str, found: Sequence[tuple[int, int]], limit: int) -> Iterator[Diagnostic]:
    hint = f"`--truncate` cuts them, `--length {max(length for _, length in found)}` accepts all of them"
    for line, length in found:
        message = f"a row of {length} tokens, where {limit} are the longest"
        yield Diagnostic("T517", message, Span(file, line, 1, line, 2), hint=hint)


# Texts ---------------------------------------------------------------------------------------------------------------
class _Unfound(Exception):
    """An answer cannot be located in the template's output, or the template refuses the turns."""


class _Writer:
    """Formats rows as text with the spans to train on, and tokenises them."""

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self.uses_template = self._has_template and template == "auto"
        self._asked_plain = template == "plain"
        self._marks = self.uses_template and "{% generation" in _text_of(tokenizer.chat_template)
        self._begin = _begin(tokenizer)
        self._end = str(tokenizer.eos_token or "")

    def notes(self, data: TrainingData) -> tuple[Diagnostic, ...]:
        """Return a warning if a conversation is formatted without a template by default."""
        is_chat = data.examples[0].turns[0].role in _CHAT
        if self._has_template or self._asked_plain or not is_chat:
            return ()
        message = "the tokenizer has no chat template: turns are joined by line breaks, and an answer ends the text"
        hint = "prompt the tuned model the same way; `--template plain` silences this warning"
        return (Diagnostic("T520", message, hint=hint, severity="warning"),)

    def encode(self, turns: tuple[Turn, ...], everything: bool) -> tuple[list[int], list[int]]:
        """Return token ids and labels of one row. Raise _Unfound."""
        from jinja2 import TemplateError

        chat = self.uses_template and turns[0].role in _CHAT
        try:
            if chat and self._marks and not everything:
                return self._marked(turns)
            text, learned = self._rendered(turns, everything) if chat else self._joined(turns)
        except TemplateError as error:  # a template refuses unknown roles
            raise _Unfound(f"the chat template refuses these turns: {error}") from error
        if everything:
            learned = [(0, len(text))]
        return self._tokens(text, learned)

    def _marked(self, turns: tuple[Turn, ...]) -> tuple[list[int], list[int]]:
        """Return the text and its spans where the template marks the assistant's text."""
        found = self._tokenizer.apply_chat_template(
            _messages(turns), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = list(found["input_ids"]), found["assistant_masks"]
        return ids, [token if kept else NOT_LEARNED for token, kept in zip(ids, mask, strict=True)]

    def _rendered(self, turns: tuple[Turn, ...], everything: bool) -> tuple[str, list[Stretch]]:
        text = self._template(turns)
        if everything:
            return text, []
        places = [number for number, turn in enumerate(turns) if turn.is_answer]
        return text, [self._stretch(text, turns, place) for place in places]

    def _stretch(self, text: str, turns: tuple[Turn, ...], place: int) -> Stretch:
        """Return the span from the end of the generation prompt to the end of the answer's turn.

        A template may format the last answer differently from earlier ones (with an empty thought before it), so the
        end of an earlier one is searched after its content.
        """
        before = self._template(turns[:place], prompt=True)
        until = self._template(turns[: place + 1])
        start = len(before)
        if not text.startswith(before):
            raise _Unfound(f"the template writes turn {place + 1} differently from its generation prompt")
        if text.startswith(until):
            return start, len(until)
        content = turns[place].content.strip()
        tail = until[until.rindex(content) + len(content) :] if content in until else ""
        found = text.find(content + tail, start)
        if found < 0:
            raise _Unfound(f"the answer in turn {place + 1} is not found in the output of the template")
        return start, found + len(content) + len(tail)

    def _template(self, turns: tuple[Turn, ...], prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(_messages(turns), tokenize=False, add_generation_prompt=prompt)

    def _joined(self, turns: tuple[Turn, ...]) -> tuple[str, list[Stretch]]:
        """Join turns without a template: questions end with a line break, answers with the end-of-text token."""
        text, learned = self._begin, list[Stretch]()
        for turn in turns:
            written = turn.content + (self._end if turn.is_answer else "" if turn.role == "prompt" else "\n")
            if turn.is_answer:
                learned.append((len(text), len(text) + len(written)))
            text += written
        return text, learned

    def _tokens(self, text: str, learned: list[Stretch]) -> tuple[list[int], list[int]]:
        if not getattr(self._tokenizer, "is_fast", False):
            return self._piecewise(text, learned)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, places = list(found["input_ids"]), found["offset_mapping"]
        kept = (any(start <= first < end for start, end in learned) for first, _ in places)
        return ids, [token if keep else NOT_LEARNED for token, keep in zip(ids, kept, strict=True)]

    def _piecewise(self, text: str, learned: list[Stretch]) -> tuple[list[int], list[int]]:
        """Tokenise the spans one by one, for a tokenizer without offsets."""
        ids, labels, done = list[int](), list[int](), 0
        for start, end in [*learned, (len(text), len(text))]:
            for piece, keep in ((text[done:start], False), (text[start:end], True)):
                tokens = list(self._tokenizer(piece, add_special_tokens=False)["input_ids"]) if piece else []
                ids += tokens
                labels += tokens if keep else [NOT_LEARNED] * len(tokens)
            done = end
        return ids, labels

    def pieces(self, ids: list[int], labels: list[int]) -> Iterator[tuple[str, bool]]:
        """Return a row as text again, cut where the loss begins and ends."""
        start = 0
        for place in range(1, len(ids) + 1):
            if place == len(ids) or (labels[place] == NOT_LEARNED) != (labels[start] == NOT_LEARNED):
                yield self._tokenizer.decode(ids[start:place]), labels[start] != NOT_LEARNED
                start = place


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in turns]


def _text_of(template: object) -> str:
    """Return the template's text: a tokenizer has one template, or several by name."""
    return template if isinstance(template, str) else str(template)


def _begin(tokenizer: Any) -> str:
    """Return the token that the tokenizer puts before every text, if any."""
    first = tokenizer("a")["input_ids"][:1]
    return str(tokenizer.bos_token) if tokenizer.bos_token and first == [tokenizer.bos_token_id] else ""


# Summary -------------------------------------------------------------------------------------------------------------
def _summary(
    data: TrainingData,
    writer: _Writer,
    rows: Sequence[tuple[list[int], list[int]]],
    limit: int,
    cut: int,
    dropped: int,
) -> DataSummary:
    lengths = [len(ids) for ids, _ in rows]
    is_chat = data.examples[0].turns[0].role in _CHAT
    return DataSummary(
        file=data.file,
        format=data.format,
        detected=data.detected,
        template=("chat" if writer.uses_template else "plain") if is_chat else "none",
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
        first=tuple(writer.pieces(*rows[0])),
    )


def _bins(lengths: Sequence[int]) -> Iterator[Bin]:
    longest = max(lengths)
    width = max(1, -(-longest // _BINS))
    for low in range(1, longest + 1, width):
        yield Bin(low, low + width - 1, sum(low <= length < low + width for length in lengths))
