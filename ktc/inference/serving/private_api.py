"""Every private name of transformers' server, and of its `generate`, that ktc's server uses.

`tests/inference/serving/test_private_api.py` checks each name with the oldest and the newest release (`make versions`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from transformers.cli.serving import utils
from transformers.cli.serving.utils import _StreamError as StreamError  # pyright: ignore[reportPrivateUsage]
from transformers.generation import utils as generation

__all__ = ["StreamError"]  # what ends a stream with an error


class HandlerHooks:
    """A base before a handler of requests: its steps, as methods with public names."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        stock = cast("Any", super())._validate_request
        self.validate(body, stock)

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        stock = cast("Any", super())._build_generation_config
        return self.configure(body, lambda rest: stock(rest, *args, **kwargs))

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        return self.resolve(body)

    async def _non_streaming(self, *given: Any, **named: Any) -> Any:
        stock = cast("Any", super())._non_streaming
        return await self.answer_whole(stock, *given, **named)

    def require_valid(self, body: dict[str, Any]) -> None:
        """Validate a request before the handler does."""
        self._validate_request(body)

    async def answer_whole(self, stock: Callable[..., Awaitable[Any]], *given: Any, **named: Any) -> Any:
        """Answer a request that is not streamed; `stock` does what the handler does."""
        return await stock(*given, **named)

    def validate(self, body: dict[str, Any], stock: Callable[[dict[str, Any]], None]) -> None:
        """Validate a request; `stock` does what the handler does with some of its fields."""
        raise NotImplementedError

    def configure(self, body: dict[str, Any], stock: Callable[[dict[str, Any]], Any]) -> Any:
        """Return the generation config of a request; `stock` makes one of some of its fields."""
        raise NotImplementedError

    def resolve(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        """Return the name, the model and the tokenizer of a request."""
        raise NotImplementedError


def messages_of_input(handler: Any, body: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the input of a request to `/v1/responses` as messages, and its tools as those of a chat."""
    return handler._normalize_input(body), handler._normalize_tools(body.get("tools"))


def next_arguments(model: Any, outputs: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `generate` for the token after a pass: cache, mask and positions."""
    return model._update_model_kwargs_for_generation(outputs, arguments)


OF_PROMPTS_ALONE: Final = frozenset[str](
    getattr(generation, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ("mm_encoder_outputs",))
)
"""Arguments that `generate` gives to the pass of a prompt alone: pixels, and what towers have made of them."""
_CALLS: Final = "tool_calls"  # the part of a response template with the calls
_ANY_SPACE: Final = r"\s*"
_OF_PATTERN: Final = re.compile(r"(?<!\\)[.*+?()\[\]{}^$|]|\\[a-zA-Z]")  # no literal text


def call_marks(tokenizer: Any, model: Any) -> tuple[str, str] | None:
    """Return the texts before and after a call, where a call is a JSON object with a name and arguments.

    None for every other form, such as XML, and where transformers has no response template for the model.
    """
    find: Any = getattr(utils, "get_response_template", None)
    template: object = None if find is None else find(tokenizer, model)
    if not isinstance(template, dict):
        return None
    calls = _region(cast("dict[str, Any]", template), _CALLS)
    if calls.get("content") != "json" or calls.get("content_args"):
        return None
    if calls.get("transform") != {"type": "function", "function": "{content}"}:
        return None
    begin, end = _literal(calls, "open"), _literal(calls, "close")
    return (begin, end) if begin and end else None


def open_thought(tokenizer: Any, model: Any, prompt: str) -> str | None:
    """Return the text that ends the part of an answer which its prompt leaves open: a thought.

    "" where the template has not one such text. None where no part but the content is open, or none is read.
    """
    find: Any = getattr(utils, "get_response_template", None)
    if find is None or not reads_tool_calls(tokenizer, model, prompt):
        return None
    from transformers.utils.chat_parsing.response_parser import ResponseParser

    template = find(tokenizer, model)
    opened: str | None = None
    events: list[dict[str, Any]] = cast("Any", ResponseParser)(template, prefix=prompt).initial_events
    for event in events:
        if event["type"] == "region_open":
            opened = event["field"]
        elif event["type"] == "region_close":
            opened = None
    return None if opened in (None, "content") else _literal(_region(template, opened), "close")


def _region(template: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a part of a template; empty where it has none, for a template is data of a checkpoint."""
    parts = template.get("fields")
    part = cast("dict[str, Any]", parts).get(name) if isinstance(parts, dict) else None
    return cast("dict[str, Any]", part) if isinstance(part, dict) else {}


def _literal(part: dict[str, Any], name: str) -> str:
    """Return the text that a part of a template has or that its pattern matches; "" where it is not one text."""
    given: Any = part.get(name)
    if isinstance(given, list) and given:
        given = cast("list[Any]", given)[0]
    if given:
        return given if isinstance(given, str) else ""
    pattern: Any = part.get(f"{name}_pattern")
    if not isinstance(pattern, str):
        return ""
    pattern = pattern.removeprefix(_ANY_SPACE)
    return "" if _OF_PATTERN.search(pattern) else re.sub(r"\\(.)", r"\1", pattern)


def reads_tool_calls(tokenizer: Any, model: Any, prompt: str) -> bool:
    """Return whether transformers can read answers to a prompt: their calls and thoughts.

    It knows the answers of some model types. A chat template of another form has no anchor of theirs, and transformers
    would then take the prompt for a part of the answer.
    """
    find: Any = getattr(utils, "get_response_template", None)
    if find is None:  # releases before response templates
        return cast("Any", utils).get_tool_call_config(tokenizer, model) is not None
    template = find(tokenizer, model)
    if template is None:
        return False
    from transformers.utils.chat_parsing import response_templates

    try:
        anchor: Any = cast("Any", response_templates).load_response_template(template).start_anchor_re
    except (AttributeError, TypeError, ValueError):  # a tokenizer's own template is data of a checkpoint
        return False
    return anchor.search(prompt) is not None
