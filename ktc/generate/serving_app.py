"""The server of transformers with one model in it, already loaded and compiled.

Input: a `LanguageModel`. Output: the FastAPI application, reduced to the paths that this model supports. A request that
is too long, uses a missing feature or has a value of a wrong type is refused with 400 or 422, never ignored.
Requests are serialised: one thread generates, and the seed of a request is set there.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fastapi import HTTPException
from transformers.cli.serving import response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerateManager, GenerationState, Modality

from ktc import versions
from ktc.generate.answers import set_seed
from ktc.generate.language_model import LanguageModel
from ktc.generate.prompts import ROLES
from ktc.generate.text_stream import HeldText

PATHS = frozenset({"/health", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/responses"})
_SEED = "seed_of_the_request"


def serving_app(opened: LanguageModel) -> Any:
    """Return the application without its other paths (loading models by name, audio)."""
    build: Any = build_server
    manager, state = _OneModel(opened), _Generation(opened)
    handlers = {
        "chat_handler": _Chat(manager, state),
        "completion_handler": _Completion(manager, state),
        "response_handler": _Response(manager, state),
        "transcription_handler": None,
        "systemone_handler": None,
        "generation_state": state,
    }
    known = inspect.signature(build).parameters  # releases before 5.23 have fewer
    app = build(manager, **{name: value for name, value in handlers.items() if name in known})
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in PATHS]
    return app


class _OneModel(ModelManager):
    """A model manager with the one loaded model under every name."""

    def __init__(self, opened: LanguageModel) -> None:
        super().__init__()
        self.force_model = opened.name
        self._opened, self._since = opened, int(time.time())

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *_: Any, **__: Any) -> Any:
        return self._opened.model, self._opened.tokenizer

    @staticmethod
    def get_model_modality(*_: Any, **__: Any) -> Modality:
        return Modality.LLM

    def get_gen_models(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, *_: Any, **__: Any
    ) -> list[dict[str, Any]]:
        name = self._opened.name
        return [{"id": name, "object": "model", "created": self._since, "owned_by": "ktc"}]

    def shutdown(self) -> None:
        """Do nothing: this manager does not own the model."""


class _Generation(GenerationState):
    """One thread generates for all paths."""

    def __init__(self, opened: LanguageModel) -> None:
        super().__init__()
        self._manager = _Queued(opened)

    def get_manager(self, *_: Any, **__: Any) -> Any:
        return self._manager


class _Queued(GenerateManager):
    """`generate` for one request at a time, each with its seed and stop texts."""

    def __init__(self, opened: LanguageModel) -> None:
        super().__init__()
        self._opened = opened

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        self._require_fit(inputs, gen_config)
        seeded: Any = _Seeded(model, getattr(gen_config, _SEED, None))
        make = cast("Any", super())
        queue, streamer = make.generate_streaming(seeded, processor, inputs, gen_config, *more, **named)
        return _UntilStop(queue, _stop_texts(gen_config)), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        self._require_fit(inputs, gen_config)
        seeded: Any = _Seeded(model, getattr(gen_config, _SEED, None))
        found: Any = await super().generate_non_streaming(seeded, processor, inputs, gen_config, *more, **named)
        text, *rest = found
        return HeldText(_stop_texts(gen_config)).add(text, complete=True), *rest

    def _require_fit(self, inputs: Any, config: Any) -> None:
        """Refuse a prompt that leaves no room; limit the new tokens to the room left."""
        length, limit = int(inputs["input_ids"].shape[-1]), self._opened.max_length
        if length == 0:
            raise HTTPException(400, "the prompt is empty")
        if limit is None:
            return
        if length >= limit:
            raise HTTPException(400, f"the prompt has {length} tokens, and the model's length is {limit}")
        config.max_new_tokens = min(config.max_new_tokens, limit - length)


@dataclass(frozen=True, slots=True)
class _Seeded:
    """`generate` with a seed set immediately before it, on the generating thread."""

    model: Any
    seed: int | None

    def generate(self, **options: Any) -> Any:
        if self.seed is not None:
            set_seed(self.seed)
        return self.model.generate(**options)


class _UntilStop:
    """The queue of a stream whose text ends before a stop text. None ends it; other objects pass through."""

    def __init__(self, queue: asyncio.Queue[Any], stop: Sequence[str]) -> None:
        self._queue, self._held = queue, HeldText(stop)

    async def get(self) -> Any:
        while (item := self._passed(await self._queue.get())) == "":
            pass
        return item

    def get_nowait(self) -> Any:
        while (item := self._passed(self._queue.get_nowait())) == "":
            pass
        return item

    def _passed(self, item: Any) -> Any:
        if type(item) is str:
            return self._held.add(item)
        rest = self._held.add("", complete=True) if item is None else ""
        if rest:
            self._queue.put_nowait(None)
            return rest
        return item


def _stop_texts(config: Any) -> tuple[str, ...]:
    found: Any = config.stop_strings
    return () if not found else (found,) if isinstance(found, str) else tuple(found)


# Requests ------------------------------------------------------------------------------------------------------------
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
        setattr(config, _SEED, body.get("seed"))
        return config

    def _require_template(self) -> None:
        _, tokenizer = self.model_manager.load_model_and_processor()
        if not tokenizer.chat_template:
            raise HTTPException(400, "the model's tokenizer has no chat template; use /v1/completions")


class _Chat(_Checked, ChatCompletionHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        self._require_template()
        messages: Any = body.get("messages")
        if not (isinstance(messages, list) and messages):
            raise HTTPException(422, "`messages` must be a list of turns")
        for turn in cast("list[Any]", messages):
            if not (isinstance(turn, dict) and cast("dict[str, Any]", turn).get("role") in ROLES):
                raise HTTPException(422, f"a turn must have a `role` of {', '.join(ROLES)}, and `content`")


class _Completion(_Checked, CompletionHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        prompt = body.get("prompt")
        if not (isinstance(prompt, str) and prompt):
            raise HTTPException(422, "`prompt` must be a text, and not empty")


class _Response(_Checked, ResponseHandler):
    def _validate_request(self, body: dict[str, Any]) -> None:
        _require_usage()
        super()._validate_request(body)
        self._require_template()
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
