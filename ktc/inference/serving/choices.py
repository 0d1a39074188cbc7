"""Several answers to one request (`n`): each is a request of its own to the engine, and the answers are joined.

In: a function that requests one answer. Out: one response with all choices in order, or one stream whose parts name
their choice. The usage counts the prompt once. A refusal of one ends all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final, cast

from fastapi.responses import JSONResponse, StreamingResponse

Ask = Callable[[int], Awaitable[Any]]
_DATA: Final = "data: "
_MAX_PARTS: Final = 16  # of all streams, that wait for their client


async def several(ask: Ask, num: int, request_id: str) -> JSONResponse | StreamingResponse:
    """Return the joined answers of `ask(0)` to `ask(num - 1)`. Raises what one of them raises."""
    asked = [asyncio.ensure_future(ask(number)) for number in range(num)]
    try:
        responses = await asyncio.gather(*asked)
    except BaseException:
        for answer in asked:
            answer.cancel()
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, StreamingResponse):
                await _leave(answer)
        raise
    if isinstance(responses[0], StreamingResponse):
        return StreamingResponse(_joined(responses, request_id), media_type="text/event-stream")
    return JSONResponse(_as_one([json.loads(response.body) for response in responses], request_id))


async def _leave(response: StreamingResponse) -> None:
    """End a stream without a reader: its generator cancels the request only after it has begun."""
    parts = cast("Any", response.body_iterator)
    await anext(parts, None)
    await parts.aclose()


def _as_one(bodies: Sequence[dict[str, Any]], request_id: str) -> dict[str, Any]:
    choices = [{**body["choices"][0], "index": number} for number, body in enumerate(bodies)]
    return {**bodies[0], "id": request_id, "choices": choices, "usage": _usage([body["usage"] for body in bodies])}


def _usage(usages: Sequence[dict[str, Any]]) -> dict[str, int]:
    prompt = usages[0]["prompt_tokens"] if usages else 0
    new = sum(usage["completion_tokens"] for usage in usages)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


async def _joined(responses: Sequence[StreamingResponse], request_id: str) -> AsyncIterator[str]:
    """Yield the parts of all streams as they come, and the usage of all in a last part.

    An error ends all. Raises what one of the streams raises.
    """
    parts: asyncio.Queue[tuple[int, str | Exception | None]] = asyncio.Queue(_MAX_PARTS)

    async def read(number: int, response: StreamingResponse) -> None:
        end: Exception | None = None
        try:
            async for part in response.body_iterator:
                await parts.put((number, part if isinstance(part, str) else bytes(part).decode()))
        except Exception as error:  # noqa: BLE001  # the reader of the queue raises it
            end = error
        await parts.put((number, end))  # not after a cancellation: a full queue is not read then

    readers = [asyncio.ensure_future(read(number, response)) for number, response in enumerate(responses)]
    usages, last, left = list[dict[str, Any]](), dict[str, Any](), len(responses)
    try:
        while left:
            number, part = await parts.get()
            if isinstance(part, Exception):
                raise part
            if part is None:
                left -= 1
                continue
            for event in _events(part):
                if "error" in event:
                    yield f"{_DATA}{json.dumps(event, ensure_ascii=False)}\n\n"
                    return
                if usage := event.pop("usage", None):
                    usages.append(usage)
                last = {**event, "id": request_id}
                choices = [{**choice, "index": number} for choice in event.get("choices", ())]
                yield f"{_DATA}{json.dumps({**last, 'choices': choices}, ensure_ascii=False)}\n\n"
        yield f"{_DATA}{json.dumps({**last, 'choices': [], 'usage': _usage(usages)}, ensure_ascii=False)}\n\n"
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _events(part: str) -> list[dict[str, Any]]:
    """Return the JSON objects of some events; transformers writes each on one line."""
    lines = (line.removeprefix(_DATA) for line in part.split("\n") if line.startswith(_DATA))
    return [json.loads(line) for line in lines if line.startswith("{")]
