"""Images of a body are kept beside its JSON: what remains is small, is the client's, and gives its memory back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from ktc.inference.serving.body_images import BODY_IMAGES, opened
from ktc.inference.serving.guard import Gate, Guard
from ktc.inference.serving.refusals import RequestRefused
from ktc.inference.serving.request_log import RequestLog

URI = "data:image/png;base64," + "iVBORw0KGgo/" * 200


def turn(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(uri: str = URI) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


def read(body: Any, most: int = 1 << 14) -> tuple[Any, dict[str, str]]:
    rest, texts = opened(body if isinstance(body, bytes) else json.dumps(body).encode(), most, json.loads)
    return json.loads(rest), texts


@pytest.mark.parametrize("written", [URI, URI.replace("/", r"\/")])
def test_images_of_parts_are_kept_apart(written: str) -> None:
    for body in (turn(image("@")), {"input": [{"type": "input_image", "image_url": "@"}]}):
        rest, texts = read(json.dumps(body).replace("@", written).encode())
        ((name, uri),) = texts.items()
        assert uri == URI and len(json.dumps(rest)) < 300
        assert json.loads(json.dumps(rest).replace(name, URI)) == json.loads(json.dumps(body).replace("@", URI))


@pytest.mark.parametrize(
    "body",
    [
        turn({"type": "text", "text": URI}),
        turn({"type": "text", "text": f'look at "{URI}"'}),
        {"tools": [{"parameters": {"image_url": URI, URI: "a"}}], **turn(image("data:image/png;base64,short"))},
        {"messages": [{"tool_calls": [{"function": {"arguments": {"image_url": {"url": URI}}}}]}]},
        {"messages": URI, "input": [URI, [image()]]},
    ],
)
def test_other_texts_stay_where_they_are(body: Any) -> None:
    assert read(body) == (body, {})


@pytest.mark.parametrize("odd", ["\u00fc", "\u20ac", " ", "\n"])
def test_an_address_with_other_characters_is_left_to_the_parser(odd: str) -> None:
    body = json.dumps(turn(image(f"{URI}{odd}"), {"type": "text", "text": f"{URI}{odd}"}), ensure_ascii=False).encode()
    assert read(body) == (json.loads(body), {})


@pytest.mark.parametrize("raw", [b"\n", b"\x00", b"\xff"])
def test_a_body_that_is_no_json_is_refused_in_an_address_too(raw: bytes) -> None:
    body = json.dumps(turn(image())).encode().replace(b'"}}', raw + b'"}}')
    with pytest.raises(ValueError):
        read(body)


def test_names_of_fields_are_never_kept_apart() -> None:
    body = b'{"tools": [{"' + URI.encode() + b'"' + b" " * 70 + b": 1}]}"
    assert read(body) == (json.loads(body), {})


def test_what_remains_is_as_small_as_a_body_of_text() -> None:
    assert len(read(turn(*[image()] * 50))[1]) == 50
    for body in (turn(image(), {"type": "text", "text": "a" * 20000}), turn(*[{"type": "text", "text": URI}] * 8)):
        with pytest.raises(RequestRefused) as refused:
            read(body)
        assert refused.value.status_code == 413


def test_bodies_of_images_stop_no_text_and_give_their_memory_back() -> None:
    """Two large bodies fill their budget until their images are read; meanwhile a text is taken."""
    gate = Gate(body_bytes=1 << 12, image_bytes=1 << 12, bodies_bytes=1 << 12)
    large, text = json.dumps(turn(*[image()] * 3)).encode(), json.dumps({"prompt": "a"}).encode()
    steps: dict[str, asyncio.Event] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if b"wait" in dict(scope["headers"]):
            await steps["read"].wait()
            BODY_IMAGES.get().drop()
            await steps["end"].wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guard = Guard(app, gate, RequestLog())

    async def ask(body: bytes, *headers: tuple[bytes, bytes]) -> int:
        status: list[int] = []
        pairs = [(b"host", b"localhost"), (b"content-type", b"application/json"), *headers]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"/", "headers": pairs,
                 "http_version": "1.1"}  # fmt: skip
        pairs.append((b"content-length", str(len(body)).encode()))

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if "status" in message:
                status.append(message["status"])

        await guard(scope, receive, send)
        return status[0]

    async def asked() -> list[int]:
        steps.update(read=asyncio.Event(), end=asyncio.Event())
        waiting = [asyncio.ensure_future(ask(large, (b"wait", b""))) for _ in range(2)]
        await asyncio.sleep(0.05)
        statuses = [await ask(large), await ask(text)]
        steps["read"].set()
        await asyncio.sleep(0.05)
        statuses.append(await ask(large))
        steps["end"].set()
        return statuses + await asyncio.gather(*waiting)

    assert asyncio.run(asked()) == [503, 200, 200, 200, 200]


def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    seen: list[str] = []

    def noting(*given: Any) -> Any:
        seen.append(threading.current_thread().name)
        return opened(*given)

    monkeypatch.setattr("ktc.inference.serving.guard.opened", noting)
    guard: Any = Guard(None, Gate(image_bytes=1 << 20), RequestLog())

    async def parsed(body: bytes, keep: Callable[[int], None] = lambda _: None) -> Any:
        return await guard._opened(bytearray(body), type("Reserved", (), {"keep": staticmethod(keep), "budget": None}))

    for size in (1, 1000):
        asyncio.run(parsed(json.dumps(turn(*[image()] * size)).encode()))
    assert seen[0] == "MainThread" and seen[1].startswith("ktc-parsing")
