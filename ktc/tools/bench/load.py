"""Clients of a server: each sends one request after the other, and what becomes of each is recorded.

In: the URL, a `Load`. Out: frozen `Outcome`s. Half of the clients stream. Some streamed answers are cancelled after a
few pieces of text. A request that gets no whole answer within the time limit is lost.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from openai import AsyncOpenAI

LOST_AFTER: Final = 600.0  # seconds
_CANCELLED_AFTER: Final = 3  # pieces of text


@dataclass(frozen=True, slots=True)
class Load:
    """`cancelled` is the share of streamed requests that the client ends early. Lengths are drawn evenly."""

    clients: int
    seconds: float
    prompt: tuple[int, int] = (16, 128)  # words
    new_tokens: tuple[int, int] = (16, 128)
    cancelled: float = 0.1


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: `state` is "answered", "cancelled" or the failure. Times are in seconds."""

    state: str
    streamed: bool
    tokens: int
    seconds: float
    first: float | None = None
    gaps: tuple[float, ...] = ()


async def drive(url: str, load: Load, seed: int = 0) -> tuple[list[Outcome], float]:
    """Send requests from all clients for the given time, at least one each; return the outcomes and the whole time."""
    from openai import AsyncOpenAI

    started, outcomes = time.perf_counter(), list[Outcome]()
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=LOST_AFTER) as client:
        model = (await client.models.list()).data[0].id

        async def run(number: int) -> None:
            chance = random.Random(1000 * seed + number)
            while True:
                outcomes.append(await _request(client, model, load, number % 2 == 0, chance))
                if time.perf_counter() - started >= load.seconds:
                    return

        await asyncio.gather(*(run(number) for number in range(load.clients)))
    return outcomes, time.perf_counter() - started


async def _request(client: AsyncOpenAI, model: str, load: Load, streamed: bool, chance: random.Random) -> Outcome:
    wanted = chance.randint(*load.new_tokens)
    words = " ".join(f"w{chance.randrange(10_000)}" for _ in range(chance.randint(*load.prompt)))
    request: dict[str, Any] = {"model": model, "prompt": words, "max_tokens": wanted, "temperature": 0}
    if chance.random() < 0.5:
        request.update(temperature=0.8, seed=chance.randrange(1 << 30))
    begun = time.perf_counter()
    try:
        if not streamed:
            create: Any = client.completions.create
            whole: Any = await create(**request)
            return Outcome(_state(whole, wanted), False, whole.usage.completion_tokens, _since(begun))
        return await _streamed(client, request, wanted, chance.random() < load.cancelled)
    except Exception as error:  # noqa: BLE001  # each failure is an outcome; those of the transport have no common class
        return Outcome(f"{type(error).__name__}: {error}"[:120], streamed, 0, _since(begun))


async def _streamed(client: AsyncOpenAI, request: dict[str, Any], wanted: int, cancelled: bool) -> Outcome:
    begun, times, pieces = time.perf_counter(), list[float](), 0
    state, used = "the stream ended without a finish", 0
    stream: Any = await client.completions.create(**request, stream=True)
    async for chunk in stream:
        if chunk.choices[0].text:
            times.append(time.perf_counter())
            pieces += 1
        if chunk.choices[0].finish_reason:
            state, used = _state(chunk, wanted), chunk.usage.completion_tokens
        elif cancelled and pieces >= _CANCELLED_AFTER:
            await stream.close()
            state, used = "cancelled", pieces
            break
    gaps = tuple(after - before for before, after in itertools.pairwise(times))
    return Outcome(state, True, used, _since(begun), times[0] - begun if times else None, gaps)


def _state(last: Any, wanted: int) -> str:
    """Return the state of an answer by its last part."""
    finish, used = last.choices[0].finish_reason, last.usage.completion_tokens
    whole = finish == "stop" or (finish == "length" and used == wanted)
    return "answered" if whole else f"{used} of {wanted} tokens, finish `{finish}`"


def _since(begun: float) -> float:
    return time.perf_counter() - begun
