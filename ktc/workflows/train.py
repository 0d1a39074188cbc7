"""Fine-tuning a compiled model: `ktc train` and `ktc.train`.

In: a compiled model, training data, settings. Out: a folder with the adapter in PEFT's format, checkpoints, the
settings that made it, and a report. Refused before anything is loaded: bad settings and data (T501 to T520), a folder
in use or occupied (T521 to T525), layers that the model does not have (T526).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktc import environment
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.workflows import run_folder
from ktc.workflows.tokenised_data import TokenisedData, tokenise
from ktc.workflows.tokenizer import read_tokenizer
from ktc.workflows.train_settings import TrainSettings, read_settings
from ktc.workflows.training_data import TrainingData, read_training_data

if TYPE_CHECKING:
    from ktc.training.run_report import RunReport

Observe = Callable[[str, object], None]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run reads and writes. `resume` is "auto" or a checkpoint's path; `weights` the checkpoint if it moved."""

    out: Path
    output: Path
    resume: str | None = None
    force: bool = False
    weights: Path | None = None
    trusted: bool = False


@dataclass(frozen=True, slots=True)
class PreparedData:
    """Rows to learn from, and rows that are held out."""

    train: TokenisedData
    held_out: TokenisedData | None


@dataclass(frozen=True, slots=True)
class TrainResult:
    """`interrupted` says that the last checkpoint is in `output` and no adapter of a finished run."""

    output: Path
    report: RunReport
    data: PreparedData
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """After a step: its number and that of all, the last loss, and real tokens per second of the last steps."""

    step: int
    steps: int
    loss: float | None
    tokens_per_second: float


def train(
    out: str | Path,
    data: str | Path | None = None,
    *,
    output: str | Path | None = None,
    config: str | Path | None = None,
    resume: str | None = None,
    force: bool = False,
    weights: str | Path | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> TrainResult:
    """Tunes the compiled model in `out` on `data` and writes the adapter to `output`.

    `config` names a YAML file of settings, `settings` are those of `TrainSettings` and win over it; `resume` goes on
    with a run ("auto", or a checkpoint's path), `force` replaces one. Raises InputRefused with all that is wrong.
    """
    place = Place(
        Path(out),
        Path(output) if output else default_output(Path(out)),
        resume,
        force,
        Path(weights) if weights else None,
        trust_remote_code,
    )
    flags = {**settings, "data": None if data is None else str(data)}
    return run(place, settings_for(place, Path(config) if config else None, flags))


def default_output(out: Path) -> Path:
    """Beside the working folder's other things, named after the model."""
    return Path(f"{out.absolute().name}-adapter")


def settings_for(place: Place, config: Path | None, flags: dict[str, Any]) -> TrainSettings:
    """The settings of the run: of a `config` and `flags`; without a config a run that goes on has its own."""
    if place.resume and config is None:
        kept = run_folder.settings_of_run(place.output)
        chosen = {name: value for name, value in flags.items() if value is not None}
        settings = TrainSettings(**{**kept, **chosen})
    else:
        settings = read_settings(config, flags)
    if settings.data is None:
        raise InputRefused(Diagnostic("T504", "there is no training data", hint="name it: `--data FILE`"))
    if place.resume:
        run_folder.require_same_run(place.output, settings, TrainSettings(**run_folder.settings_of_run(place.output)))
    return settings


def prepare(place: Place, settings: TrainSettings) -> PreparedData:
    """The data as tokens; the model is not loaded. Raises InputRefused (T510 to T520)."""
    assert settings.data is not None, "`settings_for` has seen to it"
    rows, held_out = _rows(settings, Path(settings.data))
    limit = _limit(place, settings)
    tokenizer = read_tokenizer(place.out, "T507")

    def encode(data: TrainingData) -> TokenisedData:
        return tokenise(
            data,
            tokenizer,
            limit=limit,
            truncate=settings.truncate,
            template=settings.template,
            train_on_prompt=settings.train_on_prompt,
        )

    return PreparedData(encode(rows), encode(held_out) if held_out else None)


def _rows(settings: TrainSettings, path: Path) -> tuple[TrainingData, TrainingData | None]:
    data = read_training_data(path, settings.format)
    if settings.eval_data:
        return data, read_training_data(Path(settings.eval_data), settings.format)
    if not settings.eval_split:
        return data, None
    if len(data.examples) == 1:
        raise InputRefused(Diagnostic("T503", f"`eval_split` of `{path}`: one row cannot be split"))
    held_out = min(max(1, round(len(data.examples) * settings.eval_split)), len(data.examples) - 1)
    order = list(range(len(data.examples)))
    random.Random(settings.seed).shuffle(order)
    chosen = frozenset(order[:held_out])
    parts = [
        tuple(each for number, each in enumerate(data.examples) if (number in chosen) is held) for held in (False, True)
    ]
    return replace(data, examples=parts[0]), replace(data, examples=parts[1])


def _limit(place: Place, settings: TrainSettings) -> int:
    """The longest sequence. Raises InputRefused (T505) where the model has no room for it."""
    from ktc.runtime.load import read_config, stock_class
    from ktc.runtime.manifest import read_manifest

    model_class = stock_class(read_manifest(place.out), place.out, place.weights, trust_remote_code=place.trusted)
    config: Any = read_config(place.out, model_class).get_text_config()
    longest = int(getattr(config, "max_position_embeddings", 0) or settings.length)
    if settings.length > longest:
        message = f"`length` is {settings.length}, and the model has room for {longest} tokens"
        raise InputRefused(Diagnostic("T505", message, hint=f"`--length {longest}` is the most"))
    return settings.length


def _unobserved(event: str, value: object) -> None:
    """Nobody is watching."""


def run(
    place: Place, settings: TrainSettings, *, observe: Observe = _unobserved, stop: Stop = lambda: False
) -> TrainResult:
    """One run. `observe` hears of `data`, `folder`, `model`, each `step` and `saved`; `stop` is asked after each step.

    A run that was stopped saves a checkpoint first. Under several processes all call this, and the first writes.
    """
    from ktc.workflows.training_run import TrainingRun

    if environment.process_rank() == 0:  # the one that will claim the folder
        run_folder.require_usable(place.output, resume=place.resume, force=place.force)
    data = prepare(place, settings)
    observe("data", data)
    with TrainingRun(place, settings, data, observe, stop) as running:
        return running.finish()
