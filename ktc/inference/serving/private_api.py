"""Every private name of transformers' server that ktc uses.

`tests/inference/serving/test_private_api.py` checks each name with the oldest and the newest release (`make versions`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from transformers.cli.serving import utils
from transformers.cli.serving.utils import _StreamError as StreamError  # pyright: ignore[reportPrivateUsage]

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

    anchor: Any = cast("Any", response_templates).load_response_template(template).start_anchor_re
    return anchor.search(prompt) is not None
