"""The request handlers of transformers' server, with stricter requests.

Input: the body of a request. A missing feature, a value of a wrong type and an unknown model are refused with 400, 404
or 422, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from fastapi import HTTPException
from transformers.cli.serving import response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler

from ktc import versions
from ktc.generate.prompts import ROLES

SEED: Final = "seed_of_the_request"  # an attribute of a generation config
ADAPTER: Final = "model_of_the_request"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _are_texts(value: object) -> bool:
    texts = [value] if isinstance(value, str) else cast("list[Any]", value) if isinstance(value, list) else [None]
    return all(isinstance(text, str) and text for text in texts)


# Allowed values of a field; a single allowed value means that the feature is missing.
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "temperature": lambda v: _is_number(v) and v >= 0,
    "top_p": lambda v: _is_number(v) and 0 < v <= 1,
    "seed": lambda v: type(v) is int and 0 <= v < 2**32,
    "max_tokens": _is_count,
    "max_completion_tokens": _is_count,
    "max_output_tokens": _is_count,
    "frequency_penalty": _is_number,
    "stop": _are_texts,
    "stream": lambda v: isinstance(v, bool),
    "n": lambda v: v == 1,
    "best_of": lambda v: v == 1,
    "echo": lambda v: v is False,
    "logprobs": lambda v: v is False,
    "presence_penalty": lambda v: v == 0,
    "response_format": lambda v: v == {"type": "text"},
    "generation_config": lambda v: False,
}


class _Checked:
    """Mixin before a handler: validates a request before any work."""

    model_manager: Any

    def _validate_request(self, body: dict[str, Any]) -> None:
        wrong = [name for name, fits in _FIELDS.items() if body.get(name) is not None and not fits(body[name])]
        if wrong:
            raise HTTPException(422, f"these fields have unsupported values: {', '.join(wrong)}")
        cast("Any", super())._validate_request(body)

    def _build_generation_config(self, body: dict[str, Any], *more: Any, **named: Any) -> Any:
        """Return a config that samples for a temperature above 0 and not for 0, for any config of the model."""
        rest = {name: value for name, value in body.items() if name not in ("seed", "temperature")}
        config: Any = cast("Any", super())._build_generation_config(rest, *more, **named)
        temperature = body.get("temperature")
        if temperature is not None:
            config.do_sample = temperature > 0
            config.temperature = float(temperature) if temperature > 0 else 1.0
        setattr(config, SEED, body.get("seed"))
        setattr(config, ADAPTER, body.get("model"))
        return config

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        """Return the name, the model and the tokenizer of a request; refuse an unknown name with 404."""
        body["model"] = body.get("model") or self.model_manager.default
        model, tokenizer = self.model_manager.load_model_and_processor(body["model"])
        return body["model"], model, tokenizer

    def _require_template(self, body: dict[str, Any]) -> None:
        _, _, tokenizer = self._resolve_model(body)
        if not tokenizer.chat_template:
            raise HTTPException(400, "the model's tokenizer has no chat template; use /v1/completions")


class Chat(_Checked, ChatCompletionHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        self._require_template(body)
        messages: Any = body.get("messages")
        if not (isinstance(messages, list) and messages):
            raise HTTPException(422, "`messages` must be a list of turns")
        for turn in cast("list[Any]", messages):
            if not (isinstance(turn, dict) and cast("dict[str, Any]", turn).get("role") in ROLES):
                raise HTTPException(422, f"a turn must have a `role` of {', '.join(ROLES)}, and `content`")


class Completion(_Checked, CompletionHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        prompt = body.get("prompt")
        if not (isinstance(prompt, str) and prompt):
            raise HTTPException(422, "`prompt` must be a text, and not empty")


class Response(_Checked, ResponseHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        _require_usage()
        super()._validate_request(body)
        self._require_template(body)
        if not body.get("input"):
            raise HTTPException(422, "`input` must be a text or a list of turns, and not empty")
        body.setdefault("stream", False)  # as OpenAI has it; the handler would stream


def _require_usage() -> None:
    """Check that transformers can fill in OpenAI's response types; a newer openai may require more fields."""
    try:
        response.compute_usage(1, 1)
    except ValueError as error:  # pydantic's ValidationError
        names = (f"{name} {versions.installed(name)}" for name in ("transformers", "openai"))
        pair = " cannot write a response of ".join(names)
        raise HTTPException(501, f"{pair}; use /v1/chat/completions, or another release of either") from error
