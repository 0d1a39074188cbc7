"""Which tokens of a row are learned: its text as token ids with labels.

In: a `RowText` and its tokenizer. Out: `Labelled`. An answer's tokens begin where TRL's do: at the first token that its
prompt does not have by itself, and for a template's marks at the first token that holds a marked character. They end
with the last token that holds a character of the answer; a last answer's end with the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ktc.model.hf.token_borders import Border, Stretch, TextTokens
from ktc.training.tune.row_texts import Answer, RowText

NOT_LEARNED: Final = -100


@dataclass(frozen=True, slots=True)
class BorderInToken:
    """An answer that begins inside a token. `alone` is the end of its prompt as a text of its own, `within` in the row.

    `rewritten`: the template ends the prompt with other text. `spaces`: spaces at the end of the prompt that would have
    to begin the answer for a border between two tokens.
    """

    alone: str
    within: str
    rewritten: bool
    spaces: str


@dataclass(frozen=True, slots=True)
class Labelled:
    """Token ids and labels, -100 for positions without a loss. `joined` is the first border inside a token."""

    ids: list[int]
    labels: list[int]
    joined: BorderInToken | None = None


class Labeller:
    """Labels rows by one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokens = {special: TextTokens(tokenizer, special=special) for special in (False, True)}

    def label(self, row: RowText) -> Labelled:
        """Return the tokens of a row, with labels at those of its answers."""
        tokens = self._tokens[row.special]
        ids, places = tokens.read(row.text)
        if row.answers is None:
            return Labelled(ids, list(ids))
        read = _TokenisedRow(row, tokens, ids, places)
        labels, joined = [NOT_LEARNED] * len(ids), None
        for answer in row.answers:
            begin = tokens.border(answer.prompt, ids)
            start, end = read.learned(answer, begin)
            labels[start:end] = ids[start:end]
            if begin.is_inside_token and joined is None:
                joined = read.joined(answer, begin)
        return Labelled(ids, labels, joined)


@dataclass(frozen=True, slots=True)
class _TokenisedRow:
    """A row and its tokens; `places` are the characters of each, None for a tokenizer in Python."""

    row: RowText
    tokens: TextTokens
    ids: list[int]
    places: list[Stretch] | None

    def learned(self, answer: Answer, begin: Border) -> Stretch:
        """Return the first token of an answer and the one after its last."""
        places = self.places or []
        inside = [at for at, (first, end) in enumerate(places) if first < answer.end and end > answer.start]
        start = inside[0] if self.row.marked and inside else begin.at
        if answer.end == len(self.row.text) and not self.row.marked:
            return start, len(self.ids)
        if inside:
            return start, inside[-1] + 1
        after = self.tokens.border(self.row.text[: answer.end], self.ids)
        return start, after.at + after.is_inside_token

    def joined(self, answer: Answer, begin: Border) -> BorderInToken:
        """Describe a border inside a token."""
        decode, places = self.tokens.tokenizer.decode, self.places
        later = (at for at in range(begin.at, len(self.ids)) if places is None or places[at][1] > answer.start)
        last = next(later, begin.at)
        prompt = answer.prompt.rstrip()
        helps = not self.tokens.border(prompt, self.ids).is_inside_token
        spaces = answer.prompt[len(prompt) :] if helps else ""
        rewritten = answer.start < len(answer.prompt)
        return BorderInToken(decode(list(begin.alone)), decode(self.ids[begin.at : last + 1]), rewritten, spaces)
