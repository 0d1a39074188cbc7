"""Measure a trainer's path against a serving path over the same tokens.

In: a `Request`. Out: a frozen `Report`. A compiled model is loaded once for each adapter that it is measured with, and
released before the next one. Refused: models of different vocabularies (V811), too few tokens (V812), a model without
anything to train (V813).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from ktc.adapters.adapter import attach, read_adapter
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.inference.consistency.report import SCHEMA, Cell, Report, Side
from ktc.inference.consistency.request import Model, Request
from ktc.inference.consistency.scores import LARGE, difference
from ktc.inference.consistency.serving_path import Served, calls_of, serving_scores
from ktc.inference.consistency.stock_path import Stock, stock_scores
from ktc.inference.consistency.training_path import Trained, trainer_scores, uses_autocast
from ktc.inference.prove.tokens import choose_tokens
from ktc.model.hf.stock_model import vocabulary_of
from ktc.model.loading.load import load, stock_class
from ktc.model.loading.load_as import build_on_meta, read_config
from ktc.model.loading.peft_glue import read_lora_config
from ktc.model.manifest.manifest import Manifest, Versions, read_manifest

Observe = Callable[[str, int, int], None]  # what is measured, the calls of models so far, and those in all


@dataclass(frozen=True, slots=True)
class _Load:
    """A compiled folder, the adapter on it, and whether the trainer's calls are under autocast."""

    folder: Path
    adapter: Path | None
    autocast: bool


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
    source, rows = _rows(request, manifests)
    training, serving = _loads(request, manifests)
    with_stock = request.trained if request.against == "stock" else ()
    of_serving = calls_of(rows, request.prompt, request.batch_size)
    calls = _Calls(len(training) * len(rows) + len(serving) * of_serving + len(with_stock), observe)
    trained, served = _measured(request, training, serving, rows, calls)
    stock = _stock(request, rows, calls) if with_stock else {}

    def cell(one: Model, other: Model) -> Cell:
        found = served[_load_of(request, manifests, one, other)]
        own = None if stock else trained[_load_of_training(request, manifests, one)]
        reference = stock[one.folder].own if own is None else own.scores
        together = own is None or own.stacked
        paths = {
            "calls": difference(reference, found.together if together else found.alone),
            "prompt": difference(reference, found.prompt),
            "decode": difference(reference.since(request.prompt - 1), found.decode),
        }
        return Cell(one.name, other.name, one.folder == other.folder, cast("Any", paths))

    def how(model: Model) -> str:
        if stock:
            return "stock on the weights of the kernels"
        return trained[_load_of_training(request, manifests, model)].stacking

    return Report(
        SCHEMA,
        datetime.now(UTC).isoformat(timespec="seconds"),
        {name: str(getattr(Versions.installed(), name)) for name in ("ktc", "torch", "transformers")},
        request.against,
        source,
        len(rows),
        rows.shape[1],
        request.prompt,
        request.batch_size,
        request.attention,
        any(_autocast(request, manifests[model.folder]) for model in request.trained),
        request.seed,
        LARGE,
        tuple(_side(model, manifests[model.folder], how(model)) for model in request.trained),
        tuple(_side(model, manifests[model.folder], "") for model in request.served),
        tuple(cell(one, other) for one in request.trained for other in request.served),
        {name: difference(stock[folder].own, stock[folder].fp32) for name, folder in _folders(request) if stock},
        round(time.perf_counter() - started, 2),
    )


def _folders(request: Request) -> list[tuple[str, Path]]:
    return [(model.name, model.folder) for model in request.trained]


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


def _rows(request: Request, manifests: Mapping[Path, Manifest]) -> tuple[str, Tensor]:
    """Return where the tokens come from, and sequences (N, T) int64 of one length. Raises InputRefused."""
    sizes: dict[int, Path] = {}
    for folder, manifest in manifests.items():
        model_class = stock_class(manifest, folder, request.weights, trust_remote_code=request.trusted)
        model = build_on_meta(model_class, read_config(folder, model_class), manifest, None, reference=False)
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
    return tokens.source, tokens.ids[0, : whole * request.length].view(whole, request.length)


def _autocast(request: Request, manifest: Manifest) -> bool:
    dtype = cast("torch.dtype", getattr(torch, manifest.model.dtype))
    return request.against == "trainer" and uses_autocast(dtype, request.precision)


def _load_of_training(request: Request, manifests: Mapping[Path, Manifest], model: Model) -> _Load:
    return _Load(model.folder, model.adapter, _autocast(request, manifests[model.folder]))


def _load_of(request: Request, manifests: Mapping[Path, Manifest], one: Model, other: Model) -> _Load:
    """Return the load of `other` that serves what `one` trains."""
    adapter = None if request.merged else one.adapter
    return _Load(other.folder, adapter, _autocast(request, manifests[one.folder]))


def _loads(request: Request, manifests: Mapping[Path, Manifest]) -> tuple[list[_Load], list[_Load]]:
    """Return the loads that train and those that serve, as the cells need them, each once."""
    trains = request.trained if request.against == "trainer" else ()
    training = [_load_of_training(request, manifests, model) for model in trains]
    serving = [_load_of(request, manifests, one, other) for one in request.trained for other in request.served]
    return list(dict.fromkeys(training)), list(dict.fromkeys(serving))


def _measured(
    request: Request, training: Sequence[_Load], serving: Sequence[_Load], rows: Tensor, calls: _Calls
) -> tuple[dict[_Load, Trained], dict[_Load, Served]]:
    """Measure every load."""
    trained: dict[_Load, Trained] = {}
    served: dict[_Load, Served] = {}
    for each in dict.fromkeys((*training, *serving)):
        calls.begin(f"{each.folder.name}{'' if each.adapter is None else f' with {each.adapter.name}'}")
        model = _loaded(request, each)
        if each in serving:  # before training, which leaves the model wrapped in autocast
            served[each] = serving_scores(
                model, rows, prompt=request.prompt, batch_size=request.batch_size, autocast=each.autocast,
                called=calls.count,
            )  # fmt: skip
        if each in training:
            tuned = _tuned(request, model, each)
            trained[each] = trainer_scores(tuned, rows, autocast=each.autocast, stack=request.stack, called=calls.count)
            del tuned
        del model
        gc.collect()
    return trained, served


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


def _stock(request: Request, rows: Tensor, calls: _Calls) -> dict[Path, Stock]:
    found: dict[Path, Stock] = {}
    for model in request.trained:
        calls.begin(f"stock, on the weights of {model.folder.name}")
        found[model.folder] = stock_scores(model.folder, rows, weights=request.weights, trusted=request.trusted)
        calls.count()
        gc.collect()
    return found


def _side(model: Model, manifest: Manifest, how: str) -> Side:
    specs = [kernel.spec for kernel in manifest.kernels if "format_down" in kernel.spec]
    formats = {str(spec[part]) for spec in specs for part in ("format_gate_up", "format_down")}
    adapter = "" if model.adapter is None else str(model.adapter)
    return Side(model.name, str(model.folder), manifest.model.dtype, tuple(sorted(formats)), adapter, how)
