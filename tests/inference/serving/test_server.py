"""A compiled model behind OpenAI's API: a real server on a free port, asked by real clients."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from running_servers import served

from ktc.cli import app as cli
from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation import versions
from ktc.inference.generate.answers import Sampling, answer, set_seed
from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.generate.prompts import render
from ktc.inference.serving import server as serve
from ktc.inference.serving.batch import RowBatch
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.models import ServedModels, open_served_models
from ktc.inference.serving.prompt_length import least_tokens
from ktc.inference.serving.request import Limits

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in serve.PACKAGES), reason="the extra `serve` is not installed"
    ),
]


@pytest.fixture(scope="module")
def models(compiled: Path) -> ServedModels:
    return open_served_models(compiled, reference=True)


@pytest.fixture(scope="module")
def opened(models: ServedModels) -> LanguageModel:
    return models.default.opened


@pytest.fixture(scope="module")
def address(models: ServedModels) -> Iterator[str]:
    with served(models, Limits(batch=4)) as url:
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


def request(url: str, body: Any = None) -> tuple[int, str]:
    """POST with a body, else GET, without any client library in between."""
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def hello(text: str = "Hello") -> list[Any]:
    return [{"role": "user", "content": text}]


without_responses = pytest.mark.skipif(
    versions.release(versions.installed("transformers") or "0") < (5, 7),
    reason="transformers 5.6 leaves a number out of a response that newer openai requires: it is refused by name",
)
LONG_TEXT = "rain " * 15_000
LONG_BODIES = {
    "chat/completions": {"messages": hello(LONG_TEXT)},
    "completions": {"prompt": LONG_TEXT},
    "responses": {"input": LONG_TEXT},
}


@pytest.mark.parametrize(
    "path", ["chat/completions", "completions", pytest.param("responses", marks=without_responses)]
)
def test_others_are_answered_while_a_long_prompt_is_counted(
    address: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def counted(*given: Any) -> int:
        assert answered.wait(60)
        return least_tokens(*given)

    monkeypatch.setattr("ktc.inference.serving.handlers.least_tokens", counted)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(request, f"{address}/{path}", LONG_BODIES[path])
        assert request(f"{address.removesuffix('/v1')}/health")[0] == 200
        answered.set()
        status, said = asked.result()
    assert (status, json.loads(said)["error"]["code"]) == (400, "context_length_exceeded")
    assert "the prompt has at least " in said


def test_long_texts_are_never_counted_as_too_many_tokens(opened: LanguageModel) -> None:
    for text in (LONG_TEXT, "a" * 100_000, "漢字 <|x|>\n" * 10_000, ""):
        exact = len(opened.tokenizer.encode(text, add_special_tokens=False))
        assert 0.9 * exact - 1 <= least_tokens(opened.tokenizer, text, 1 << 30) <= exact
        assert min(exact, 100) * 0.9 <= least_tokens(opened.tokenizer, text, 100)


def expected(opened: LanguageModel, text: str, sampling: Sampling, raw: bool = False) -> str:
    return answer(opened, render(opened, text, raw=raw), sampling)[0].text


def test_the_model_is_listed(client: Any, opened: LanguageModel) -> None:
    assert [model.id for model in client.models.list()] == [opened.name]


def test_a_chat_completion_is_what_generate_answers(client: Any, opened: LanguageModel) -> None:
    found = client.chat.completions.create(model=opened.name, messages=hello(), max_tokens=8, temperature=0)
    assert found.choices[0].message.content == expected(opened, "Hello", Sampling(8))
    assert found.choices[0].finish_reason == "length"
    assert found.usage.prompt_tokens == len(render(opened, "Hello").input_ids)
    assert found.usage.completion_tokens == 8


def test_streamed_chunks_make_the_completion(client: Any, opened: LanguageModel) -> None:
    chunks = list(
        client.chat.completions.create(model=opened.name, messages=hello(), max_tokens=16, temperature=0, stream=True)
    )
    assert len(chunks) > 2
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected(opened, "Hello", Sampling(16))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_completion_continues_text_as_it_is(client: Any, opened: LanguageModel) -> None:
    found = client.completions.create(model=opened.name, prompt="Rain falls", max_tokens=8, temperature=0)
    assert found.choices[0].text == expected(opened, "Rain falls", Sampling(8), raw=True)


def test_an_answered_request_writes_no_line_to_the_log(client: Any, opened: LanguageModel) -> None:
    written, handler = list[str](), logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        client.completions.create(model=opened.name, prompt="Rain", max_tokens=2)
        client.chat.completions.create(model=opened.name, messages=hello(), max_tokens=2)
    finally:
        logger.removeHandler(handler)
    assert not written


@without_responses
def test_a_response_is_there_too(client: Any, opened: LanguageModel) -> None:
    found = client.responses.create(model=opened.name, input="Hello", max_output_tokens=8, temperature=0)
    assert found.output_text == expected(opened, "Hello", Sampling(8))


def test_a_response_that_transformers_cannot_write_is_refused_by_name(
    address: str, opened: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute_usage(*_: int) -> None:
        raise ValueError("cache_write_tokens: field required")

    monkeypatch.setattr("transformers.cli.serving.response.compute_usage", compute_usage)
    status, words = request(f"{address}/responses", {"input": "Hello", "model": opened.name})
    assert status == 501
    assert "/v1/chat/completions" in words and "openai" in words


def test_an_answer_ends_before_a_stop_text(client: Any, opened: LanguageModel) -> None:
    whole = expected(opened, "Hello", Sampling(16))
    stop = whole[5:7]
    options = {"model": opened.name, "messages": hello(), "max_tokens": 16, "temperature": 0, "stop": [stop]}
    found = client.chat.completions.create(**options)
    assert found.choices[0].message.content == whole[: whole.index(stop)]
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[: whole.index(stop)]


def test_requests_at_once_do_not_disturb_each_other(client: Any, opened: LanguageModel) -> None:
    texts = ["Hello", "Rain falls on the hills", "What is the capital of France?", "def add(a, b):"]

    def ask(number: int) -> tuple[str, str]:
        text = texts[number % len(texts)]
        if number % 2:
            found = client.chat.completions.create(model=opened.name, messages=hello(text), max_tokens=6, temperature=0)
            return text, found.choices[0].message.content
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "stream": True}
        chunks = client.chat.completions.create(model=opened.name, messages=hello(text), **options)
        return text, "".join(c.choices[0].delta.content or "" for c in chunks)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(12)))
    wanted = {text: expected(opened, text, Sampling(6)) for text in texts}
    assert all(found == wanted[text] for text, found in answers)


def test_draws_follow_the_seed_also_at_once(client: Any, opened: LanguageModel) -> None:
    def ask(seed: int) -> str:
        found = client.chat.completions.create(
            model=opened.name, messages=hello(), max_tokens=10, temperature=1.5, seed=seed
        )
        return found.choices[0].message.content

    alone = [ask(seed) for seed in (1, 2, 3)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, (1, 2, 3, 1, 2, 3))) == alone * 2
    assert len(set(alone)) > 1


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_draws_of_a_seed_are_those_of_generate(client: Any, opened: LanguageModel, top_p: float) -> None:
    assert opened.model.config.vocab_size > 50  # the tokens that transformers draws from by default
    for seed in (1, 2):
        options = {"max_tokens": 10, "temperature": 1.5, "top_p": top_p, "seed": seed}
        found = client.completions.create(model=opened.name, prompt="Rain falls", **options)
        set_seed(seed)
        assert found.choices[0].text == expected(opened, "Rain falls", Sampling(10, 1.5, top_p), raw=True)


def metric(address: str, name: str) -> float:
    """The sum of the samples of a metric whose names and labels begin so."""
    text = request(address.replace("/v1", "/metrics"))[1]
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def wait_for(address: str, name: str, wanted: float) -> None:
    end = time.monotonic() + 60
    while metric(address, name) != wanted:
        assert time.monotonic() < end, f"{name} is {metric(address, name)}"
        time.sleep(0.02)


def sent(address: str, body: Any) -> socket.socket:
    """A connection over which a completion is requested, and nothing read."""
    port, data = int(address.rsplit(":", 1)[1].removesuffix("/v1")), json.dumps(body).encode()
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    opened.connect(("127.0.0.1", port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    opened.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return opened


LONG = {"prompt": "Rain falls", "max_tokens": 400, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(address: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = RowBatch.step

    def slow(batch: RowBatch) -> Any:  # so that the answer does not end before its client leaves, on a busy machine too
        time.sleep(0.005)
        return step(batch)

    monkeypatch.setattr(RowBatch, "step", slow)
    name = 'ktc_requests_total{model="v2_twin",outcome="cancelled"}'
    before = metric(address, name)
    connection = sent(address, {**LONG, "max_tokens": 1900, "stream": stream})
    wait_for(address, "ktc_requests_running", 1)
    connection.close()
    wait_for(address, name, before + 1)
    wait_for(address, "ktc_requests_running", 0)


def test_a_client_that_does_not_read_delays_nobody(address: str, client: Any, opened: LanguageModel) -> None:
    with sent(address, {**LONG, "stream": True}):
        found = client.completions.create(model=opened.name, prompt="Rain falls", max_tokens=8, temperature=0)
        assert found.choices[0].text == expected(opened, "Rain falls", Sampling(8), raw=True)
    wait_for(address, "ktc_requests_running", 0)


def test_more_requests_than_may_wait_are_told_to_come_later(models: ServedModels) -> None:
    with served(models, Limits(batch=1, waiting=0)) as address, sent(address, LONG):
        wait_for(address, "ktc_requests_running", 1)
        with pytest.raises(urllib.error.HTTPError) as refused:
            asked = urllib.request.Request(f"{address}/completions", json.dumps(LONG).encode())
            asked.add_header("Content-Type", "application/json")
            urllib.request.urlopen(asked, timeout=60)
        assert (refused.value.code, refused.value.headers["Retry-After"]) == (429, "1")
        assert metric(address, 'ktc_requests_total{model="v2_twin",outcome="refused"}') == 1


def test_a_fault_is_a_500_for_its_requests_and_the_server_continues(
    models: ServedModels, opened: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, faults = RowBatch.step, iter([True, True])

    def failing(batch: RowBatch) -> Any:
        if next(faults, False):
            raise RuntimeError('out of "luck"')
        return step(batch)

    monkeypatch.setattr(RowBatch, "step", failing)
    body = {**LONG, "max_tokens": 8}
    with served(models, Limits()) as address:
        status, words = request(f"{address}/completions", body)
        assert (status, "out of" in words) == (500, True)
        status, words = request(f"{address}/completions", {**body, "stream": True})
        last = [json.loads(line.removeprefix("data: ")) for line in words.splitlines() if line][-1]
        assert last == {"error": "RuntimeError: out of 'luck'"}
        status, words = request(f"{address}/completions", body)
        assert json.loads(words)["choices"][0]["text"] == expected(opened, "Rain falls", Sampling(8), raw=True)


def test_a_prompt_that_the_cache_cannot_hold_is_refused(models: ServedModels, opened: LanguageModel) -> None:
    size = ModelRunner(opened.model).size
    with served(models, Limits(cache_bytes=size.nbytes(20))) as address:
        status, words = request(f"{address}/completions", {**LONG, "prompt": "word " * 30})
        assert (status, "the room of the cache is 21" in words) == (400, True)
        status, words = request(f"{address}/completions", {**LONG, "prompt": "Rain"})
        used = json.loads(words)["usage"]
        assert (status, used["total_tokens"]) == (200, 21)


def test_metrics_count_tokens_and_times(address: str, client: Any, opened: LanguageModel) -> None:
    names = ("ktc_prompt_tokens_total", "ktc_generated_tokens_total", "ktc_time_to_first_token_seconds_count",
             "ktc_time_per_token_seconds_count")  # fmt: skip
    before = [metric(address, name) for name in names]
    client.completions.create(model=opened.name, prompt="Rain falls", max_tokens=8, temperature=0)
    length = len(render(opened, "Rain falls", raw=True).input_ids)
    assert [metric(address, name) - was for name, was in zip(names, before, strict=True)] == [length, 8, 1, 7]
    assert metric(address, "ktc_cache_bytes") == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "temperature": "hot"},
            400,
            "temperature",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 17}, 400, "n"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "unknown": 2}, 400, "unknown"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "other"}, 404, "other"),
        ("completions", {"prompt": ""}, 400, "prompt"),
        ("completions", {"prompt": "word " * 4000}, 400, "length is"),
        ("completions", {"prompt": "word " * 4000, "stream": True}, 400, "length is"),
    ],
)
def test_what_cannot_be_answered_is_refused(address: str, path: str, body: Any, status: int, said: str) -> None:
    code, text = request(f"{address}/{path}", body)
    assert code == status, text
    assert said in text


def test_models_cannot_be_loaded_or_unloaded_from_outside(address: str) -> None:
    root = address.removesuffix("/v1")
    assert request(f"{root}/load_model", {"model": "gpt2"})[0] == 404
    assert request(f"{root}/reset", {})[0] == 404
    assert request(f"{root}/health") == (200, '{"status":"ok"}')


def test_an_address_in_use_is_refused(address: str) -> None:
    port = int(address.rsplit(":", 1)[1].removesuffix("/v1"))
    for host in ("127.0.0.1", "no..name"):
        with pytest.raises(InputRefused) as refused:
            serve.listen(host, port)
        assert refused.value.diagnostics[0].code == "G720"


def test_others_can_reach_the_server_only_with_a_key(
    compiled: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        assert serve.exposure(host, has_key=False) == ()
    assert [found.severity for found in serve.exposure("0.0.0.0", has_key=True)] == ["warning"]
    open_key, short = tmp_path / "open", tmp_path / "short"
    for path, key in ((open_key, "k" * 40), (short, "k")):
        path.touch(mode=0o600)
        path.write_text(key)
    open_key.chmod(0o644)
    assert cli.main(["serve", str(compiled), "--host", "0.0.0.0"]) == 2
    assert "G722" in capfd.readouterr().err
    for path in (open_key, short, tmp_path / "missing", tmp_path):
        assert cli.main(["serve", str(compiled), "--host", "0.0.0.0", "--api-key-file", str(path)]) == 2
        assert re.search("G730|U005", capfd.readouterr().err)


def test_missing_packages_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: None if name == "uvicorn" else installed(name))
    with pytest.raises(HostLacks) as refused:
        serve.require_server()
    assert refused.value.diagnostics[0].code == "H230"
    assert "uvicorn" in refused.value.diagnostics[0].message


@pytest.mark.slow
def test_an_interrupt_ends_the_server_with_130(compiled: Path) -> None:
    root = Path(serve.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "ktc", "serve", str(compiled), "--reference", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "is served at" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_a_path_has_the_methods_of_all_of_its_routes() -> None:
    from ktc.inference.serving.application import methods_of

    routes = [Mock(path="/a", methods={"GET"}), Mock(path="/b", spec=["path"]), Mock(path="/a", methods={"POST"})]
    assert methods_of(routes) == {"/a": {"GET", "POST"}, "/b": set()}
