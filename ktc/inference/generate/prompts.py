"""Prompts: text or turns of a conversation, converted to tokens.

Input: a text, turns, or a JSONL file whose rows have `prompt` or `messages`. Output: frozen `Prompt`s. Refused: an
empty prompt or file (G702), a prompt that is too long (G703), a file that is unreadable or not UTF-8 (G705), and
invalid rows, all of a file together (G706).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ktc.diagnostics import Diagnostic, InputRefused, Span, suggest
from ktc.foundation.decode import has_lone_surrogate, read_json
from ktc.foundation.text_files import bounded, read_text

if TYPE_CHECKING:
    from ktc.inference.generate.language_model import LanguageModel

ROLES = ("system", "user", "assistant", "tool")
GENERATED = "generated"  # the field that an answer is written to
Sample = TypeVar("Sample")
ADDED = (GENERATED, "generated_tokens", "finish")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is the model's input, including the template; `place` is its origin.

    `special`: the tokenizer added its special tokens, which a template writes itself. `pixels` are the processor's
    tensors of images, by the names of the model's arguments.
    """

    text: str
    input_ids: tuple[int, ...]
    place: Span | None = None
    special: bool = True
    pixels: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file: its place, its original fields, and its prompt: a text, or turns."""

    place: Span
    fields: Mapping[str, Any]
    prompt: str | tuple[Message, ...]


def render(
    opened: LanguageModel,
    prompt: str | Sequence[Message],
    *,
    system: str = "",
    raw: bool = False,
    place: Span | None = None,
) -> Prompt:
    """Return the tokens of a prompt, up to where the answer begins. Raises InputRefused (G702).

    With a chat template, a text is a turn of the user. Without one, or with `raw`, a text is unchanged and turns are
    joined by line breaks, an answer ending with the end of the text, as in `ktc train`.
    """
    turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
    if not any(turn.content.strip() for turn in turns):
        raise InputRefused(Diagnostic("G702", "the prompt is empty", place, hint="write a prompt"))
    if system and turns[0].role != "system":
        turns = (Message("system", system), *turns)
    if any(has_lone_surrogate(turn.content) for turn in turns):
        message = "the prompt has a lone surrogate (`\\ud800` to `\\udfff`) or a byte that is not UTF-8"
        raise InputRefused(Diagnostic("G706", message, place, hint="write it as UTF-8"))
    tokenizer = opened.tokenizer
    if opened.has_template and not raw:
        text = _templated(tokenizer, turns, place)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(text, tuple(ids), place, special=False)
    text = turns[0].content if isinstance(prompt, str) and len(turns) == 1 else _joined(tokenizer, turns)
    return Prompt(text, tuple(tokenizer(text)["input_ids"]), place)


def render_all(samples: Iterable[Sample], make: Callable[[Sample], Prompt]) -> list[Prompt]:
    """Return the prompt of each sample. Raises InputRefused with the faults of all of them."""
    prompts, faults = list[Prompt](), list[Diagnostic]()
    for sample in samples:
        try:
            prompts.append(make(sample))
        except InputRefused as refusal:
            faults += refusal.diagnostics
    if faults:
        raise InputRefused(*bounded(faults))
    return prompts


def require_fit(opened: LanguageModel, prompts: Sequence[Prompt], max_new_tokens: int | None) -> int | None:
    """Return the number of tokens left after the longest prompt, None for a model without a limit.

    Raises InputRefused (G703) with every prompt that leaves no room for `max_new_tokens` (None: for one).
    """
    limit = opened.max_length
    if limit is None or not prompts:
        return None
    wanted = max_new_tokens or 1
    too_long = [prompt for prompt in prompts if len(prompt.input_ids) + wanted > limit]
    if too_long:
        raise InputRefused(*bounded(_too_long(prompt, limit, wanted) for prompt in too_long))
    return limit - max(len(prompt.input_ids) for prompt in prompts)


def read_rows(path: Path) -> tuple[Row, ...]:
    """Return the rows of a JSONL file. Raises InputRefused (G702, G705, G706) with all faults."""
    rows, faults = list[Row](), list[Diagnostic]()
    for place, line in read_lines(path):
        try:
            value: object = read_json(line)
        except ValueError as error:
            faults.append(Diagnostic("G706", f"this is not JSON: {error}", place, hint="a row is one JSON object"))
            continue
        prompt = _prompt_of(value, place, faults)
        if prompt is not None:
            rows.append(Row(place, cast("Mapping[str, Any]", value), prompt))
    if faults:
        raise InputRefused(*bounded(faults))
    if not rows:
        hint = 'a row is a JSON object: {"prompt": "..."}'
        raise InputRefused(Diagnostic("G702", f"`{path}` has no prompts", hint=hint))
    return tuple(rows)


def read_lines(path: Path) -> Iterator[tuple[Span, str]]:
    """Yield the lines of a JSONL file that are not empty. Raises InputRefused (G705)."""
    for number, line in enumerate(read_text(path, unreadable="G705", not_utf8="G705").split("\n"), start=1):
        if line.strip():
            yield Span(str(path), number, 1, number, 2), line


def _prompt_of(value: object, place: Span, faults: list[Diagnostic]) -> str | tuple[Message, ...] | None:
    """Return the prompt of a row; None, and a fault, if it has none."""

    def refuse(message: str, hint: str = "") -> None:
        faults.append(Diagnostic("G706", message, place, hint=hint))

    if not isinstance(value, dict):
        return refuse("a row is a JSON object", 'like {"prompt": "..."}')
    fields = cast("dict[str, Any]", value)
    if taken := next((name for name in ADDED if name in fields), ""):
        return refuse(f"the row has a field `{taken}` already, which the answer would replace")
    if ("prompt" in fields) == ("messages" in fields):
        near = next((f"`{name}`: {hint}" for name in fields if (hint := suggest(name, ("prompt", "messages")))), "")
        return refuse("a row has one of the fields `prompt` and `messages`", near)
    if "prompt" in fields:
        prompt: object = fields["prompt"]
        return prompt if isinstance(prompt, str) and prompt.strip() else refuse("`prompt` is not a text, or empty")
    return _messages(fields["messages"]) or refuse(
        "`messages` is a list of turns with `role` and `content`, the last not the assistant's",
        f"roles are {', '.join(ROLES)}",
    )


def _messages(value: object) -> tuple[Message, ...] | None:
    turns = cast("list[Any]", value) if isinstance(value, list) else []
    messages: list[Message] = []
    for turn in turns:
        fields = cast("dict[str, Any]", turn) if isinstance(turn, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if role not in ROLES or not isinstance(content, str):
            return None
        messages.append(Message(str(role), content))
    asks = bool(messages) and messages[-1].role != "assistant" and any(turn.content.strip() for turn in messages)
    return tuple(messages) if asks else None


def _templated(tokenizer: Any, turns: Sequence[Message], place: Span | None) -> str:
    from jinja2 import TemplateError

    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, ValueError) as error:  # a template refuses unknown roles
        message = f"the chat template rejects these turns: {error}"
        raise InputRefused(Diagnostic("G706", message, place, hint="`--raw` works without the template")) from error


def _joined(tokenizer: Any, turns: Sequence[Message]) -> str:
    end = str(tokenizer.eos_token or "")
    return "".join(
        turn.content.removesuffix(end) + end if turn.role == "assistant" else turn.content + "\n" for turn in turns
    )


def _too_long(prompt: Prompt, limit: int, wanted: int) -> Diagnostic:
    length = len(prompt.input_ids)
    message = f"the prompt has {length} tokens; with {wanted} to generate, the model's {limit} are not enough"
    room = limit - length
    hint = f"`--max-new-tokens {room}` is the maximum" if room > 0 else "shorten the prompt"
    return Diagnostic("G703", message, prompt.place, hint=hint)
