"""`Answers`: what transformers' request handlers call to generate, answered by the engine.

In: token ids and a generation config of a handler. Out: a queue of text pieces, or a tensor of tokens. The engine's
events are passed to the event loop once per step; there, a client that reads slowly fills its own queue only.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from transformers.cli.serving.utils import GenerateManager

from ktc.inference.generate.text_stream import HeldText
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.handlers import ADAPTER, GRAMMAR, SEED
from ktc.inference.serving.metrics import Metrics, RequestClock
from ktc.inference.serving.models import ServedModels
from ktc.inference.serving.private_api import StreamError
from ktc.inference.serving.refusals import RequestRefused
from ktc.inference.serving.request import Event, Refused, Request
from ktc.inference.serving.request_images import ImageAllowance, ReadImages
from ktc.inference.serving.request_log import LoggedRequest, RequestLog
from ktc.inference.serving.tool_calls import ForgivingParser, has_template

log = logging.getLogger(__name__)
_STATUS: Final = {
    "too long": (400, "context_length_exceeded"), "busy": (429, "rate_limit_exceeded"), "stopping": (503, "stopping"),
}  # fmt: skip
_STATUS_OF_END: Final = {"generation_failed": 500, "schema_too_complex": 400}
_RETRY_AFTER: Final = "1"  # seconds


class Answers(GenerateManager):
    """The generation of all paths. `engine` is set before the first request."""

    engine: Engine

    def __init__(
        self, models: ServedModels, metrics: Metrics, log_of_requests: RequestLog, images: ImageAllowance
    ) -> None:
        """Make it without the thread of transformers, which would call `generate`."""
        self.images = images
        self._models, self._metrics, self._log = models, metrics, log_of_requests
        self._running: dict[str, _Running] = {}  # of the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self.preparing = ThreadPoolExecutor(1, "ktc-preparing")
        """The thread that counts long prompts and compiles schemas: one at a time, since each may take a core."""

    # Called by handlers, on the event loop ----------------------------------------------------------------------------
    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a handler's function here: it only hands over its inputs."""
        return fn(*args, **kwargs)

    def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a handler's function here, and return its future."""
        return fn(*args, **kwargs)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        """Start a request; return the queue of its text and its streamer."""
        request = self._request(inputs, gen_config, processor)
        port: Any = _Port()
        make = cast("Any", super())
        if (parser := named.get("response_parser")) is not None:
            fits = has_template(processor, model, request.tokens)
            named["response_parser"] = ForgivingParser(parser, processor.all_special_tokens) if fits else None
        queue, streamer = make.generate_streaming(port, processor, inputs, gen_config, *more, **named)
        streamer.put(torch.tensor(request.tokens))
        self._start(request, _Streamed(streamer, queue), named["request_id"])
        return _UntilStop(queue, request.stop), _Cancelling(self, request.name, streamer)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *more: Any, **named: Any
    ) -> Any:
        """Answer a request as a whole: its text, the length of the prompt, and the new tokens."""
        request = self._request(inputs, gen_config, processor)
        whole = _Whole(request, asyncio.get_running_loop().create_future())
        port: Any = _Port(whole.future)
        self._start(request, whole, named["request_id"])
        try:
            answer: Any = await super().generate_non_streaming(port, processor, inputs, gen_config, *more, **named)
        except asyncio.CancelledError:
            self.cancel(request.name)
            raise
        text, *rest = answer
        return HeldText(request.stop).add(text, complete=True), *rest

    def cancel(self, name: str) -> None:
        """End a request whose client is gone."""
        if (running := self._running.get(name)) is not None:
            running.is_read = False
        self.engine.cancel(name)

    def ends(self, model: str) -> frozenset[int]:
        """Return the tokens that end an answer of a model by its name."""
        return self._models.names[model].opened.eos_ids

    def _request(self, inputs: Any, config: Any, tokenizer: Any) -> Request:
        """Return the request of a handler. An empty prompt, and one that leaves no room, are refused."""
        model = getattr(config, ADAPTER)
        served = self._models.names[model]
        tokens = tuple(inputs["input_ids"][0].tolist())
        if not tokens:
            raise RequestRefused(400, "the prompt is empty", "empty_prompt")
        config.max_new_tokens = min(config.max_new_tokens, self.require_room(model, len(tokens)))
        if config.eos_token_id is None:
            config.eos_token_id = sorted(served.opened.eos_ids) or None
        config.pad_token_id = served.opened.pad_id
        return Request(
            uuid.uuid4().hex, tokens, config.max_new_tokens, config, getattr(config, SEED, None), served.adapter,
            _stop_texts(config), tokenizer, getattr(config, GRAMMAR, None), self._pixels(tokenizer),
            tokenizer.key if isinstance(tokenizer, ReadImages) else None,
        )  # fmt: skip

    def _pixels(self, tokenizer: Any) -> Mapping[str, Any]:
        """Return the pixels of a request. Raises RequestRefused (429) where those of all would take too much memory."""
        pixels = tokenizer.pixels if isinstance(tokenizer, ReadImages) else {}
        if _num_bytes(pixels) > self.images.pixel_bytes:
            message = "the images of this request have more pixels than the server keeps of all requests"
            raise RequestRefused(400, message, "invalid_image", "messages")
        others = {id(running.pixels): running.pixels for running in self._running.values()}  # choices share theirs
        others.pop(id(pixels), None)
        if pixels and sum(map(_num_bytes, others.values())) + _num_bytes(pixels) > self.images.pixel_bytes:
            message = "the images of other requests take the memory for pixels"
            raise RequestRefused(429, message, headers={"Retry-After": _RETRY_AFTER})
        return pixels

    def require_room(self, model: str, length: int, least: str = "") -> int:
        """Return the number of new tokens that fit after a prompt. Raises RequestRefused (400) for none."""
        limits = self._limits(model)
        for limit, whose in limits:
            if length >= limit:
                message = f"the prompt has {least}{length} tokens, and {whose} is {limit}"
                raise RequestRefused(400, message, "context_length_exceeded")
        return min(limit - length for limit, _ in (*limits, (1 << 40, "")))

    def longest_prompt(self, model: str) -> int | None:
        """Return the length from which on no prompt is taken, None where there is none."""
        return min((limit for limit, _ in self._limits(model)), default=None)

    def _limits(self, model: str) -> list[tuple[int, str]]:
        longest = self.engine.max_length
        cached = None if longest is None else longest + 1  # the last token is not cached
        both = (self._models.names[model].opened.max_length, "the model's length"), (cached, "the room of the cache")
        return [(limit, whose) for limit, whose in both if limit is not None]

    def _start(self, request: Request, to: _Streamed | _Whole, request_id: str) -> None:
        self._loop = asyncio.get_running_loop()
        name = self._models.name_of(request.adapter)
        logged = self._log.of(request_id)
        if logged is not None:
            logged.model, logged.prompt_tokens = name, len(request.tokens)
        clock = self._metrics.started(name, len(request.tokens))
        self._running[request.name] = _Running(to, clock, logged, request.pixels)
        try:
            self.engine.submit(request)
        except Refused as refused:
            self._running.pop(request.name).clock.ended("refused")
            headers = {"Retry-After": _RETRY_AFTER} if refused.reason != "too long" else None
            status, code = _STATUS[refused.reason]
            raise RequestRefused(status, str(refused), code, headers=headers) from refused

    # Called by the engine ---------------------------------------------------------------------------------------------
    def emit(self, events: Sequence[Event]) -> None:
        """Pass events to the event loop; without one they have no reader."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            running = self._running.get(event.name)
            if running is None:
                continue
            running.clock.tokens(len(event.tokens))
            outcome = "" if event.end is None else event.end.finish or "error"
            if running.logged is not None:
                running.logged.add(len(event.tokens), outcome)
            if outcome:
                del self._running[event.name]
                running.clock.ended(outcome)
            if not running.is_read:
                continue
            try:
                running.to.receive(event)
            except Exception as error:  # of a tokenizer or a parser; the other requests continue
                log.exception("an answer could not be passed to its client")
                running.to.fail(error)
                running.is_read = False
                self.engine.cancel(event.name)


@dataclass(slots=True)
class _Running:
    to: _Streamed | _Whole
    clock: RequestClock
    logged: LoggedRequest | None
    pixels: Mapping[str, Any]
    is_read: bool = True  # by a client; a streamer refuses tokens after it was cancelled


@dataclass(frozen=True, slots=True)
class _Port:
    """Stands for the model of a handler, whose `generate` takes the inputs only; the engine has them."""

    future: Any = None

    def generate(self, **_: Any) -> Any:
        return self.future


@dataclass(frozen=True, slots=True)
class _Streamed:
    """Passes tokens to the streamer of a handler, which turns them into pieces of text."""

    streamer: Any
    queue: asyncio.Queue[Any]

    def receive(self, event: Event) -> None:
        if event.tokens:
            self.streamer.put(torch.tensor(event.tokens))
        if event.end is None:
            return
        if event.end.error:
            self.queue.put_nowait(StreamError(_plain(event.end.error)))
        else:
            self.streamer.end()

    def fail(self, error: Exception) -> None:
        """End the stream, whose text could not be made of its tokens."""
        self.queue.put_nowait(StreamError(_plain(f"{type(error).__name__}: {error}")))


@dataclass(frozen=True, slots=True)
class _Whole:
    """Collects the tokens of a request for its future."""

    request: Request
    future: asyncio.Future[Any]
    tokens: list[int] = field(default_factory=list[int])

    def receive(self, event: Event) -> None:
        self.tokens.extend(event.tokens)
        if event.end is None or self.future.done():
            return
        if event.end.error:
            status = _STATUS_OF_END.get(event.end.code, 503)
            self.future.set_exception(RequestRefused(status, event.end.error, event.end.code))
        else:
            self.future.set_result(torch.tensor([[*self.request.tokens, *self.tokens]]))

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if not self.future.done():
            self.future.set_exception(error)


class _Cancelling:
    """The streamer of a handler, whose `cancel` also ends the request."""

    def __init__(self, answers: Answers, name: str, streamer: Any) -> None:
        self._answers, self._name, self._streamer = answers, name, streamer

    def cancel(self) -> None:
        self._streamer.cancel()
        self._answers.cancel(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer, name)


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


def _num_bytes(pixels: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in pixels.values() if isinstance(value, torch.Tensor))


def _stop_texts(config: Any) -> tuple[str, ...]:
    texts: Any = config.stop_strings
    return () if not texts else (texts,) if isinstance(texts, str) else tuple(texts)


def _plain(error: str) -> str:
    """Return an error without characters that a JSON text would escape: the handlers do not."""
    return error.replace("\\", "/").replace('"', "'").replace("\n", " ")
