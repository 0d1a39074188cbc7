"""The request handlers of transformers' server, with stricter requests.

Input: the body of a request. A missing feature, a value of a wrong type and an unknown model are refused with 400, 404
or 422, never ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from fastapi import HTTPException
from jinja2.exceptions import TemplateError
from transformers.cli.serving import response
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import Modality

from ktc.foundation import versions
from ktc.inference.serving import fields
from ktc.inference.serving.answer_grammar import AnswerGrammar, AnswerGrammars, CallForm, JsonForm
from ktc.inference.serving.body_images import BODY_IMAGES, BodyImages
from ktc.inference.serving.choices import several
from ktc.inference.serving.private_api import HandlerHooks, call_marks, messages_of_input, open_thought
from ktc.inference.serving.prompt_length import is_long, least_tokens
from ktc.inference.serving.refusals import RequestRefused
from ktc.inference.serving.request_images import (
    ImageAllowance,
    ReadImages,
    images_of,
    inputs_of,
    read_images,
    require_readable,
)
from ktc.inference.serving.request_log import CHOICE
from ktc.inference.serving.tool_calls import UNREAD, UNREADABLE, RememberedAnswer, has_template, require_readable_calls
from ktc.model.hf.processor import placeholder_id
from ktc.model.hf.stock_model import vocabulary_of

log = logging.getLogger(__name__)
SEED: Final = "seed_of_the_request"  # an attribute of a generation config
ADAPTER: Final = "model_of_the_request"
GRAMMAR: Final = "grammar_of_the_request"
_MAX_SEED: Final = 2**32


class CheckedBody(dict[str, Any]):
    """A validated body without the fields that transformers' handlers do not know."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__({name: value for name, value in body.items() if name not in fields.OF_SERVER})
        self.num: int = body.get("n", 1)
        self.schema: dict[str, Any] | None = fields.schema_of(body)
        self.schema_field = schema_field(body)
        self.forced: tuple[dict[str, Any], ...] = fields.forced_tools(body)
        is_parallel: bool = body.get("parallel_tool_calls", True)
        self.may_repeat: bool = is_parallel and body.get("tool_choice") == "required"
        self.grammar: AnswerGrammar | None = None
        self.images: ReadImages | None = None

    def choice(self, number: int) -> CheckedBody:
        """Return the body of one answer of several, each with a seed of its own."""
        body = CheckedBody(self)
        body.grammar, body.images = self.grammar, self.images
        if "seed" in self:
            body["seed"] = (self["seed"] + number) % _MAX_SEED
        return body


class _Checked(HandlerHooks):
    """Mixin before a handler: validates a request before any work."""

    model_manager: Any
    generation_state: Any
    body_fields: fields.Fields
    grammars: AnswerGrammars
    images: ImageAllowance

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answer a request. A prompt without room, and a chat template that fails refuse it (400)."""
        try:
            self.require_valid(body)
            checked = CheckedBody(body)
            if is_long(checked):
                await self._require_room(checked)
            checked.images = await self._read_images(checked)
            checked.grammar = await self._grammar(checked)
            stock = cast("Any", super()).handle_request
            if checked.num == 1:
                return await stock(checked, request_id)

            def ask(number: int) -> Any:
                return stock(checked.choice(number), f"{request_id}{CHOICE}{number}")

            return await several(ask, checked.num, request_id)
        except HTTPException:
            raise
        except Exception as error:
            if not _is_of_template(error):
                raise
            words = f"the chat template refuses these messages: {error}"
            raise RequestRefused(400, words, "template_error", "messages") from error

    async def _require_room(self, body: dict[str, Any]) -> None:
        """Raise RequestRefused (400) for a prompt that is far too long, without stopping the event loop."""
        name, _, tokenizer = self.resolve(body)
        answers: Any = self.generation_state.get_manager()
        longest = answers.longest_prompt(name)
        if longest is not None:
            least = await asyncio.get_running_loop().run_in_executor(
                answers.preparing, lambda: least_tokens(tokenizer, self._prompt(body, tokenizer), longest)
            )
            answers.require_room(name, least, "at least ")

    async def _read_images(self, body: CheckedBody) -> ReadImages | None:
        """Return the inputs of a request with images in the form of a tokenizer, without stopping the event loop."""
        name, _, tokenizer = self.resolve(body)
        processor = self.model_manager.processor_of(name)
        (messages, tools), apart = self._messages(body), BODY_IMAGES.get(BodyImages())
        images = images_of(body, messages)
        require_readable(images, processor, self.images)
        if not images:
            return None

        def prepared() -> ReadImages:
            made: list[Any] = cast("Any", self).get_processor_inputs_from_messages(messages, Modality.VLM)
            variables: Any = body.get("chat_template_kwargs") or {}
            read = read_images(images, apart, self.images, made)
            inputs = inputs_of(processor, read, tools, variables)
            return ReadImages(tokenizer, inputs, placeholder_id(processor))

        answers: Any = self.generation_state.get_manager()
        made = await asyncio.get_running_loop().run_in_executor(answers.preparing, prepared)
        apart.drop()
        return made

    def _messages(self, body: dict[str, Any]) -> tuple[list[Any], Any]:
        """Return the messages of a request, and its tools. A completion has neither."""
        return [], None

    async def _grammar(self, body: CheckedBody) -> AnswerGrammar | None:
        """Return the compiled grammar of a request, without stopping the event loop. Raises RequestRefused."""
        if body.schema is None and not body.forced:
            return None
        name, model, tokenizer = self.resolve(body)
        answers: Any = self.generation_state.get_manager()
        ends, size = answers.ends(name), vocabulary_of(model)

        def compiled() -> AnswerGrammar:
            return self.grammars.compile(self._form(body, model, tokenizer), tokenizer, size, ends)

        return await asyncio.get_running_loop().run_in_executor(answers.preparing, compiled)

    def _form(self, body: CheckedBody, model: Any, tokenizer: Any) -> JsonForm | CallForm:
        """Return the form of an answer. It begins with the rest of a thought, where the prompt leaves one open."""
        form = (
            JsonForm(body.schema, body.schema_field)
            if body.schema is not None
            else self._call_form(body, model, tokenizer)
        )
        mark = self._open_thought(body, model, tokenizer)
        if mark is None:
            return form
        if not mark:
            message = f"`{form.field}` cannot be enforced: the template opens a thought that several marks may end"
            raise RequestRefused(400, message, "unsupported_value", form.field)
        return replace(form, thought_end=mark)

    def _open_thought(self, body: dict[str, Any], model: Any, tokenizer: Any) -> str | None:
        """Return the mark that ends the thought which the prompt leaves open, "" for several; None without thought."""
        del body, model, tokenizer
        return None

    def _call_form(self, body: CheckedBody, model: Any, tokenizer: Any) -> CallForm:
        marks = call_marks(tokenizer, model)
        if marks is None:
            kind = model.config.model_type
            message = f"`tool_choice` cannot be enforced for this `{kind}` model: its calls are not JSON between marks"
            raise RequestRefused(400, message, "unsupported_value", "tool_choice")
        return CallForm(body.forced, *marks, body.may_repeat)

    def _prompt(self, body: dict[str, Any], tokenizer: Any) -> str:
        """Return the text that the handler will tokenise."""
        raise NotImplementedError

    def _rendered(self, body: dict[str, Any], messages: list[Any], tools: object, tokenizer: Any) -> str:
        inputs = cast("Any", self).get_processor_inputs_from_messages(messages, Modality.LLM)
        variables: Any = body.get("chat_template_kwargs") or {}
        return tokenizer.apply_chat_template(
            inputs, add_generation_prompt=True, tools=tools, tokenize=False, **variables
        )

    def validate(self, body: dict[str, Any], stock: Callable[[dict[str, Any]], None]) -> None:
        if isinstance(body, CheckedBody):
            return
        fields.require_fields(body, self.body_fields)
        stock({name: value for name, value in body.items() if name not in fields.OF_SERVER})
        self.require_answerable(body)
        _require_one_form(body)

    def require_answerable(self, body: dict[str, Any]) -> None:
        """Check a body, whose fields are as they should be, against its model. Raises RequestRefused."""

    def configure(self, body: dict[str, Any], stock: Callable[[dict[str, Any]], Any]) -> Any:
        """Return a config that samples for a temperature above 0 and not for 0, for any config of the model.

        It draws from all tokens, as `ktc generate` does, where the model's config has no `top_k`: transformers would
        draw from 50.
        """
        rest = {name: value for name, value in body.items() if name not in ("seed", "temperature")}
        config = stock(rest)
        temperature = body.get("temperature")
        if temperature is not None:
            config.do_sample = temperature > 0
            config.temperature = float(temperature) if temperature > 0 else 1.0
        if config.do_sample and config.top_k is None:
            config.top_k = 0
        setattr(config, SEED, body.get("seed"))
        setattr(config, ADAPTER, body.get("model"))
        setattr(config, GRAMMAR, body.grammar if isinstance(body, CheckedBody) else None)
        return config

    def resolve(self, body: dict[str, Any]) -> tuple[str, Any, Any]:
        """Return the name, the model and the tokenizer of a request; refuse an unknown name with 404."""
        body["model"] = body.get("model") or self.model_manager.default
        model, tokenizer = self.model_manager.load_model_and_processor(body["model"])
        images = body.images if isinstance(body, CheckedBody) else None
        return body["model"], model, images or tokenizer

    def _require_template(self, body: dict[str, Any]) -> None:
        _, _, tokenizer = self.resolve(body)
        if not tokenizer.chat_template:
            message = "the model's tokenizer has no chat template; use /v1/completions"
            raise RequestRefused(400, message, "no_chat_template")


class _Read(_Checked):
    """Mixin before a handler that reads answers by a response template."""

    inputs_at: int
    """The position of the tokens among the arguments of the handler."""

    def _open_thought(self, body: dict[str, Any], model: Any, tokenizer: Any) -> str | None:
        return open_thought(tokenizer, model, self._prompt(body, tokenizer))

    async def answer_whole(self, stock: Callable[..., Awaitable[Any]], *given: Any, **named: Any) -> Any:
        """Answer as a whole. It stays text where no response template fits, or where its calls cannot be read."""
        request_id, model, tokenizer, *rest = given
        remembered = RememberedAnswer(named["gen_manager"], model, tokenizer)
        named["gen_manager"] = remembered
        if has_template(tokenizer, model, given[self.inputs_at]["input_ids"][0].tolist()):
            try:
                return await stock(*given, **named)
            except UNREADABLE as error:
                if not remembered.is_given:
                    raise
                log.warning("an answer stays text, since its tool calls cannot be read: %s", type(error).__name__)
        if "tool_config" in named:  # of releases before response templates
            named["tool_config"] = None
        return await stock(request_id, UNREAD, UNREAD, *rest, **named)


class Chat(_Read, ChatCompletionHandler):
    body_fields = fields.ChatFields
    inputs_at = 4

    def require_answerable(self, body: dict[str, Any]) -> None:
        self._require_template(body)
        _, model, tokenizer = self.resolve(body)
        fields.require_biases(body, vocabulary_of(model))
        if "logit_bias" in body:
            body["logit_bias"] = {token: float(bias) for token, bias in body["logit_bias"].items()}
        if tools := body.get("tools"):
            messages: Any = cast("Any", self).get_processor_inputs_from_messages(body["messages"], Modality.LLM)
            require_readable_calls(tokenizer, model, messages, tools)

    def _prompt(self, body: dict[str, Any], tokenizer: Any) -> str:
        return self._rendered(body, body["messages"], body.get("tools"), tokenizer)

    def _messages(self, body: dict[str, Any]) -> tuple[list[Any], Any]:
        return body["messages"], body.get("tools")


class Completion(_Checked, CompletionHandler):
    body_fields = fields.CompletionFields

    def _prompt(self, body: dict[str, Any], tokenizer: Any) -> str:
        return body["prompt"]


class Response(_Read, ResponseHandler):
    body_fields = fields.ResponseFields
    inputs_at = 5

    def validate(self, body: dict[str, Any], stock: Callable[[dict[str, Any]], None]) -> None:
        _require_usage()
        super().validate(body, stock)

    def require_answerable(self, body: dict[str, Any]) -> None:
        self._require_template(body)
        body.setdefault("stream", False)  # as OpenAI has it; the handler would stream
        if tools := body.get("tools"):
            _, model, tokenizer = self.resolve(body)
            messages, nested = messages_of_input(self, body)
            messages = cast("Any", self).get_processor_inputs_from_messages(messages, Modality.LLM)
            require_readable_calls(tokenizer, model, messages, nested or tools)

    def _prompt(self, body: dict[str, Any], tokenizer: Any) -> str:
        return self._rendered(body, *messages_of_input(self, body), tokenizer)

    def _messages(self, body: dict[str, Any]) -> tuple[list[Any], Any]:
        return messages_of_input(self, body)


def _require_one_form(body: dict[str, Any]) -> None:
    """Check that a body requires one form of its answer at most, which nothing cuts. Raises RequestRefused (400)."""
    has_schema, forced = fields.schema_of(body) is not None, fields.forced_tools(body)
    if has_schema and body.get("tools"):
        name = schema_field(body)
        message = f"an answer is JSON of `{name}`, or calls `tools`: send one of the two"
        raise RequestRefused(400, message, "invalid_value", name)
    if (has_schema or forced) and "stop" in body:
        name = schema_field(body) if has_schema else "tool_choice"
        message = f"a `stop` text could cut the JSON of `{name}`, which ends by itself: leave `stop` out"
        raise RequestRefused(400, message, "invalid_value", "stop")


def schema_field(body: Mapping[str, Any]) -> str:
    """Return the field of a body that has the schema of its answer."""
    return "text.format" if "text" in body else "response_format"


def _is_of_template(error: BaseException) -> bool:
    """Return whether an exception comes out of a chat template: Jinja names the file of its frames `<template>`."""
    if isinstance(error, TemplateError):
        return True
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            return True
        frame = frame.tb_next
    return False


def _require_usage() -> None:
    """Check that transformers can fill in OpenAI's response types; a newer openai may require more fields."""
    try:
        response.compute_usage(1, 1)
    except ValueError as error:  # pydantic's ValidationError
        names = (f"{name} {versions.installed(name)}" for name in ("transformers", "openai"))
        pair = " cannot write a response of ".join(names)
        message = f"{pair}; use /v1/chat/completions, or another release of either"
        raise RequestRefused(501, message) from error
