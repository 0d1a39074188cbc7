"""The request of `ktc bench finetune`: from the typed words to a `Request`. Refused: invalid options (U030, H244)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, cast

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, listing, suggest
from ktc.language import dsl
from ktc.training.trainers.step_trace import TRACED_STEP

Impl = Literal["ktc", "hf"]
IMPLS: tuple[Impl, ...] = ("ktc", "hf")
Place = Literal["gpu", "cpu", "reference"]
PLACES: tuple[Place, ...] = ("gpu", "cpu", "reference")
STREAMED_TO = "prefill"  # the parameter of the bundled programs that names the device which experts are streamed to
T = TypeVar("T", bound=str)


@dataclass(frozen=True, slots=True)
class Typed:
    """The words of the command line; lists are comma-separated."""

    model: str
    rule: str = "moe-lora"
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    weight_format: str | None = None
    random_weights: bool = False
    layers: int | None = None
    length: int = 512
    accumulation: int = 16
    steps: int = 4
    experts: str = ""
    impls: str = "ktc"
    trace: Path | None = None
    plot: Path | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One run. `experts` are the places where ktc multiplies experts, each measured on one load of the model.

    The place `reference` is the same model in fp32 as plain PyTorch on the CPU. A step has `accumulation` sequences of
    `length` tokens. The first of `steps` is not counted. `layers` None is the whole depth. `seed` is that of weights,
    tokens and adapter. `trace` is the file of a step's timeline, "" for none. `compared`: the losses of the rows are
    compared, hence dropout is 0.
    """

    model: str
    rule: str
    settings: Mapping[str, str]
    impls: tuple[Impl, ...]
    experts: tuple[Place, ...]
    random_weights: bool
    layers: int | None
    length: int
    accumulation: int
    steps: int
    seed: int = 0
    trace: str = ""
    compared: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.accumulation * self.length

    def trace_of(self, place: Place) -> Path | None:
        """Return the file of the timeline of a place: with several places its stem ends in the place's name."""
        if not self.trace:
            return None
        file = Path(self.trace)
        return file.with_stem(f"{file.stem}-{place}") if len(self.experts) > 1 else file


def parse(typed: Typed, gpus: int) -> Request:
    """Return the request on a machine with this number of GPUs.

    Raises:
        InputRefused: U030 for an invalid option, and the errors of the rule file.
        HostLacks: H244 for experts on a GPU that is missing.
    """
    if typed.layers is not None and not typed.random_weights:
        raise refused("`--layers` is for `--random-weights`: a checkpoint has its own depth")
    if typed.steps < 2:
        raise refused("`--steps` is at least 2: the first step is not counted")
    if typed.trace is not None and typed.steps < TRACED_STEP:
        raise refused(f"`--trace` needs `--steps {TRACED_STEP}`: neither the first nor the traced step is counted")
    asked = {} if typed.weight_format is None else {"format": typed.weight_format}
    settings = {**asked, **typed.settings}
    if not asked.items() <= settings.items():
        raise refused("`--format` and `--set format=` name two formats")
    experts = _several("--experts", typed.experts, PLACES) or (_default_place(typed, settings, gpus),)
    if "gpu" in experts:
        _require_gpu(gpus)
        settings.setdefault(STREAMED_TO, "auto")
    return Request(
        model=typed.model,
        rule=typed.rule,
        settings=settings,
        impls=_several("--impl", typed.impls, IMPLS) or ("ktc",),
        experts=experts,
        random_weights=typed.random_weights,
        layers=typed.layers,
        length=typed.length,
        accumulation=typed.accumulation,
        steps=typed.steps,
        trace=str(typed.trace or ""),
        compared=typed.plot is not None or "reference" in experts,
    )


def _default_place(typed: Typed, settings: Mapping[str, str], gpus: int) -> Place:
    """Return the GPU if there is one and the program can stream experts to it."""
    if gpus == 0 or settings.get(STREAMED_TO) == "cpu":
        return "cpu"
    return "gpu" if STREAMED_TO in dsl.load(typed.rule, settings).units[0].params else "cpu"


def _require_gpu(gpus: int) -> None:
    if gpus == 0:
        message = "experts cannot be streamed to a GPU: this process sees none"
        raise HostLacks(Diagnostic("H244", message, hint="`--experts cpu` multiplies them on the host"))


def _several(option: str, text: str, known: Sequence[T]) -> tuple[T, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise refused(f"`{option}` knows no `{word}`", suggest(word, known) or f"there are {listing(known)}")
    return tuple(dict.fromkeys(cast("list[T]", words)))


def refused(message: str, hint: str = "`ktc bench finetune --help` lists the options") -> InputRefused:
    """Return the error about an invalid option."""
    return InputRefused(Diagnostic("U030", message, hint=hint))
