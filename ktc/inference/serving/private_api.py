"""Every private name of transformers' server that ktc uses.

`tests/inference/serving/test_private_api.py` checks each name with the oldest and the newest release (`make versions`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from transformers.cli.serving.utils import _StreamError as StreamError  # pyright: ignore[reportPrivateUsage]

__all__ = ["StreamError"]  # what ends a stream with an error


class HandlerHooks:
    """A base before a handler of requests: its steps, as methods with public names."""

    def _validate_request(self, body: dict[str, Any]) -> None:
        stock = cast("Any", super())._validate_request
        self.validate(body, lambda: stock(body))

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        stock = cast("Any", super())._build_generation_config
        return self.configure(body, lambda rest: stock(rest, *args, **kwargs))

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        return self.resolve(body)

    def require_valid(self, body: dict[str, Any]) -> None:
        """Validate a request before the handler does."""
        self._validate_request(body)

    def validate(self, body: dict[str, Any], stock: Callable[[], None]) -> None:
        """Validate a request; `stock` does what the handler does."""
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
