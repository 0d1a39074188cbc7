"""Measure a trainer's path against a serving path over the same tokens.

In: a `Request`. Out: a frozen `Report`. A compiled model is loaded once for each adapter that it is measured with, and
released before the next one. Refused: models of different vocabularies (V811), too few tokens (V812), a model without
anything to train (V813).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.adapters.adapter import attach, read_adapter
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.consistency.report import SCHEMA, Cell, Report, Side
from ktc.inference.consistency.request import Model, Request
from ktc.inference.consistency.scores import LARGE, Difference, difference
from ktc.inference.consistency.serving_path import Served, calls_of, serving_scores
from ktc.inference.consistency.stock_path import stock_scores
from ktc.inference.consistency.training_path import Trained, trainer_scores, uses_autocast
from ktc.model.compare.feed import choose_tokens
from ktc.model.compare.shown import Shown, show
from ktc.model.hf.stock_model import vocabulary_of
from ktc.model.loading.images import read_images
from ktc.model.loading.load import load, stock_class
from ktc.model.loading.load_as import build_on_meta, read_config
from ktc.model.loading.peft_glue import read_lora_config
from ktc.model.manifest.manifest import Manifest, Versions, read_manifest

Observe = Callable[[str, int, int], None]  # what is measured, the calls of models so far, and those in all
Manifests = Mapping[Path, Manifest]


@dataclass(frozen=True, slots=True)
class _Load:
    """A compiled folder, the adapter on it, and whether the trainer's calls are under autocast."""

    folder: Path
    adapter: Path | None
    autocast: bool


@dataclass(frozen=True, slots=True)
class _Loads:
    """The loads that a request needs, each once."""

    request: Request
    manifests: Manifests

    def trains(self, model: Model) -> _Load:
        """Return the load in which `model` trains."""
        return _Load(model.folder, model.adapter, self.autocast(model))

    def serves(self, trained: Model, served: Model) -> _Load:
        """Return the load of `served` that serves what `trained` trains."""
        return _Load(served.folder, None if self.request.merged else trained.adapter, self.autocast(trained))

    def autocast(self, model: Model) -> bool:
        """Return whether `model` trains under autocast of bf16."""
        dtype = cast("torch.dtype", getattr(torch, self.manifests[model.folder].model.dtype))
        return self.request.against == "trainer" and uses_autocast(dtype, self.request.precision)

    @property
    def training(self) -> dict[_Load, None]:
        """The loads that train; none where stock is compared."""
        models = self.request.trained if self.request.against == "trainer" else ()
        return dict.fromkeys(self.trains(model) for model in models)

    @property
    def serving(self) -> dict[_Load, None]:
        """The loads that serve."""
        pairs = ((one, other) for one in self.request.trained for other in self.request.served)
        return dict.fromkeys(self.serves(one, other) for one, other in pairs)


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Sequences (N, T) int64 of one length and where they come from, with the question `shown` that begins each.

    Decoding begins after `prompt` tokens. The tokens of the question are not compared.
    """

    rows: Tensor
    source: str
    shown: Shown | None
    prompt: int

    @property
    def first(self) -> int:
        """The column of scores (N, T - 1) from which they are compared."""
        return 0 if self.shown is None else self.shown.length - 1


class _Calls:
    """Counts the calls of models, and tells an observer."""

    def __init__(self, total: int, observe: Observe) -> None:
        self._done, self._total, self._observe = 0, total, observe
        self._what = ""

    def begin(self, what: str) -> None:
        """Name what is measured from now on."""
        self._what = what
        self._observe(what, self._done, self._total)

    def count(self) -> None:
        """Count a call."""
        self._done += 1
        self._observe(self._what, self._done, self._total)


def _silent(_what: str, _done: int, _total: int) -> None:
    """Report nothing."""


def measure(request: Request, observe: Observe = _silent) -> Report:
    """Compare every model that trains, or its stock model, with every model that serves. `observe` gets each call.

    Raises:
        InputRefused: as `ktc.load`, `attach` and `KTrainer` do; V811, V812, V813.
    """
    started = time.perf_counter()
    manifests = {model.folder: read_manifest(model.folder) for model in (*request.trained, *request.served)}
    for model in request.trained:
        _check_trains(request, model)
    sequences = _sequences(request, manifests)
    loads = _Loads(request, manifests)
    references, served, rounding = _measured(loads, sequences, observe)
    pairs = [(one, other) for one in request.trained for other in request.served]
    installed = Versions.installed()
    return Report(
        schema=SCHEMA,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: str(getattr(installed, name)) for name in ("ktc", "torch", "transformers")},
        against=request.against,
        tokens=sequences.source,
        sequences=len(sequences.rows),
        length=sequences.rows.shape[1],
        prompt=sequences.prompt,
        batch_size=request.batch_size,
        attention=request.attention,
        autocast=any(map(loads.autocast, request.trained)),
        seed=request.seed,
        large=LARGE,
        trained=tuple(_side(model, manifests, references[model].stacking) for model in request.trained),
        served=tuple(_side(model, manifests, "") for model in request.served),
        cells=tuple(
            _cell(one, other, references[one], served[loads.serves(one, other)], sequences) for one, other in pairs
        ),
        stock_rounding=rounding,
        seconds=round(time.perf_counter() - started, 2),
    )


def _cell(one: Model, other: Model, reference: Trained, served: Served, sequences: _Sequences) -> Cell:
    scores, first = reference.scores, sequences.first
    calls = served.together if reference.stacked else served.alone
    paths = {
        "calls": difference(scores.since(first), calls.since(first)),
        "prompt": difference(scores.since(first), served.prompt.since(first)),
        "decode": difference(scores.since(sequences.prompt - 1), served.decode),
    }
    return Cell(one.name, other.name, one.folder == other.folder, cast("Any", paths))


def _side(model: Model, manifests: Manifests, how: str) -> Side:
    manifest = manifests[model.folder]
    specs = [kernel.spec for kernel in manifest.kernels if "format_down" in kernel.spec]
    formats = {str(spec[part]) for spec in specs for part in ("format_gate_up", "format_down")}
    adapter = "" if model.adapter is None else str(model.adapter)
    return Side(model.name, str(model.folder), manifest.model.dtype, tuple(sorted(formats)), adapter, how)


# Before anything is loaded --------------------------------------------------------------------------------------------
def _check_trains(request: Request, model: Model) -> None:
    """Refuse a model that no trainer has anything to train in. Raises InputRefused (V813; A6xx for an adapter)."""
    if request.against == "stock":
        return
    if model.adapter is not None:
        read_adapter(model.adapter)
        return
    try:
        read_lora_config(model.folder)
    except InputRefused as error:
        if error.diagnostics[0].code != "L431":
            raise
        message = f"`{model.folder.name}` has nothing to train: its rules define no adapter"
        hint = "name a model that trains first and this one by `--serve`, or compare it by `--against stock`"
        raise InputRefused(Diagnostic("V813", message, hint=hint)) from error


def _sequences(request: Request, manifests: Manifests) -> _Sequences:
    """Return what is compared. Raises InputRefused (V811, V812; G731 to G733 for images)."""
    images = read_images(request.images)
    sizes: dict[int, Path] = {}
    configs: dict[Path, PreTrainedConfig] = {}
    for folder, manifest in manifests.items():
        model_class = stock_class(manifest, folder, request.weights, trust_remote_code=request.trusted)
        configs[folder] = read_config(folder, model_class)
        model = build_on_meta(model_class, configs[folder], manifest, None, reference=False)
        sizes.setdefault(vocabulary_of(model), folder)
    if len(sizes) > 1:
        words = ", ".join(f"`{folder.name}` {size}" for size, folder in sizes.items())
        message = f"models of different vocabularies cannot be compared: {words}"
        raise InputRefused(Diagnostic("V811", message, hint="name compilations of one model"))
    (vocabulary,), folder = sizes, request.trained[0].folder
    wanted = request.sequences * request.length
    tokens = choose_tokens(folder, vocabulary, request.text, wanted, request.seed)
    whole = tokens.ids.shape[1] // request.length
    if not whole:
        message = f"`{request.text}` has {tokens.ids.shape[1]} tokens, and a sequence has {request.length}"
        raise InputRefused(Diagnostic("V812", message, hint="give a longer text, or fewer `--tokens`"))
    rows = tokens.ids[0, : whole * request.length].view(whole, request.length)
    if not images:
        return _Sequences(rows, tokens.source, None, request.prompt)
    shown = show(folder, request.images, images, configs[folder], request.trusted)
    source = f"{tokens.source}, after {shown.length} that show {shown.words}"
    return _Sequences(shown.before(rows), source, shown, shown.length + request.prompt)


# Measuring ------------------------------------------------------------------------------------------------------------
def _measured(
    loads: _Loads, sequences: _Sequences, observe: Observe
) -> tuple[Mapping[Model, Trained], Mapping[_Load, Served], Mapping[str, Difference]]:
    """Return the scores of the trainers, or of stock in their place; those that serve; and stock's own rounding."""
    request, training, serving = loads.request, loads.training, loads.serving
    stock = request.trained if request.against == "stock" else ()
    rows, shown = sequences.rows, sequences.shown
    of_serving = calls_of(rows, sequences.prompt, request.batch_size)
    calls = _Calls(len(training) * len(rows) + len(serving) * of_serving + len(stock), observe)
    trained: dict[_Load, Trained] = {}
    served: dict[_Load, Served] = {}
    for wanted in training | serving:
        calls.begin(f"{wanted.folder.name}{'' if wanted.adapter is None else f' with {wanted.adapter.name}'}")
        model = _loaded(request, wanted)
        if wanted in serving:  # before training, which leaves the model wrapped in autocast
            served[wanted] = serving_scores(
                model, rows, prompt=sequences.prompt, batch_size=request.batch_size, autocast=wanted.autocast,
                shown=shown, called=calls.count,
            )  # fmt: skip
        if wanted in training:
            tuned = _tuned(request, model, wanted)
            trained[wanted] = trainer_scores(
                tuned, rows, autocast=wanted.autocast, stack=request.stack, shown=shown, called=calls.count
            )
            del tuned
        del model
        gc.collect()
    if not stock:
        return {model: trained[loads.trains(model)] for model in request.trained}, served, {}
    references, rounding = dict[Model, Trained](), dict[str, Difference]()
    for model in stock:
        calls.begin(f"stock, on the weights of {model.folder.name}")
        scores = stock_scores(model.folder, rows, weights=request.weights, trusted=request.trusted, shown=shown)
        references[model] = Trained(scores.model_dtype, stacked=True, stacking="stock on the weights of the kernels")
        first = sequences.first
        rounding[model.name] = difference(scores.model_dtype.since(first), scores.fp32.since(first))
        calls.count()
        gc.collect()
    return references, served, rounding


def _loaded(request: Request, wanted: _Load) -> PreTrainedModel | PeftModel:
    model: Any = load(wanted.folder, weights=request.weights, trust_remote_code=request.trusted)
    if request.attention != "as compiled":
        model.set_attn_implementation(request.attention)
    return model if wanted.adapter is None else attach(model, wanted.adapter, alone=True)


def _tuned(request: Request, model: PreTrainedModel | PeftModel, wanted: _Load) -> PeftModel:
    """Return the model with its adapter trainable, in fp32, or with a new one of the rules, whose effect is zero."""
    if isinstance(model, PeftModel):
        assert wanted.adapter is not None, "only an adapter wraps the model"
        return attach(cast("Any", model).unload(), wanted.adapter, alone=True, trainable=True)
    torch.manual_seed(request.seed)
    return cast("PeftModel", get_peft_model(model, read_lora_config(wanted.folder)))
