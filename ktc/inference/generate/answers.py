"""Answers of a language model: streamed token by token, or in batches.

Input: a `LanguageModel`, `Prompt`s and a `Sampling`. Output: frozen `Answer`s with token counts and times. Without a
temperature, decoding is greedy; with one, tokens are sampled from the seed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

from ktc.inference.generate.language_model import LanguageModel
from ktc.inference.generate.prompts import Prompt, require_fit
from ktc.inference.generate.sampling import Sampling
from ktc.model.attention.reads import SparseReads, counters, reads_since
from ktc.model.hf.processor import on_device

Finish = Literal["stop", "length", "interrupted"]
DEFAULT_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Answer:
    """`num_tokens` counts the generated tokens, including the one that ended the answer."""

    text: str
    num_tokens: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class Pace:
    """The cost of answers: tokens read and generated, seconds, and seconds until the first token if measured.

    `sparse_attention` is what its layers read of the cache; None for a model without it.
    """

    prompt_tokens: int
    new_tokens: int
    seconds: float
    first_seconds: float | None = None
    sparse_attention: SparseReads | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.new_tokens / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        first = "" if self.first_seconds is None else f", the first after {self.first_seconds:.2f} s"
        rate = f"{self.new_tokens} tokens in {self.seconds:.1f} s{first}: {self.tokens_per_second:.1f} token/s"
        return f"{rate} ({self.prompt_tokens} tokens read)"


def set_seed(seed: int) -> None:
    """Seed all random number generators."""
    import transformers

    transformers.set_seed(seed)


def read_in_chunks(opened: LanguageModel, tokens: int) -> None:
    """Read prompts in chunks of at most `tokens`, so that their length does not bound the memory of a pass."""
    opened.model.generation_config.prefill_chunk_size = tokens


def answer(
    opened: LanguageModel,
    prompt: Prompt,
    sampling: Sampling,
    on_text: Callable[[str], None] | None = None,
    interrupted: Event | None = None,
) -> tuple[Answer, Pace]:
    """Return the answer to one prompt, passed piece by piece to `on_text`. Setting `interrupted` ends it early."""
    from ktc.inference.generate.text_stream import TextStream

    started, before = time.perf_counter(), counters(opened.model)
    stream = TextStream(opened.tokenizer, sampling.stop, on_text or (lambda _: None))
    (answered,) = _generate(opened, [prompt], sampling, streamer=stream, interrupted=interrupted)
    seconds = time.perf_counter() - started
    first = None if stream.first_token is None else stream.first_token - started
    reads = reads_since(opened.model, before)
    return answered, Pace(len(prompt.input_ids), answered.num_tokens, seconds, first, reads)


def answer_all(
    opened: LanguageModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    batch_size: int,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Answer], Pace]:
    """Return the answers in the prompts' order, in batches of `batch_size`; `progress` receives the number done."""
    started, before, answers = time.perf_counter(), counters(opened.model), list[Answer]()
    room = require_fit(opened, prompts, sampling.max_new_tokens)
    for batch in batches(prompts, batch_size):
        answers += _generate(opened, batch, sampling, room=room)
        if progress is not None:
            progress(len(answers))
    read, made = sum(len(p.input_ids) for p in prompts), sum(a.num_tokens for a in answers)
    seconds = time.perf_counter() - started
    return answers, Pace(read, made, seconds, sparse_attention=reads_since(opened.model, before))


def batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[Sequence[Prompt]]:
    for start in range(0, len(prompts), batch_size):
        yield prompts[start : start + batch_size]


def padded(opened: LanguageModel, rows: Sequence[Sequence[int]], side: Literal["left", "right"]) -> dict[str, Any]:
    """Return `input_ids` and `attention_mask` [rows, longest], int64, on the input's device, padded on that side."""
    import torch

    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), opened.pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for at, row in enumerate(rows):
        columns = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[at, columns] = torch.tensor(row, dtype=torch.long)
        mask[at, columns] = 1
    return {"input_ids": ids.to(opened.device), "attention_mask": mask.to(opened.device)}


def _generate(
    opened: LanguageModel,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    room: int | None = None,
    streamer: Any = None,
    interrupted: Event | None = None,
) -> list[Answer]:
    """Generate for one batch, or for one prompt with pixels.

    `room` is the token limit of the whole file, so batching does not change answers.
    """
    if room is None:
        room = require_fit(opened, prompts, sampling.max_new_tokens)
    inputs = padded(opened, [prompt.input_ids for prompt in prompts], "left")
    if any(prompt.pixels for prompt in prompts):
        assert len(prompts) == 1, "images of several prompts are not padded"
        inputs |= on_device(prompts[0].pixels, opened.device, opened.model.dtype)
    options: dict[str, Any] = {"generation_config": _config(opened, sampling, room)}
    if sampling.stop:
        options["tokenizer"] = opened.tokenizer
    if streamer is not None:
        options["streamer"] = streamer
    if interrupted is not None:
        options["stopping_criteria"] = [_on(interrupted)]
    sequences: Any = opened.model.generate(**inputs, **options)
    length = inputs["input_ids"].shape[1]
    stopped = interrupted is not None and interrupted.is_set()
    return [_answer(opened, row[length:].tolist(), sampling.stop, stopped) for row in sequences]


def _config(opened: LanguageModel, sampling: Sampling, room: int | None) -> Any:
    """Return the model's own generation config (its end tokens, its penalties) with the sampling settings."""
    config = copy.deepcopy(opened.model.generation_config)
    drawn = sampling.temperature > 0
    wanted = sampling.max_new_tokens or min(DEFAULT_NEW_TOKENS, room or DEFAULT_NEW_TOKENS)
    config.update(
        max_new_tokens=wanted,
        do_sample=drawn,
        num_beams=1,
        temperature=sampling.temperature if drawn else 1.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k if drawn else 50,  # the library's default, which avoids its warning
        stop_strings=list(sampling.stop) or None,
        eos_token_id=sorted(opened.eos_ids) or None,
        pad_token_id=opened.pad_id,
    )
    return config


def _on(interrupted: Event) -> Any:
    """Return a stopping criterion of transformers that ends all rows when the event is set."""
    from ktc.model.decode_steps.token_choice import EndedByHost

    return EndedByHost(interrupted.is_set)


def _answer(opened: LanguageModel, tokens: list[int], stop: Sequence[str], interrupted: bool) -> Answer:
    end = next((at for at, token in enumerate(tokens) if token in opened.eos_ids), None)
    kept = tokens if end is None else tokens[: end + 1]
    text = str(opened.tokenizer.decode(kept, skip_special_tokens=True))
    places = [place for word in stop if (place := text.find(word)) >= 0]
    finish: Finish = "interrupted" if interrupted else "length"
    if places or end is not None:
        finish = "stop"
    return Answer(text[: min(places)] if places else text, len(kept), finish)
