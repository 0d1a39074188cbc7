"""The fields of a request: which values each may have, and how large they may be.

In: the JSON object of a body. Out: nothing, or `RequestRefused` (400) with the field. Features of OpenAI's API that are
missing here are refused, never ignored; fields for the caller's own records (`user`, `metadata`) have no effect.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from transformers import PreTrainedTokenizerBase

from ktc.inference.generate.prompts import ROLES
from ktc.inference.serving.refusals import RequestRefused

MOST_MESSAGES: Final = 2048
MOST_TOOLS: Final = 128
MOST_STOPS: Final = 4
LONGEST_STOP: Final = 256  # characters
MOST_BIASES: Final = 300
MOST_VARIABLES: Final = 32  # of a chat template
COLDEST: Final = 1e-3  # the smallest temperature above 0: scores divided by less are infinite in fp32
_LARGEST_COUNT: Final = 2**31 - 1
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
# Arguments of rendering and of the tokenizer; what a template's own variables may be called is open.
_TOKENIZER: Final[Any] = PreTrainedTokenizerBase
_RESERVED: Final = frozenset({
    *inspect.signature(_TOKENIZER.apply_chat_template).parameters,
    *inspect.signature(_TOKENIZER.__call__).parameters,
    "messages", "load_audio_from_video", "num_frames", "raise_exception", "strftime_now",
})  # fmt: skip

Check = Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast("float", value))


def _is_within(low: float, high: float) -> Check:
    return lambda value: _is_number(value) and low <= value <= high


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST_COUNT


def _is_exactly(wanted: object) -> Check:
    return lambda value: type(value) is type(wanted) and value == wanted


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _anything(_: object) -> bool:
    return True


def _are_stops(value: object) -> bool:
    texts = [value] if isinstance(value, str) else value
    return (
        isinstance(texts, list)
        and 0 < len(cast("list[Any]", texts)) <= MOST_STOPS
        and all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in cast("list[Any]", texts))
    )


def _are_biases(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(cast("dict[str, Any]", value)) <= MOST_BIASES
        and all(
            len(token) < 10 and token.isascii() and token.isdigit() and _is_within(-100, 100)(bias)
            for token, bias in cast("dict[str, Any]", value).items()
        )
    )


def _are_tools(value: object) -> bool:
    tools = cast("list[Any]", value) if isinstance(value, list) else [None]
    return len(tools) <= MOST_TOOLS and all(_is_tool(tool) for tool in tools)


def _is_tool(tool: Any) -> bool:
    if not (isinstance(tool, dict) and cast("dict[str, Any]", tool).get("type") == "function"):
        return False
    function: Any = cast("dict[str, Any]", tool).get("function", tool)  # the Responses API has it flat
    return isinstance(function, dict) and isinstance(cast("dict[str, Any]", function).get("name"), str)


def _are_variables(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(cast("dict[str, Any]", value)) <= MOST_VARIABLES
        and all(
            name.isidentifier() and name not in _RESERVED and not name.endswith("_token")
            and (held is None or type(held) in (str, bool, int, float))
            for name, held in cast("dict[str, Any]", value).items()
        )
    )  # fmt: skip


_OF_ALL: Final[Mapping[str, Check]] = {
    "model": _is_text,
    "temperature": lambda v: _is_exactly(0)(v) or _is_exactly(0.0)(v) or _is_within(COLDEST, 2)(v),
    "top_p": lambda v: _is_within(0, 1)(v) and v > 0,
    "stream": lambda v: isinstance(v, bool),
    "user": _is_text,
    "metadata": _is_object,
    "store": lambda v: isinstance(v, bool),
    "service_tier": _is_text,
    "safety_identifier": _is_text,
    "prompt_cache_key": _is_text,
    "stream_options": _is_object,  # the last part of a stream always has the usage
}
_OF_TEXT: Final[Mapping[str, Check]] = {
    **_OF_ALL,
    "max_tokens": _is_count,
    "seed": lambda v: type(v) is int and 0 <= v < 2**32,
    "frequency_penalty": _is_within(-0.9, 2),
    "presence_penalty": lambda v: _is_number(v) and v == 0,
    "stop": _are_stops,
    "n": _is_exactly(1),
    "logprobs": _is_exactly(False),
}
_OF_TOOLS: Final[Mapping[str, Check]] = {
    "tools": _are_tools,
    "tool_choice": _is_exactly("auto"),
    "parallel_tool_calls": lambda v: isinstance(v, bool),
}
COMPLETION: Final[Mapping[str, Check]] = {
    **_OF_TEXT,
    "prompt": lambda v: isinstance(v, str) and v != "",
    "suffix": _is_text,
    "best_of": _is_exactly(1),
    "echo": _is_exactly(False),
}
CHAT: Final[Mapping[str, Check]] = {
    **_OF_TEXT,
    **_OF_TOOLS,
    "messages": _anything,  # `require_messages` says what is wrong with which
    "max_completion_tokens": _is_count,
    "logit_bias": _are_biases,
    "response_format": _is_exactly({"type": "text"}),
    "chat_template_kwargs": _are_variables,
}
RESPONSE: Final[Mapping[str, Check]] = {
    **_OF_ALL,
    **_OF_TOOLS,
    "input": _anything,
    "instructions": _is_text,
    "max_output_tokens": _is_count,
    "background": _is_exactly(False),
    "truncation": _is_exactly("disabled"),
}
# Fields that say something to the caller alone.
_WITHOUT_EFFECT: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                          "stream_options", "parallel_tool_calls", "tool_choice")  # fmt: skip


def require_fields(body: dict[str, Any], checks: Mapping[str, Check]) -> None:
    """Check every field of a body, and remove those that are null or without effect. Raises RequestRefused (400)."""
    for name, value in list(body.items()):
        if name not in checks:
            raise RequestRefused(400, f"the field `{_shown(name)}` is not supported", "unknown_parameter", _shown(name))
        if value is not None and not checks[name](value):
            raise RequestRefused(400, f"the field `{name}` has an unsupported value", "invalid_value", name)
        if value is None or name in _WITHOUT_EFFECT or value in ({}, []):
            del body[name]


def require_messages(turns: object, field: str) -> None:
    """Check a conversation: known roles, contents of text, calls of tools with names. Raises RequestRefused (400)."""
    if not (isinstance(turns, list) and 0 < len(cast("list[Any]", turns)) <= MOST_MESSAGES):
        raise RequestRefused(400, f"`{field}` is a list of 1 to {MOST_MESSAGES} turns", "invalid_value", field)
    for number, turn in enumerate(cast("list[Any]", turns)):
        fault = _fault_of_turn(turn)
        if fault:
            raise RequestRefused(400, f"`{field}[{number}]`: {fault}", "invalid_value", f"{field}[{number}]")


def require_items(items: list[Any]) -> None:
    """Check the items of a Responses request: messages, or parts of one, or calls. Raises RequestRefused (400)."""
    if len(items) > MOST_MESSAGES:
        raise RequestRefused(400, f"`input` has more than {MOST_MESSAGES} items", "invalid_value", "input")
    for number, item in enumerate(items):
        of: dict[str, Any] = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        kind: Any = of.get("type", "message")
        if kind == "message":
            fault = _fault_of_turn(of)
        elif kind == "function_call":
            fault = _fault_of_call(of) or ("" if _is_text(of.get("call_id")) else "a call has a `call_id`")
        elif kind == "function_call_output":
            texts = _is_text(of.get("call_id")) and _is_text(of.get("output"))
            fault = "" if texts else "an output of a call has texts `call_id` and `output`"
        else:
            fault = _fault_of_content([of]) if "role" not in cast("dict[str, Any]", items[0]) else "unknown type"
        if fault:
            raise RequestRefused(400, f"`input[{number}]`: {fault}", "invalid_value", f"input[{number}]")


def require_biases(body: Mapping[str, Any], vocabulary: int) -> None:
    """Check that biases are of the model's tokens. Raises RequestRefused (400)."""
    if any(int(token) >= vocabulary for token in cast("Mapping[str, float]", body.get("logit_bias") or {})):
        message = f"`logit_bias` has a token beyond the {vocabulary} of the model"
        raise RequestRefused(400, message, "invalid_value", "logit_bias")


def _fault_of_turn(turn: Any) -> str:
    of: dict[str, Any] = cast("dict[str, Any]", turn) if isinstance(turn, dict) else {}
    role, calls, content = of.get("role"), of.get("tool_calls"), of.get("content")
    if role not in ROLES:
        return f"a turn has a `role` of {', '.join(ROLES)}"
    if "tool_calls" in of:
        of_list = cast("list[Any]", calls) if isinstance(calls, list) else [None]
        return next((fault for call in of_list if (fault := _fault_of_call(call))), "")
    if not isinstance(of.get("tool_call_id", ""), str) or not isinstance(of.get("name", ""), str):
        return "`tool_call_id` and `name` are texts"
    if content is None and (role != "assistant" or "content" not in of):
        return "a turn has `content`"
    return _fault_of_content(content)


def _fault_of_content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return ""
    parts = cast("list[Any]", content) if isinstance(content, list) else [None]
    texts = all(
        isinstance(part, dict)
        and cast("dict[str, Any]", part).get("type") in _TEXT_PARTS
        and isinstance(cast("dict[str, Any]", part).get("text"), str)
        for part in parts
    )
    return "" if texts else "`content` is a text, or a list of parts of type `text`; the model reads nothing else"


def _fault_of_call(call: Any) -> str:
    of: dict[str, Any] = cast("dict[str, Any]", call) if isinstance(call, dict) else {}
    function: Any = of.get("function", of)
    named: dict[str, Any] = cast("dict[str, Any]", function) if isinstance(function, dict) else {}
    arguments: Any = named.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    fits = isinstance(named.get("name"), str) and isinstance(arguments, dict)
    return "" if fits else "a call has a `name`, and `arguments` that are a JSON object"


def _shown(name: str) -> str:
    return name[:60].encode("ascii", "backslashreplace").decode()
