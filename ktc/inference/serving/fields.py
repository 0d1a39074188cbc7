"""The fields of a request: which values each may have, and how large they may be.

In: the JSON object of a body. Out: nothing, or `RequestRefused` (400) with the field. Features of OpenAI's API that are
missing here are refused, never ignored; fields for the caller's own records (`user`, `metadata`) have no effect.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, NotRequired, Required, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Json,
    Tag,
    TypeAdapter,
    ValidationError,
    with_config,
)
from transformers import PreTrainedTokenizerBase
from typing_extensions import TypedDict

from ktc.inference.generate.prompts import ROLES
from ktc.inference.serving.refusals import RequestRefused

COLDEST: Final = 1e-3  # the smallest temperature above 0: logits divided by less are infinite in fp32
MAX_CHOICES: Final = 16  # answers to one request
_MAX_TURNS: Final = 2048
# Arguments of rendering and of the tokenizer; what a template's own variables may be called is open.
_TOKENIZER: Final[Any] = PreTrainedTokenizerBase
_RESERVED: Final = frozenset({
    *inspect.signature(_TOKENIZER.apply_chat_template).parameters,
    *inspect.signature(_TOKENIZER.__call__).parameters,
    "messages", "load_audio_from_video", "num_frames", "raise_exception", "strftime_now",
})  # fmt: skip
# Fields that say something to the caller alone.
_WITHOUT_EFFECT: Final = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                          "stream_options")  # fmt: skip
OF_SERVER: Final = frozenset({"n", "response_format", "text", "tool_choice", "parallel_tool_calls"})
"""Fields that ktc's server gives their meaning: the handlers of transformers do not know them."""
_OF_CALL: Final = "a call has a `name`, and `arguments` that are a JSON object"
_FAULTS: Final = {
    "role": f"a turn has a `role` of {', '.join(ROLES)}",
    "content": "`content` is a text, or a list of parts of type `text` or `image_url`; the model reads no other",
    "tool_calls": _OF_CALL,
    "function_call": _OF_CALL,
    "function_call_output": "an output of a call has texts `call_id` and `output`",
    "detail": "`detail` is `auto`, `low` (at most 512 pixels along a side) or `high` (as `auto`)",
    "part": "unknown type",
}


def _require_off(value: bool) -> bool:
    if value:
        raise ValueError("it is not supported")
    return value


def _require_free_name(name: str) -> str:
    if not name.isidentifier() or name in _RESERVED or name.endswith("_token"):
        raise ValueError("a template has no such variable")
    return name


def _has(name: str) -> Discriminator:
    """Distinguish objects with a key from those without."""
    return Discriminator(lambda value: name if isinstance(value, dict) and name in value else "flat")


_Zero = Annotated[float, Field(ge=0, le=0)]
_Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
_One = Annotated[int, Field(ge=1, le=1)]
_Off = Annotated[bool, AfterValidator(_require_off)]
_Count = Annotated[int, Field(gt=0, lt=2**31)]
_Text = Annotated[str, Field(min_length=1)]
_StopText = Annotated[str, Field(min_length=1, max_length=256)]
_Token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
_Variable = Annotated[str, AfterValidator(_require_free_name)]
_closed = with_config(ConfigDict(extra="forbid"))  # an object whose every key has an effect


# The turns of a conversation. Other keys of their objects are the caller's own. ----------------------------------
class _Part(TypedDict):
    type: Literal["text", "input_text", "output_text"]
    text: str


_Detail = Literal["auto", "low", "high"]


@_closed
class _Address(TypedDict):
    url: str
    detail: NotRequired[_Detail]


@_closed
class _Image(TypedDict):
    type: Literal["image_url"]
    image_url: _Address


@_closed
class _InputImage(TypedDict):  # as the Responses API has it
    type: Literal["input_image"]
    image_url: str
    detail: NotRequired[_Detail]


def _type_of(part: Any) -> str:
    kind: Any = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else None
    return kind if kind in ("image_url", "input_image") else "text"


_AnyPart = Annotated[
    Annotated[_Part, Tag("text")] | Annotated[_Image, Tag("image_url")] | Annotated[_InputImage, Tag("input_image")],
    Discriminator(_type_of),
]


class _Function(TypedDict):
    name: str
    arguments: dict[str, Any] | Json[dict[str, Any]]


class _NestedFunction(TypedDict):
    function: _Function


_Call = Annotated[Annotated[_NestedFunction, Tag("function")] | Annotated[_Function, Tag("flat")], _has("function")]


class _Turn(TypedDict, total=False):
    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: str | list[_AnyPart] | None
    tool_calls: list[_Call]
    tool_call_id: str
    name: str


def _require_content(turn: _Turn) -> _Turn:
    may_lack = "tool_calls" in turn or (turn["role"] == "assistant" and "content" in turn)
    if turn.get("content") is None and not may_lack:
        raise ValueError("a turn has `content`")
    return turn


_ATurn = Annotated[_Turn, AfterValidator(_require_content)]


# The items of a Responses request: turns, or parts of one, or calls. ---------------------------------------------
class _FunctionCall(_Function):
    call_id: str


class _CallOutput(TypedDict):
    call_id: str
    output: str


def _kind_of(item: Any) -> str:
    kind: Any = cast("dict[str, Any]", item).get("type", "message") if isinstance(item, dict) else "message"
    return kind if kind in ("message", "function_call", "function_call_output") else "part"


def _require_one_form(items: list[Any]) -> list[Any]:
    if "role" in items[0] and any(_kind_of(item) == "part" for item in items):
        raise ValueError("parts and turns are not in one list")
    return items


_Item = Annotated[
    Annotated[_ATurn, Tag("message")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_CallOutput, Tag("function_call_output")]
    | Annotated[_AnyPart, Tag("part")],
    Discriminator(_kind_of),
]
_Items = Annotated[list[_Item], Field(min_length=1, max_length=_MAX_TURNS), AfterValidator(_require_one_form)]


# The functions that a model may call. ----------------------------------------------------------------------------
class _Declared(TypedDict):  # the template shows every other key too
    name: str
    parameters: NotRequired[dict[str, Any] | None]


class _FlatTool(_Declared):  # as the Responses API has it
    type: Literal["function"]


class _NestedTool(TypedDict):
    type: Literal["function"]
    function: _Declared


_Tool = Annotated[Annotated[_NestedTool, Tag("function")] | Annotated[_FlatTool, Tag("flat")], _has("function")]


@_closed
class _Named(TypedDict):
    name: str


@_closed
class _FlatChoice(TypedDict):
    type: Literal["function"]
    name: str


@_closed
class _NestedChoice(TypedDict):
    type: Literal["function"]
    function: _Named


_Choice = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("word")]
    | Annotated[Annotated[_NestedChoice, Tag("function")] | Annotated[_FlatChoice, Tag("flat")], _has("function"),
                Tag("tool")],
    Discriminator(lambda value: "word" if isinstance(value, str) else "tool"),
]  # fmt: skip


# The bodies ------------------------------------------------------------------------------------------------------
class _Common(TypedDict, total=False):
    model: str
    temperature: Annotated[float, Field(ge=COLDEST, le=2)] | _Zero
    top_p: Annotated[float, Field(gt=0, le=1)]
    stream: bool
    user: str
    metadata: dict[str, Any]
    store: bool
    service_tier: str
    safety_identifier: str
    prompt_cache_key: str
    stream_options: dict[str, Any]  # the last part of a stream always has the usage


class _Generated(_Common, total=False):
    max_tokens: _Count
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    frequency_penalty: Annotated[float, Field(ge=-0.9, le=2)]
    presence_penalty: _Zero
    stop: _StopText | Annotated[list[_StopText], Field(min_length=1, max_length=4)]
    n: _Choices
    logprobs: _Off


class _WithTools(TypedDict, total=False):
    tools: Annotated[list[_Tool], Field(max_length=128)]
    tool_choice: _Choice
    parallel_tool_calls: bool


@_closed
class _PlainFormat(TypedDict):
    type: Literal["text", "json_object"]


@_closed
class _Schema(TypedDict, total=False):
    schema: Required[dict[str, Any]]
    name: str
    description: str
    strict: bool | None  # a schema is always enforced


@_closed
class _SchemaFormat(TypedDict):
    type: Literal["json_schema"]
    json_schema: _Schema


_Format = Annotated[
    Annotated[_PlainFormat, Tag("flat")] | Annotated[_SchemaFormat, Tag("json_schema")], _has("json_schema")
]


class CompletionFields(_Generated, total=False):
    prompt: Required[_Text]
    suffix: str
    best_of: _One
    echo: _Off
    response_format: _Format


class ChatFields(_Generated, _WithTools, total=False):
    messages: Required[Annotated[list[_ATurn], Field(min_length=1, max_length=_MAX_TURNS)]]
    max_completion_tokens: _Count
    logit_bias: Annotated[dict[_Token, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300)]
    response_format: _Format
    chat_template_kwargs: Annotated[dict[_Variable, str | bool | int | float | None], Field(max_length=32)]


@_closed
class _FlatSchemaFormat(_Schema):  # as the Responses API has it
    type: Literal["json_schema"]


@_closed
class _TextOptions(TypedDict, total=False):
    format: Annotated[
        Annotated[_PlainFormat, Tag("flat")] | Annotated[_FlatSchemaFormat, Tag("schema")], _has("schema")
    ]


class ResponseFields(_Common, _WithTools, total=False):
    input: Required[
        Annotated[
            Annotated[_Text, Tag("text")] | Annotated[_Items, Tag("items")],
            Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
        ]
    ]
    instructions: str
    max_output_tokens: _Count
    text: _TextOptions
    background: _Off
    truncation: Literal["disabled"]


Fields = type[CompletionFields] | type[ChatFields] | type[ResponseFields]
_checker = cache(TypeAdapter[Any])


def require_fields(body: dict[str, Any], fields: Fields) -> None:
    """Check every field of a body, and remove those that are null or without effect. Raises RequestRefused (400)."""
    for name in body:
        if name not in fields.__annotations__:
            shown = _shown(name)
            raise RequestRefused(400, f"the field `{shown}` is not supported", "unknown_parameter", shown)
    given = {name: value for name, value in body.items() if value is not None}
    try:
        _checker(fields).validate_python(given, strict=True)
    except ValidationError as error:
        raise _refusal(error) from None
    for name in body.keys() - given.keys() | {name for name, value in given.items() if value in ({}, [])}:
        del body[name]
    if body.get("tool_choice") == "none":
        body.pop("tools", None)
    if body.get("tool_choice") in ("auto", "none"):
        del body["tool_choice"]
    for name in _WITHOUT_EFFECT:
        body.pop(name, None)


def schema_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema of a checked body, None for text."""
    text: dict[str, Any] = body.get("text") or {}
    form: dict[str, Any] | None = body.get("response_format") or text.get("format")
    match form:
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": schema}} | {"type": "json_schema", "schema": schema}:
            return cast("dict[str, Any]", schema)
        case _:
            return None


def _refusal(error: ValidationError) -> RequestRefused:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    of_detail = (one for one in faults if one["loc"][0] in ("messages", "input") and "detail" in one["loc"])
    fault = next(of_detail, faults[0])
    name, *place = fault["loc"]
    if fault["type"] == "missing" and not place:
        return RequestRefused(400, f"`{name}` is missing", "missing_required_parameter", str(name))
    if fault["type"] == "extra_forbidden":
        message = f"the field `{name}` has an unsupported key `{_shown(str(place[-1]))}`"
        return RequestRefused(400, message, "unknown_parameter", str(name))
    if name not in ("messages", "input"):
        return RequestRefused(400, f"the field `{name}` has an unsupported value", "invalid_value", str(name))
    where = next((f"{name}[{part}]" for part in place if isinstance(part, int)), str(name))
    words = next(
        (_FAULTS[part] for part in reversed(place) if part in _FAULTS), fault["msg"].removeprefix("Value error, ")
    )
    return RequestRefused(400, f"`{where}`: {words}", "invalid_value", where)


def _shown(name: str) -> str:
    return name[:60].encode("ascii", "backslashreplace").decode()


def forced_tools(body: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the functions of which a checked body requires a call; empty where the model may write a text.

    Raises RequestRefused (400) where none of the tools has the required name.
    """
    choice: Any = body.get("tool_choice")
    if choice is None:
        return ()
    functions = tuple(cast("dict[str, Any]", tool.get("function", tool)) for tool in body.get("tools") or ())
    if choice != "required":
        name = choice.get("function", choice)["name"]
        functions = tuple(function for function in functions if function["name"] == name)
    if not functions:
        raise RequestRefused(400, "`tool_choice` names none of the `tools`", "invalid_value", "tool_choice")
    return functions


def require_biases(body: Mapping[str, Any], vocabulary: int) -> None:
    """Check that biases are of the model's tokens. Raises RequestRefused (400)."""
    if any(int(token) >= vocabulary for token in cast("Mapping[str, float]", body.get("logit_bias") or {})):
        message = f"`logit_bias` has a token beyond the {vocabulary} of the model"
        raise RequestRefused(400, message, "invalid_value", "logit_bias")
