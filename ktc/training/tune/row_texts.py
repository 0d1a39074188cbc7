"""Rows of training data as text: the tokenizer's template applied, and the answers located in its output.

In: the turns of a row and a tokenizer. Out: `RowText`. Refused: a template in which an answer cannot be found, or that
rejects the turns (`AnswerNotFound`).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, cast

from jinja2 import TemplateError

from ktc.model.hf.token_borders import Stretch, shared_length
from ktc.training.tune.settings import Template
from ktc.training.tune.turns import ANSWERS, Turn

CHAT: Final = frozenset({"system", "user", "assistant", "tool"})
Turns = tuple[Turn, ...]
Tools = Sequence[Mapping[str, Any]]
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\b")


class AnswerNotFound(Exception):
    """An answer cannot be located in the template's output, or the template refuses the turns."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Characters to learn, from `start` to before `end`. `prompt` is the text that a model gets before it answers."""

    start: int
    end: int
    prompt: str


@dataclass(frozen=True, slots=True)
class RowText:
    """`answers` None: everything is learned. `special`: the tokenizer adds its special tokens; a template wrote them.

    `marked`: the answers are the template's marks, and not the text after a prompt.
    """

    text: str
    answers: tuple[Answer, ...] | None
    special: bool = False
    marked: bool = False


class RowWriter:
    """Writes rows by the tokenizer's chat template or, if it has none or the template is `plain`, without."""

    def __init__(self, tokenizer: Any, template: Template) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.uses_template = self.has_template and template == "auto"
        self._marks = self.uses_template and bool(_GENERATION.search(tokenizer.get_chat_template()))
        self._end = str(tokenizer.eos_token or "")

    def write(self, turns: Turns, everything: bool, tools: Tools = ()) -> RowText:
        """Return the text of one row; `everything` learns the questions too. Raises AnswerNotFound."""
        if not self._is_templated(turns, tools):
            return self._joined(turns, everything or turns[0].role == "text")
        with _refusing_turns():
            self._require_calls(turns, tools)
            if everything:
                return RowText(self._template(turns, tools), None)
            is_whole = all(turn.learned for turn in turns if turn.role != "assistant")  # and no prompt with an answer
            marked = self._marked(turns, tools) if self._marks and is_whole else None
            return marked or self._rendered(turns, tools)

    def write_completion(self, turns: Turns, tools: Tools = ()) -> RowText:
        """Return the text of one row whose answer is all that follows its prompt. Raises AnswerNotFound."""
        if not self._is_templated(turns, tools):
            row = self._joined(turns, everything=False)
            ((start, prompt),) = [(answer.start, answer.prompt) for answer in (row.answers or ())[:1]]
            return RowText(row.text, (Answer(start, len(row.text), prompt),), special=True)
        place = next(number for number, turn in enumerate(turns) if turn.is_answer)
        with _refusing_turns():
            self._require_calls(turns, tools)
            text, prompt = self._template(turns, tools), self._template(turns[:place], tools, prompt=True)
        return RowText(text, (Answer(shared_length(prompt, text), len(text), prompt),))

    def writes_tools(self, turns: Turns, tools: Tools) -> bool:
        """Return whether the template writes the descriptions of tools, which it may ignore."""
        with _refusing_turns():
            return self._template(turns, tools) != self._template(turns, ())

    def _is_templated(self, turns: Turns, tools: Tools) -> bool:
        """Return whether the template formats the turns. Raises AnswerNotFound for tools without one."""
        if self.uses_template and turns[0].role in CHAT:
            return True
        if tools or any(turn.calls_tools for turn in turns):
            reason = "`--template plain` writes none" if self.has_template else "the tokenizer has no chat template"
            raise AnswerNotFound(f"tools and their calls are written by a chat template, and {reason}")
        return False

    def _marked(self, turns: Turns, tools: Tools) -> RowText | None:
        """Return the text with the stretches that the template marks as the assistant's.

        None if some answers are not to be learned, and the marks are not one for each.

        transformers' own mask of tokens ends an answer within its last character if that has several tokens, and ends
        nowhere if it has none.
        """
        from transformers.utils import chat_template_utils

        texts, marks = cast("Any", chat_template_utils).render_jinja_template(
            conversations=[_messages(turns)],
            tools=list(tools) or None,
            chat_template=self._chat_template(tools),
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
        )
        text, stretches = cast("str", texts[0]), cast("list[Stretch]", marks[0])
        learned = [turn.learned for turn in turns if turn.role == "assistant"]
        if not all(learned):
            if len(stretches) != len(learned):
                return None
            stretches = [stretch for stretch, is_learned in zip(stretches, learned, strict=True) if is_learned]
        answers = tuple(Answer(start, end, text[:start]) for start, end in stretches if start < end)
        return RowText(text, answers, marked=True)

    def _rendered(self, turns: Turns, tools: Tools) -> RowText:
        text = self._template(turns, tools)
        places = (number for number, turn in enumerate(turns) if turn.is_answer)
        return RowText(text, tuple(self._answer(text, turns, place, tools) for place in places))

    def _answer(self, text: str, turns: Turns, place: int, tools: Tools) -> Answer:
        """Return the answer from the end of the generation prompt to the end of its turn.

        A template may write the generation prompt otherwise than a turn (with an empty thought); the answer begins
        where they differ. It may format the last answer differently from earlier ones (with an empty thought before
        it), so the end of an earlier one is searched after its content.
        """
        prompt = self._template(turns[:place], tools, prompt=True)
        until = self._template(turns[: place + 1], tools)
        start = shared_length(prompt, text)
        if start < len(prompt) and not text.startswith(self._template(turns[:place], tools)):
            message = f"the template writes the turns before turn {place + 1} differently once it is answered"
            raise AnswerNotFound(message)
        if text.startswith(until):
            return Answer(start, len(until), prompt)
        content = turns[place].content.strip()
        tail = until[until.rindex(content) + len(content) :] if content in until else ""
        content_start = -1 if turns[place].calls_tools else text.find(content + tail, start)
        if content_start < 0:
            raise AnswerNotFound(f"the answer in turn {place + 1} is not found in the output of the template")
        return Answer(start, content_start + len(content) + len(tail), prompt)

    def _require_calls(self, turns: Turns, tools: Tools) -> None:
        """Raise AnswerNotFound for a template that leaves calls of tools out: nothing of them would be learned."""
        if not any(turn.calls_tools for turn in turns):
            return
        without = [{"content": "", **message, "tool_calls": None} for message in _messages(turns)]
        with suppress(TemplateError, TypeError, ValueError):  # it needs them
            if self._apply(without, tools) == self._template(turns, tools):
                raise AnswerNotFound("the chat template does not write calls of tools (`tool_calls`)")

    def _template(self, turns: Turns, tools: Tools, *, prompt: bool = False) -> str:
        return self._apply(_messages(turns), tools, prompt=prompt)

    def _apply(self, messages: list[dict[str, Any]], tools: Tools, *, prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
        )

    def _chat_template(self, tools: Tools) -> str:
        return self._tokenizer.get_chat_template(tools=list(tools) or None)

    def _joined(self, turns: Turns, everything: bool) -> RowText:
        """Join turns without a template: questions end with a line break, answers with the end-of-text token."""
        text, answers = "", list[Answer]()
        for turn in turns:
            written = turn.content + ("" if turn.role == "prompt" else "\n")
            if turn.role in ANSWERS:
                written = turn.content.removesuffix(self._end) + self._end
            if turn.is_answer:
                answers.append(Answer(len(text), len(text) + len(written), text))
            text += written
        return RowText(text, None if everything else tuple(answers), special=True)


def _messages(turns: Turns) -> list[dict[str, Any]]:
    return [turn.for_template() for turn in turns]


@contextmanager
def _refusing_turns() -> Generator[None]:
    """Raise AnswerNotFound in place of a template's error: it refuses roles, or keys that it needs are not there."""
    try:
        yield
    except (TemplateError, TypeError, ValueError) as error:
        raise AnswerNotFound(f"the chat template refuses these turns: {error}") from error
