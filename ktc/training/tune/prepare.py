"""Training data as tokens, before the model is loaded.

In: the paths and the settings of a run. Out: `PreparedData`. Refused: bad data, a length that the model has no room for
(T503, T505, T510 to T520).
"""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, listing
from ktc.model.hf.tokenizer import read_tokenizer
from ktc.training.tune.examples import StreamedExamples, TrainingData, read_training_data, stream_training_data
from ktc.training.tune.image_rows import open_processor
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.tokenised import TokenisedData, tokenise
from ktc.training.tune.types import PreparedData, RunPaths


def prepare(paths: RunPaths, settings: TrainSettings) -> PreparedData:
    """Return the data as tokens, without loading the model. Raise InputRefused (T510 to T520)."""
    assert settings.data, "`settings_for` ensures it"
    _require_reporters(settings)
    rows, held_out = _rows(settings)
    limit = _limit(paths, settings)
    tokenizer = read_tokenizer(paths.out, "T507")
    with_images = any(_has_images(data) for data in (rows, held_out) if data is not None)
    if with_images and settings.packing:  # which joins rows without their images
        message = "`packing` joins rows of text, and the data has images"
        raise InputRefused(Diagnostic("T549", message, hint="leave `packing` out"))
    processor = open_processor(paths.out, paths.trusted) if with_images else None

    def encode(data: TrainingData) -> TokenisedData:
        return tokenise(
            replace(data, processor=processor),
            tokenizer,
            limit=limit,
            truncate=settings.truncate,
            template=settings.template,
            train_on_prompt=settings.train_on_prompt,
            seed=settings.seed,
        )

    return PreparedData(encode(rows), encode(held_out) if held_out else None)


def _has_images(data: TrainingData) -> bool:
    """Return whether a row in memory has an image."""
    return not data.is_streamed and any(turn.images for example in data.examples for turn in example.turns)


def _require_reporters(settings: TrainSettings) -> None:
    """Raise HostLacks (H246) for packages that would report the run and are not installed."""
    lacking = [name for name in settings.report_to if find_spec(name) is None]
    if lacking:
        message = f"`report_to` needs {listing(lacking)}, which this environment does not have"
        raise HostLacks(Diagnostic("H246", message, hint=f"`pip install {' '.join(lacking)}`"))


def _rows(settings: TrainSettings) -> tuple[TrainingData, TrainingData | None]:
    if settings.streaming:
        return _streamed_rows(settings)
    data = read_training_data(settings.data, settings.format, settings.method, settings.column)
    if settings.eval_data:
        return data, read_training_data(settings.eval_data, settings.format, settings.method, settings.column)
    if not settings.eval_split:
        return data, None
    assert isinstance(data.examples, tuple)
    if len(data.examples) == 1:
        raise InputRefused(Diagnostic("T503", f"`eval_split` of `{data.file}`: one row cannot be split"))
    held_out = min(max(1, round(len(data.examples) * settings.eval_split)), len(data.examples) - 1)
    order = list(range(len(data.examples)))
    random.Random(settings.seed).shuffle(order)
    train, evaluation = (
        replace(data, examples=tuple(data.examples[number] for number in sorted(numbers)))
        for numbers in (order[held_out:], order[:held_out])
    )
    once = tuple(replace(source, weight=1.0) for source in data.sources)
    return train, replace(evaluation, sources=once)


def _streamed_rows(settings: TrainSettings) -> tuple[TrainingData, TrainingData | None]:
    data = stream_training_data(settings.data, settings.format, settings.column)
    if settings.eval_data:
        return data, stream_training_data(settings.eval_data, settings.format, settings.column)
    if not settings.eval_split:
        return data, None
    assert isinstance(data.examples, StreamedExamples)
    train, held_out = (
        replace(data.examples, share=settings.eval_split, seed=settings.seed, held_out=is_held_out)
        for is_held_out in (False, True)
    )
    if not (len(train) and len(held_out)):
        message = f"`eval_split` of `{data.file}`: a draw for each of {data.examples.rows} rows leaves one side empty"
        raise InputRefused(Diagnostic("T503", message, hint="give another `eval_split`, or leave `streaming` out"))
    once = tuple(replace(source, weight=1.0) for source in data.sources)
    return replace(data, examples=train), replace(data, sources=once, examples=held_out)


def _limit(paths: RunPaths, settings: TrainSettings) -> int:
    """Return the longest sequence. Raise InputRefused (T505) if it exceeds the model's length."""
    from ktc.model.loading.load import stock_class
    from ktc.model.loading.load_as import read_config
    from ktc.model.manifest.manifest import read_manifest

    model_class = stock_class(read_manifest(paths.out), paths.out, paths.weights, trust_remote_code=paths.trusted)
    config: Any = read_config(paths.out, model_class).get_text_config()
    longest = int(getattr(config, "max_position_embeddings", 0) or settings.length)
    if settings.length > longest:
        message = f"`length` is {settings.length}, and the model has room for {longest} tokens"
        raise InputRefused(Diagnostic("T505", message, hint=f"`--length {longest}` is the most"))
    return settings.length
