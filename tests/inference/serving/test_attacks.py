"""A server under attack: malformed requests, strangers, slow clients, missing memory. It answers or refuses, and stays.

The rows of `attacks/` are sent to one server; what they may not do is in `test_a_server_is_as_before`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from running_servers import running, served
from server_attacks import Answer, Attack, answer, attacks, post, read_answer

from ktc.inference.generate.answers import Sampling
from ktc.inference.generate.answers import answer as generated
from ktc.inference.generate.prompts import render
from ktc.inference.serving import server as serve
from ktc.inference.serving.models import ServedModels, open_served_models
from ktc.inference.serving.request import Limits

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in serve.PACKAGES), reason="the extra `serve` is not installed"
    ),
]
ROWS = list(attacks())
KEY = "k" * 40
LONG = {"prompt": "Rain falls", "max_tokens": 1000, "temperature": 0}
SHORT = json.dumps({**LONG, "max_tokens": 8}).encode()
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def models(compiled: Path) -> ServedModels:
    return open_served_models(compiled, reference=True)


@pytest.fixture(scope="module")
def port(models: ServedModels) -> Iterator[int]:
    with served(models, Limits(batch=4)) as url:
        yield port_of(url)


def port_of(url: str) -> int:
    return int(url.removesuffix("/v1").rpartition(":")[2])


def metric(port: int, name: str) -> float:
    found = answer(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").body.decode()
    return sum(float(line.rpartition(" ")[2]) for line in found.splitlines() if line.startswith(name))


def wait_for(port: int, name: str, wanted: float) -> None:
    end = time.monotonic() + 30
    while metric(port, name) != wanted:
        assert time.monotonic() < end, f"{name} is {metric(port, name)}"
        time.sleep(0.02)


def get(port: int, path: str, *headers: str) -> Answer:
    lines = "".join(f"{line}\r\n" for line in (*headers, *(() if "Host" in str(headers) else ("Host: localhost",))))
    return answer(port, f"GET {path} HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode())


def text(found: Answer) -> str:
    return json.loads(found.body)["choices"][0]["text"]


def expected(models: ServedModels) -> str:
    opened = models.default.opened
    return generated(opened, render(opened, "Rain falls", raw=True), Sampling(8))[0].text


def test_every_row_gets_its_answer_and_leaves_nothing(port: int, caplog: pytest.LogCaptureFixture) -> None:
    answer(port, HEALTH)
    threads, files, wrong = threading.active_count(), psutil.Process().num_fds(), list[str]()
    for row in ROWS:
        begun, found = time.monotonic(), answer(port, row.sent)
        if fault := fault_of(row, found, time.monotonic() - begun):
            wrong.append(f"{row.name}: {fault}")
    assert wrong == []
    wait_for(port, "ktc_requests_running", 0)
    assert errors(caplog) == []
    assert threading.active_count() <= threads + 2  # those that parse and prepare
    assert psutil.Process().num_fds() <= files + 4


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors in the log, those of uvicorn and asyncio too."""
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


def fault_of(row: Attack, found: Answer, seconds: float) -> str:
    code = found.error.get("code")
    if found.status != row.status or (row.code and code != row.code):
        return f"{found.status} {code}, not {row.status} {row.code}: {found.body[:200]!r}"
    if row.status >= 400 and set(found.error) != {"message", "type", "param", "code"}:
        return f"no error object: {found.body[:200]!r}"
    if row.answers and found.whole.count(b"HTTP/1.1 ") != row.answers:
        return f"{found.whole.count(b'HTTP/1.1 ')} answers, not {row.answers}"
    return f"{seconds:.1f} s" if seconds > 5 else ""


def test_a_server_is_as_before(port: int, models: ServedModels) -> None:
    found = answer(port, post("completions", SHORT))
    assert (found.status, text(found)) == (200, expected(models))


def test_a_key_is_required_where_there_is_one(models: ServedModels) -> None:
    with served(models, Limits(), key_sha256=hashlib.sha256(KEY.encode()).digest()) as url:
        port = port_of(url)
        for header in ("X: y", "Authorization: Bearer", f"Authorization: Basic {KEY}", f"Authorization: Bearer {KEY}x",
                       f"Authorization: {KEY}", "Authorization: Bearer \u00ff"):  # fmt: skip
            for path in ("/v1/models", "/metrics", "/docs"):
                found = get(port, path, header)
                assert (found.status, found.error["code"]) == (401, "invalid_api_key"), header
                assert "www-authenticate: bearer" in found.head
        assert get(port, "/v1/models", f"Authorization: Bearer {KEY}").status == 200
        assert get(port, "/v1/models", f"Authorization: bearer  {KEY}", "Host: example.org").status == 200
        assert get(port, "/health").status == get(port, "/ready").status == 200


def test_slow_heads_and_bodies_are_cut(models: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.inference.serving.connection.HEAD_SECONDS", 0.4)
    monkeypatch.setattr("ktc.inference.serving.connection.REQUEST_SECONDS", 0.6)
    with served(models, Limits()) as url:
        heads = b"", b"GET /hea", HEALTH[:-2], post("completions", SHORT)[:-1], post("completions", SHORT)[:-9]
        with ThreadPoolExecutor(len(heads)) as clients:
            assert max(clients.map(lambda begun: answer_to_drips(port_of(url), begun), heads)) < 5
        with socket.create_connection(("127.0.0.1", port_of(url))) as kept:  # the time of a head begins anew
            for _ in range(3):
                kept.sendall(HEALTH.replace(b"close", b"keep-alive"))
                assert read_answer(kept).status == 200
                time.sleep(0.3)


def answer_to_drips(port: int, begun: bytes) -> float:
    """Send the beginning of a request and spaces; return the seconds until the connection ends."""
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(begun)
        connection.settimeout(0.1)
        while time.monotonic() < started + 10:
            try:
                if begun.endswith(b"\r\n"):
                    connection.sendall(b"X: y\r\n")
                if not connection.recv(4096):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    return time.monotonic() - started


def test_a_body_that_takes_too_long_is_told_so(models: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktc.inference.serving.guard.BODY_SECONDS", 0.3)
    with served(models, Limits()) as url:
        found = answer(port_of(url), post("completions", SHORT)[:-4])
        assert (found.status, found.error["code"]) == (408, "request_timeout")


def test_a_client_that_never_reads_is_cut_and_takes_little_memory(
    models: ServedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktc.inference.serving.connection.STALLED_SECONDS", 0.3)
    with running(models, Limits(batch=4)) as (url, server), socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        silent.connect(("127.0.0.1", port_of(url)))
        silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)  # more than the system buffers
        time.sleep(0.2)
        end, largest = time.monotonic() + 20, 0
        while server.server_state.connections:
            assert time.monotonic() < end
            waiting = [each.transport.get_write_buffer_size() for each in list(server.server_state.connections)]
            largest = max(largest, *waiting, 0)
            time.sleep(0.05)
        assert 0 < largest < 1 << 16


def sent(port: int, body: Any) -> socket.socket:
    """A connection over which a completion is requested, and nothing read."""
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.sendall(post("completions", json.dumps(body).encode()))
    return connection


def read(connection: socket.socket) -> bytes:
    whole = b""
    while part := connection.recv(65536):
        whole += part
    return whole


def test_clients_that_leave_before_their_turn_are_dropped(models: ServedModels) -> None:
    with served(models, Limits(batch=1, prefill_chunk=1)) as url:
        port, cancelled = port_of(url), 'ktc_requests_total{model="v2_twin",outcome="cancelled"}'
        with sent(port, {**LONG, "prompt": "word " * 300}):  # its prompt is read a token at a time
            queued = [sent(port, {**LONG, "stream": stream}) for stream in (True, False)]
            wait_for(port, "ktc_requests_waiting", 2)
            for each in queued:
                each.close()
            wait_for(port, cancelled, 2)
            wait_for(port, "ktc_requests_waiting", 0)
        wait_for(port, cancelled, 3)
        assert text(answer(port, post("completions", SHORT))) == expected(models)


def test_a_chat_template_that_raises_refuses_the_conversation(
    models: ServedModels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    template = """{%- for m in messages %}{% if m.content == 'no' %}{{ raise_exception('roles alternate') }}
        {%- elif m.content == 'sum' %}{{ 1 + m.content }}{% elif m.content == 'cut' %}{{ m.content.x.y }}{% endif %}
        {{- m.content }}{% endfor %}"""
    monkeypatch.setattr(models.default.opened.tokenizer, "chat_template", template)
    with served(models, Limits()) as url:
        for words, status in (("no", 400), ("sum", 400), ("cut", 400), ("yes", 200)):
            body = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
            found = answer(port_of(url), post("chat/completions", json.dumps(body).encode()))
            assert (found.status, found.error.get("code")) == (status, "template_error" if status == 400 else None)
    assert errors(caplog) == []


def test_a_fault_of_one_request_is_not_one_of_its_batch(models: ServedModels, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.inference.serving.generation import Generation

    choose = Generation.choose

    def failing(self: Generation, scores: Any) -> int:
        if self.request.seed == 13 and len(self.tokens) > len(self.request.tokens) + 3:
            raise ValueError("unlucky")
        return choose(self, scores)

    monkeypatch.setattr(Generation, "choose", failing)
    monkeypatch.setattr(Generation, "settings", None)  # each row by its own processors, as with a penalty
    drawn = {**LONG, "max_tokens": 30, "temperature": 1}
    with served(models, Limits(batch=4)) as url, ThreadPoolExecutor(3) as pool:
        bodies = [
            json.dumps(body).encode()
            for body in ({**drawn, "seed": 13}, {**drawn, "seed": 1}, LONG | {"max_tokens": 8})
        ]
        found = list(pool.map(lambda body: answer(port_of(url), post("completions", body)), bodies))
    assert [each.status for each in found] == [500, 200, 200]
    assert (found[0].error["code"], text(found[2])) == ("generation_failed", expected(models))


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_missing_memory_refuses_the_request_that_needs_it(
    models: ServedModels, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    from ktc.inference.serving.model_runner import ModelRunner

    logits, needed = ModelRunner.logits, iter(range(failures))

    def failing(self: ModelRunner, ids: Any, *more: Any) -> Any:
        if ids.shape[1] > 100 and next(needed, None) is not None:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 12345 bytes"
            )
        return logits(self, ids, *more)

    monkeypatch.setattr(ModelRunner, "logits", failing)
    large = json.dumps({**LONG, "prompt": "word " * 300, "max_tokens": 2}).encode()
    with served(models, Limits(batch=4, prefill_chunk=2048)) as url, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda body: answer(port_of(url), post("completions", body)), (large, SHORT)))
        assert text(found[1]) == expected(models)
        assert found[0].status == (200 if failures == 1 else 503)
        if failures > 1:
            assert found[0].error["code"] == "out_of_memory"
        assert text(answer(port_of(url), post("completions", SHORT))) == expected(models)


def test_a_stop_answers_what_runs_and_refuses_what_comes(
    models: ServedModels, caplog: pytest.LogCaptureFixture
) -> None:
    with running(models, Limits(batch=4), grace=20.0) as (url, server):
        port = port_of(url)
        with (
            sent(port, {**LONG, "max_tokens": 400, "stream": True}) as stream,
            sent(port, {**LONG, "max_tokens": 300}) as whole,
        ):
            wait_for(port, "ktc_requests_running", 2)
            server.should_exit = True
            while get(port, "/ready").status != 503:
                time.sleep(0.01)
            refused = answer(port, post("completions", SHORT))
            assert (refused.status, refused.error["code"]) == (503, "stopping")
            assert "retry-after" in refused.head
            assert get(port, "/health").status == 200
            assert b'"finish_reason":"length"' in read(stream)
            assert b'"completion_tokens":300' in read(whole)
    assert errors(caplog) == []


def test_a_stop_ends_what_runs_too_long(models: ServedModels, caplog: pytest.LogCaptureFixture) -> None:
    with running(models, Limits(batch=4), grace=0.2) as (url, server):
        port = port_of(url)
        with (
            sent(port, {**LONG, "max_tokens": 1900, "stream": True}) as stream,
            sent(port, {**LONG, "max_tokens": 1900}) as whole,
            socket.create_connection(("127.0.0.1", port), 30) as half,
            socket.create_connection(("127.0.0.1", port), 30) as silent,
        ):
            half.sendall(post("completions", SHORT)[:-3])
            wait_for(port, "ktc_requests_running", 2)
            server.should_exit = True
            assert b"the server stops" in read(stream)
            assert b'"code":"stopping"' in read(whole)
            assert read(silent) == b""
            assert read(half) == b""
    assert errors(caplog) == []


def test_a_second_signal_stops_at_once(models: ServedModels) -> None:
    with (
        running(models, Limits(batch=4), grace=60.0) as (url, server),
        sent(port_of(url), {**LONG, "max_tokens": 1900}),
    ):
        wait_for(port_of(url), "ktc_requests_running", 1)
        server.should_exit = True
        time.sleep(0.3)
        begun = time.monotonic()
        server.handle_exit(15, None)
        while server.server_state.tasks and time.monotonic() < begun + 10:
            time.sleep(0.02)
        assert time.monotonic() < begun + 5
