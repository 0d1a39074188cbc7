"""Several answers, JSON of a schema, tool calls and the log: what a request may ask for beside a text."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_servers import served
from written_answers import write

from ktc.foundation import versions
from ktc.inference.serving import server as serve
from ktc.inference.serving.models import ServedModels, open_served_models
from ktc.inference.serving.request import Limits
from ktc.inference.serving.request_log import RequestLog

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in serve.PACKAGES), reason="the extra `serve` is not installed"
    ),
]
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Chur"]},
        "rain": {"type": "boolean"},
        "days": {
            "type": "array",
            "items": {"type": "integer", "minimum": 1, "maximum": 31},
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": ["city", "rain", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALLS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "ANSWER",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text", "close": "<|end|>"},
    },
}  # fmt: skip
needs_templates = pytest.mark.skipif(
    versions.release(versions.installed("transformers") or "0") < (5, 10),
    reason="this release of transformers has no response templates",
)


@pytest.fixture(scope="module")
def models(compiled: Path) -> ServedModels:
    return open_served_models(compiled, reference=True)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return []


@pytest.fixture(scope="module")
def client(models: ServedModels, lines: list[str]) -> Iterator[Any]:
    from openai import OpenAI

    with served(models, Limits(batch=4), log_line=lines.append) as url:
        yield OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)


@pytest.fixture
def tokenizer(models: ServedModels) -> Any:
    return models.default.opened.tokenizer


def ask(client: Any, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "v2_twin", "messages": HELLO, "max_tokens": 8, **more})


def asked_again(client: Any) -> Any:
    from openai import RateLimitError

    try:
        return ask(client, n=2)
    except RateLimitError:
        time.sleep(0.02)
        return None


def texts(chunks: list[Any], num: int) -> list[str]:
    parts = [[c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == at] for at in range(num)]
    return ["".join(of_one) for of_one in parts]


def test_several_answers_are_those_of_their_seeds_streamed_or_not(client: Any) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 5, "n": 3}
    found = ask(client, **options)
    alone = [ask(client, **{**options, "n": 1, "seed": seed}).choices[0].message.content for seed in (5, 6, 7)]
    assert [choice.message.content for choice in found.choices] == alone
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert (found.usage.completion_tokens, found.usage.prompt_tokens) == (24, ask(client).usage.prompt_tokens)
    chunks = list(ask(client, **options, stream=True))
    assert texts(chunks, 3) == alone
    assert (chunks[-1].usage.completion_tokens, len({chunk.id for chunk in chunks})) == (24, 1)


def test_a_completion_has_several_answers_too(client: Any) -> None:
    options: dict[str, Any] = {"model": "v2_twin", "prompt": "Rain falls", "max_tokens": 4, "temperature": 0, "n": 2}
    found = client.completions.create(**options)
    assert len(found.choices) == 2 and found.choices[0].text == found.choices[1].text != ""


def test_too_many_answers_for_the_places_leave_none_running(models: ServedModels, client: Any) -> None:
    from openai import RateLimitError

    for stream in (False, True):
        with served(models, Limits(batch=2, waiting=0)) as url:
            small = client.with_options(base_url=url)
            with pytest.raises(RateLimitError):
                list(ask(small, n=3, max_tokens=1500, stream=stream))
            end = time.monotonic() + 30  # the first two are cancelled after a pass of the engine
            while (again := asked_again(small)) is None:
                assert time.monotonic() < end
            assert again.usage.completion_tokens == 16


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.5, "seed": 3, "top_p": 0.7, "n": 2}], ids=str
)
def test_an_answer_is_json_of_the_schema(client: Any, options: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    found = ask(client, response_format=FORMAT, max_tokens=200, **options)
    streamed = list(ask(client, response_format=FORMAT, max_tokens=200, stream=True, **options))
    written = [choice.message.content for choice in found.choices]
    assert texts(streamed, len(written)) == written
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    for text in written:
        value = json.loads(text)
        assert list(value) == ["city", "rain", "days"] and value["city"] in ("Bern", "Chur")
        assert all(1 <= day <= 31 for day in value["days"]) and 1 <= len(value["days"]) <= 2


def test_any_json_object_is_a_format_and_others_are_not_disturbed(client: Any) -> None:
    pytest.importorskip("llguidance")
    plain = ask(client, temperature=0, max_tokens=20).choices[0].message.content
    assert (
        ask(client, temperature=0, response_format={"type": "json_object"}).choices[0].message.content.startswith("{")
    )
    assert ask(client, temperature=0, max_tokens=20).choices[0].message.content == plain


def test_a_schema_that_cannot_be_enforced_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from openai import APIStatusError

    pytest.importorskip("llguidance")
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(APIStatusError, match="uniqueItems") as refused:
        ask(client, response_format=wrong)
    assert refused.value.status_code == 400
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "llguidance" else installed(name))
    with pytest.raises(APIStatusError, match="pip install llguidance") as refused:
        ask(client, response_format=FORMAT)
    assert refused.value.status_code == 501


def alternatives(num: int) -> dict[str, Any]:
    """The schema of an object with an array of one of `num` kinds."""
    arrays = [{"type": "array", "items": {"type": "integer", "minimum": least}} for least in range(num)]
    return {"type": "object", "properties": {"days": {"anyOf": arrays}}, "required": ["days"]}


def test_a_schema_beyond_the_limits_of_the_parser_is_a_fault_of_its_client(
    client: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openai import APIError, BadRequestError

    pytest.importorskip("llguidance")
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": alternatives(1199)}}}
    with pytest.raises(BadRequestError, match=r"Current row has .* items; max is 2000") as refused:
        ask(client, **asked)
    assert refused.value.code == "invalid_value"
    monkeypatch.setattr("ktc.inference.serving.answer_grammar._require_beginning", lambda *_: None)
    write(monkeypatch, tokenizer, '{"days": [')
    with pytest.raises(BadRequestError, match=r"too complex: .* max is 2000") as refused:
        ask(client, **asked, max_tokens=50)
    assert refused.value.code == "schema_too_complex"
    with pytest.raises(APIError) as ended:
        list(ask(client, **asked, max_tokens=50, stream=True))
    assert "the JSON schema is too complex: " in str(ended.value.body)


@pytest.mark.parametrize("stop", ["}", [","]])
def test_stop_texts_beside_a_schema_are_refused(client: Any, stop: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="leave `stop` out"):
        ask(client, response_format=FORMAT, stop=stop)
    assert ask(client, response_format={"type": "text"}, stop=stop).choices


def test_a_joined_stream_ends_with_what_one_of_its_streams_raises() -> None:
    import asyncio

    from fastapi.responses import StreamingResponse

    from ktc.inference.serving.choices import several

    async def parts(number: int) -> AsyncIterator[str]:
        yield f'data: {{"choices": [{{"text": "{number}"}}]}}\n\n'
        if number:
            raise OSError("broken")
        await asyncio.Event().wait()

    async def ask_one(number: int) -> Any:
        return StreamingResponse(parts(number))

    async def read() -> None:
        joined: Any = await several(ask_one, 2, "x")
        async for _ in joined.body_iterator:
            pass

    with pytest.raises(OSError, match="broken"):
        asyncio.run(asyncio.wait_for(read(), 20))


@pytest.fixture
def calling(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tokenizer, with a template that shows tools and one that reads their calls."""
    template = "{{ tools }}{% for turn in messages %}{{ turn.content }}{% endfor %}ANSWER"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    monkeypatch.setattr(tokenizer, "response_template", CALLS, raising=False)
    return tokenizer


def streamed_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    deltas = [chunk.choices[0].delta for chunk in chunks]
    return [(call.function.name, call.function.arguments) for delta in deltas for call in delta.tool_calls or ()]


@needs_templates
def test_a_tool_call_is_read_by_the_template_streamed_or_not(
    client: Any, calling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
    write(monkeypatch, calling, f"Let me see. {call}")
    found = ask(client, tools=[TOOL], max_tokens=200).choices[0]
    assert found.finish_reason == "tool_calls"
    assert [(one.function.name, one.function.arguments) for one in found.message.tool_calls] == [
        ("weather", '{"city": "Bern"}')
    ]
    chunks = list(ask(client, tools=[TOOL], max_tokens=200, stream=True))
    assert streamed_calls(chunks) == [("weather", '{"city": "Bern"}')]
    assert texts(chunks, 1) == ["Let me see."]
    assert ask(client, tools=[TOOL], tool_choice="none").choices[0].message.content


@needs_templates
@pytest.mark.parametrize(
    "written",
    ["<tool_call>{bad}</tool_call>", '<tool_call>{"name": "weather"}</tool_call>', '<tool_call>{"name": "wea',
     "<tool_call>[1]</tool_call>"],
)  # fmt: skip
def test_a_call_that_cannot_be_read_stays_text(
    client: Any, calling: Any, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    write(monkeypatch, calling, f"See: {written}")
    found = ask(client, tools=[TOOL], max_tokens=200).choices[0]
    assert (found.message.content, found.finish_reason, found.message.tool_calls) == (f"See: {written}", "stop", None)
    chunks = list(ask(client, tools=[TOOL], max_tokens=200, stream=True))
    assert "".join(texts(chunks, 1)).replace(" ", "") == f"See:{written}".replace(" ", "")
    assert streamed_calls(chunks) == []
    flat = {"type": "function", **TOOL["function"]}
    said = client.responses.create(model="v2_twin", input="Hello", tools=[flat], max_output_tokens=200)
    assert said.output_text == f"See: {written}"


@needs_templates
@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_does_not_fit_the_chats_leaves_the_prompt_out_of_the_answer(
    client: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    write(monkeypatch, tokenizer, "It rains.")
    monkeypatch.setattr(tokenizer, "response_template", {**CALLS, "start_anchor": "<|im_start|>"}, raising=False)
    found = ask(client, max_tokens=50, stream=stream)
    assert (texts(list(found), 1) if stream else [found.choices[0].message.content]) == ["It rains."]
    if not stream:
        said = client.responses.create(model="v2_twin", input="Hello", max_output_tokens=50)
        assert said.output_text == "It rains."


def test_tools_are_refused_where_nobody_reads_or_shows_them(
    client: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="cannot read the tool calls of this `deepseek_v2`"):
        ask(client, tools=[TOOL])
    monkeypatch.setattr("ktc.inference.serving.private_api.reads_tool_calls", lambda *_: True)
    with pytest.raises(BadRequestError, match="does not show tools"):
        ask(client, tools=[TOOL])
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}{{ messages }}")
    with pytest.raises(BadRequestError, match="send one of the two"):
        ask(client, tools=[TOOL], response_format=FORMAT)


def test_a_completion_and_a_response_are_json_of_the_schema_too(client: Any) -> None:
    pytest.importorskip("llguidance")
    completed = client.completions.create(
        model="v2_twin", prompt="Rain", max_tokens=200, temperature=0, extra_body={"response_format": FORMAT}
    )
    flat = {"type": "json_schema", "name": "weather", "strict": True, "schema": SCHEMA}
    said = client.responses.create(
        model="v2_twin", input="Hello", temperature=0, max_output_tokens=200, text={"format": flat}
    )
    for text in (completed.choices[0].text, said.output_text):
        assert list(json.loads(text)) == ["city", "rain", "days"]


OTHER: Any = {"type": "function", "function": {"name": "news", "parameters": {"type": "object"}}}
STRICT: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Bern", "Chur"]}},
        },
    },
}


@needs_templates
@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_is_written_by_a_model_that_would_not_call(client: Any, calling: Any, stream: bool) -> None:
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": "weather"}}
    options: dict[str, Any] = {"tools": [OTHER, STRICT], "tool_choice": named, "max_tokens": 200, "temperature": 0}
    if stream:
        calls = streamed_calls(list(ask(client, stream=True, **options)))
    else:
        calls = [
            (one.function.name, one.function.arguments) for one in ask(client, **options).choices[0].message.tool_calls
        ]
    ((name, arguments),) = calls
    assert name == "weather" and json.loads(arguments)["city"] in ("Bern", "Chur")


@needs_templates
def test_any_tool_may_be_required_in_chats_and_responses(client: Any, calling: Any) -> None:
    pytest.importorskip("llguidance")
    asked = ask(client, tools=[STRICT], tool_choice="required", max_tokens=400, temperature=0).choices[0].message
    assert {call.function.name for call in asked.tool_calls} == {"weather"}
    flat = {"type": "function", **STRICT["function"]}
    named = {"type": "function", "name": "weather"}
    said = client.responses.create(
        model="v2_twin", input="Hello", tools=[flat], tool_choice=named, temperature=0, max_output_tokens=200
    )
    assert [item.name for item in said.output if item.type == "function_call"] == ["weather"]


def test_calls_between_special_tokens_follow_the_grammar(tokenizer: Any) -> None:
    pytest.importorskip("llguidance")
    from ktc.inference.serving.answer_grammar import AnswerGrammars, CallForm

    form = CallForm((STRICT["function"], {"name": 'a "b"'}), "<|user|>", "<|system|>", may_repeat=True)
    grammar = AnswerGrammars().compile(form, tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    first = '<|user|>\n{"name": "weather", "arguments": {"city": "Chur"}}\n<|system|>'
    second = '<|user|>\n{"name": "a \\"b\\"", "arguments": {"any": [1]}}\n<|system|>'
    answer = grammar.start()
    for token in tokenizer(f"{first}\n{second}", add_special_tokens=False)["input_ids"]:
        answer.add(token)
    with pytest.raises(RuntimeError, match="cannot be followed"):
        for token in tokenizer(first.replace("Chur", "Rome"), add_special_tokens=False)["input_ids"]:
            answer.add(token)


@needs_templates
def test_a_required_call_is_refused_where_it_cannot_be_enforced(
    client: Any, calling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openai import BadRequestError

    named = {"type": "function", "function": {"name": "news"}}
    with pytest.raises(BadRequestError, match="names none of the `tools`"):
        ask(client, tools=[TOOL], tool_choice=named)
    with pytest.raises(BadRequestError, match="names none of the `tools`"):
        ask(client, tool_choice="required")
    with pytest.raises(BadRequestError, match="leave `stop` out"):
        ask(client, tools=[TOOL], tool_choice="required", stop="}")
    calls = {**CALLS["fields"]["tool_calls"], "content": "text"}
    monkeypatch.setattr(calling, "response_template", {**CALLS, "fields": {**CALLS["fields"], "tool_calls": calls}})
    with pytest.raises(BadRequestError, match="its calls are not JSON between marks"):
        ask(client, tools=[TOOL], tool_choice="required")


THINKING = {
    **CALLS,
    "fields": {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}, **CALLS["fields"]},
}
AFTER_THOUGHT = "</think>\n\n"


@pytest.fixture
def thinking(calling: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tokenizer, with a template that ends the prompt in an open thought."""
    monkeypatch.setattr(calling, "chat_template", f"{calling.chat_template}<think>\n")
    monkeypatch.setattr(calling, "response_template", THINKING)
    return calling


@needs_templates
def test_json_and_calls_come_after_a_thought_that_the_prompt_opens(
    client: Any, thinking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    value = '{"city": "Bern", "rain": true, "days": [1]}'
    write(monkeypatch, thinking, f"Bern {{it}} is.\n{AFTER_THOUGHT}{value}")
    for message in (
        ask(client, response_format=FORMAT, max_tokens=200).choices[0].message,
        ask(client, response_format=FORMAT, max_tokens=200, n=2).choices[1].message,
    ):
        assert json.loads(message.content) == json.loads(value)
        assert message.reasoning_content.strip() == "Bern {it} is."
    write(monkeypatch, thinking, value)  # JSON in the thought is not the answer
    cut = ask(client, response_format=FORMAT, max_tokens=4).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Chur"}}\n</tool_call>'
    write(monkeypatch, thinking, f"Rain?{AFTER_THOUGHT}{call}")
    called = ask(client, tools=[STRICT], tool_choice="required", max_tokens=200).choices[0]
    assert [one.function.arguments for one in called.message.tool_calls] == ['{"city": "Chur"}']
    assert called.message.reasoning_content.strip() == "Rain?"


@needs_templates
def test_a_form_is_refused_where_a_thought_has_not_one_end(
    client: Any, thinking: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from openai import BadRequestError

    thought = {"open": "<think>", "close_pattern": "</think>|<end>", "content": "text"}
    parts = {**THINKING["fields"], "reasoning_content": thought}
    monkeypatch.setattr(thinking, "response_template", {**THINKING, "fields": parts})
    with pytest.raises(BadRequestError, match="the template opens a thought") as refused:
        ask(client, response_format=FORMAT)
    assert refused.value.param == "response_format"


@needs_templates
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_repeat_only_where_they_may_be_parallel(
    client: Any, calling: Any, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    pytest.importorskip("llguidance")
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Chur"}}\n</tool_call>'
    write(monkeypatch, calling, f"{call}\n{call}")
    asked = ask(client, tools=[STRICT], tool_choice="required", max_tokens=400, parallel_tool_calls=parallel)
    assert len(asked.choices[0].message.tool_calls) == 1 + parallel


@needs_templates
@pytest.mark.parametrize(
    "template",
    [{**CALLS, "fields": 5}, {**CALLS, "fields": {"tool_calls": 5}}, "x",
     {**CALLS, "fields": {"tool_calls": {**CALLS["fields"]["tool_calls"], "open_pattern": None}}}],
    ids=["fields", "calls", "text", "pattern"],
)  # fmt: skip
def test_a_broken_template_of_a_tokenizer_refuses_tools_and_leaves_texts(
    client: Any, models: ServedModels, calling: Any, monkeypatch: pytest.MonkeyPatch, template: Any
) -> None:
    from openai import BadRequestError

    from ktc.inference.serving.private_api import call_marks

    monkeypatch.setattr(calling, "response_template", template)
    assert call_marks(calling, models.default.opened.model) is None
    with pytest.raises(BadRequestError, match="cannot read the tool calls"):
        ask(client, tools=[TOOL], tool_choice="required")
    assert ask(client).choices[0].message.content


def test_embeddings_are_refused_by_name(client: Any) -> None:
    from openai import APIStatusError

    with pytest.raises(APIStatusError, match="embeddings are not computed") as refused:
        client.embeddings.create(model="v2_twin", input="Hello")
    assert refused.value.status_code == 501


def test_each_request_has_one_line_with_counts_and_no_text(client: Any, lines: list[str]) -> None:
    from openai import APIStatusError

    lines.clear()
    ask(client, n=2, temperature=0)
    list(ask(client, temperature=0, stream=True))
    with pytest.raises(APIStatusError):
        ask(client, model="unknown\n2026 forged")
    client.with_options(base_url=str(client.base_url).removesuffix("/v1/")).get("/health", cast_to=object)
    start = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1 POST /v1/chat/completions"
    times = r", first after \d+\.\d\d s, all in \d+\.\d\d s"
    whole, streamed, refused = [line for line in lines if "/embeddings" not in line]  # of the test before
    assert re.fullmatch(rf"{start} 200 v2_twin: \d+ tokens read, 16 written \(length\){times}", whole)
    assert re.fullmatch(rf"{start} 200 v2_twin: \d+ tokens read, 8 written \(length\){times}", streamed)
    assert re.fullmatch(rf"{start} 404 model_not_found, all in \d+\.\d\d s", refused)
    assert not any("Hello" in line for line in lines)


def test_a_logged_path_is_one_short_line_and_an_id_names_one_request() -> None:
    written = list[str]()
    log = RequestLog(written.append)
    first, second = (log.begin("GET", "/a\nb\x1b[31m" + "c" * 500, "::1", "mine") for _ in range(2))
    assert log.of("mine/3") is first and second.id != "mine"
    log.end(first)
    log.end(second)
    assert log.of("mine") is None
    assert all("\n" not in line and "\x1b" not in line and len(line) < 300 for line in written)
