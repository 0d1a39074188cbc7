"""The trial of a linked folder before it is put in place: it is loaded and used once, as its users will.

In: the folder, and whether its weights come from a checkpoint. Out: a `Trial`. The whole model is built on meta, and
PEFT attaches. Then the model, or its first layers if it is large, runs with random weights (`trial_steps.py`). The
classes are those that the folder's own files define.
Refused (I147): a step that raises, unless the stock model raises the same in it.
"""

from __future__ import annotations

import copy
import gc
import logging
import traceback
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError
from ktc.foundation.memory_faults import memory_fault
from ktc.model.checkpoint import WeightSource
from ktc.model.hf.foreign_errors import first_line
from ktc.model.hf.stock_model import parameter_bytes
from ktc.model.kernels.kernel_library import KernelLibrary
from ktc.model.loading import load, load_as, peft_glue
from ktc.model.loading.buffers import compute_buffers
from ktc.model.loading.compiled_model import compiled_class
from ktc.model.loading.first_layers import FirstLayers, keep_first_layers
from ktc.model.loading.python_files import module_of
from ktc.model.loading.realise import realise
from ktc.model.loading.trial_steps import attempted
from ktc.model.manifest.manifest import Manifest, read_manifest
from ktc.model.manifest.stale_change_guard import Remembered, remember
from ktc.model.packed_store import weight_store
from ktc.model.packed_store.host_table import with_tables
from ktc.model.packed_store.placement import check_devices
from ktc.model.packed_store.random_weights import fill_within

SEED: Final = 4711
WHOLE: Final = 1 << 28  # bytes of a model that is tried whole
RANDOM: Final = 1 << 30  # bytes of random values; other weights are zeros, which take no memory
Kernels = Literal["built", "references"]


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of `layers` out of `all_layers`, with the built kernels or with their references in PyTorch.

    `ran` are the steps that ran, `notes` report the others and their reasons.
    """

    layers: int
    all_layers: int
    kernels: Kernels
    ran: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Subject:
    """A folder to be tried. `library` is `None` where no kernel runs, and `reference` where this machine lacks one."""

    folder: Path
    manifest: Manifest
    stock: type[PreTrainedModel]
    compiled: type[PreTrainedModel]
    lora: LoraConfig | None
    library: KernelLibrary | None
    reference: bool

    @property
    def placement(self) -> dict[str, str]:
        return {} if self.reference else dict(self.manifest.placement)


def try_out(folder: Path, *, has_weights: bool = True) -> Trial:
    """Load and use the linked `folder`, with random weights; `has_weights`: its rows have to fill the model.

    A machine that lacks memory for the trial, and not for the compilation, tries nothing: that is a note.
    Raises `InputRefused` (I147) with the step that failed, and what it raised.
    """
    try:
        return _tried(folder, has_weights)
    except Exception as error:
        short = memory_fault(error)
        if short is None:
            raise
        return Trial(0, 0, "built", (), (f"not tried: {short.message}",))


def _tried(folder: Path, has_weights: bool) -> Trial:
    with _undisturbed():
        with _refusing("reading the folder"):
            subject, notes = _opened(folder)
        with _refusing("building the modules and attaching the adapter"):
            model, layers, remembered = _built(subject, has_weights=has_weights)
        with _refusing("loading it with random weights"):
            model = _filled(subject, model, layers, remembered)
        ran, failed = attempted(model, subject.lora)
        if failed:
            notes += _excused(subject, failed, layers)
        if layers.kept < layers.all:
            del model
            gc.collect()  # modules refer to each other, and these take memory
    if layers.kept < layers.all:
        notes.append(f"{layers.all - layers.kept} of {layers.all} layers were not loaded")
    return Trial(layers.kept, layers.all, "references" if subject.reference else "built", ran, tuple(notes))


# The folder ----------------------------------------------------------------------------------------------------------
def _opened(folder: Path) -> tuple[_Subject, list[str]]:
    """Return the subject, and a note where this machine cannot run kernels that were built for another one."""
    manifest, notes, reference = read_manifest(folder), list[str](), False
    try:
        check_devices(manifest.devices)
        library = load_as.check_fit(manifest, folder, Path(manifest.model.folder), reference=False)
    except HostLacks as error:
        notes.append(f"what was built for another machine was not run: {error.diagnostics[0].message}")
        library, reference = None, True
    stock = load.stock_class(manifest, folder, trust_remote_code=True)  # which the compilation has run
    if manifest.model.own_code:
        compiled = compiled_class(stock)
    else:
        compiled = getattr(module_of(folder / "modeling_ktc.py", "modeling_ktc"), f"Ktc{manifest.model.class_name}")
    package = module_of(folder / "__init__.py", folder.name)
    has_adapter = (folder / peft_glue.FILE).read_text(encoding="utf-8").strip() != "null"
    lora = package.lora_config() if has_adapter else None
    return _Subject(folder, manifest, stock, compiled, lora, library, reference), notes


# The model -----------------------------------------------------------------------------------------------------------
def _built(
    subject: _Subject, *, has_weights: bool
) -> tuple[PreTrainedModel, FirstLayers, tuple[Remembered, ...]]:  # fmt: skip
    """Return the modules of the model, or of its first layers, on meta, with facts from before the rewrites.

    Raises what a load raises, and `InputRefused` (L408) for rows that leave a tensor without a value.
    """
    model, recipe = _stock(subject, subject.compiled), subject.manifest.rewrites
    load_as.check_assumptions(subject.manifest, model, subject.folder)
    rows = load_as.read_rows(subject.folder, subject.manifest) if has_weights else None
    is_large = parameter_bytes(model) > WHOLE
    if is_large:
        _check_whole(subject, model, rows)
        model = _stock(subject, subject.compiled)
    layers = keep_first_layers(model, recipe, WHOLE)
    remembered = remember(model, layers.recipe)
    realise(model, layers.recipe, subject.library, subject.folder)
    if rows is not None and not is_large:
        weight_store.check_rows(model, rows)
    return model, layers, remembered


def _check_whole(subject: _Subject, model: PreTrainedModel, rows: Sequence[WeightSource] | None) -> None:
    """Put the modules into a large model without memory for them, and attach the adapter, which is not loaded later."""
    with torch.device("meta"):
        realise(model, subject.manifest.rewrites, None, subject.folder)
    if rows is not None:
        weight_store.check_rows(model, rows)
    if subject.lora is not None:
        get_peft_model(model, copy.deepcopy(subject.lora))


def _stock(subject: _Subject, model_class: type[PreTrainedModel]) -> PreTrainedModel:
    config = load_as.read_config(subject.folder, model_class)
    return load_as.build_on_meta(model_class, config, subject.manifest, None, subject.reference)


def _filled(
    subject: _Subject, model: PreTrainedModel, layers: FirstLayers, remembered: Sequence[Remembered]
) -> PreTrainedModel:
    """Return the model with random weights, ready for calls."""
    memory = subject.manifest.memory if layers.is_whole else dict[str, int]()
    manifest = replace(subject.manifest, rewrites=layers.recipe, memory=memory)
    fill_within(model, with_tables(subject.placement, layers.recipe), SEED, RANDOM)
    made_from = load_as.LoadedFrom(subject.folder, manifest, subject.library, subject.reference, False)
    return load_as.completed(model, made_from, subject.placement, remembered, manifest.model.folder)


def _loaded_stock(subject: _Subject) -> PreTrainedModel:
    """Return the same layers of the stock model."""
    model = _stock(subject, subject.stock)
    keep_first_layers(model, subject.manifest.rewrites, WHOLE)
    fill_within(model, {}, SEED, RANDOM)
    compute_buffers(model, {})
    model.tie_weights()
    return model


# Failures ------------------------------------------------------------------------------------------------------------
def _excused(subject: _Subject, failed: Mapping[str, Exception], layers: FirstLayers) -> list[str]:
    """Return a note for each step in which the stock model raises the same, or memory is short.

    Raises `InputRefused` for a step in which it does not.
    """
    short = [step for step, error in failed.items() if memory_fault(error) is not None]
    notes = [f"{step}: not tried to the end, this machine lacks memory" for step in short]
    if len(notes) == len(failed):
        return notes
    _, theirs = attempted(_loaded_stock(subject), _of_stock(subject))
    who = "the stock model" if layers.is_whole else f"the stock model's first {layers.kept} layers alone"
    for step, error in failed.items():
        if step in short:
            continue
        if step in theirs and _is_alike(error, theirs[step]):
            notes.append(f"{step}: {who} raise{'s' if layers.is_whole else ''} {_in_words(theirs[step])}")
        else:
            raise _refused(step, error) from error
    return notes


def _is_alike(ours: Exception, theirs: Exception) -> bool:
    """Return whether two exceptions are one fault: of one type, with the same words or from the same line."""
    return type(ours) is type(theirs) and (str(ours) == str(theirs) or _place(ours) == _place(theirs))


def _of_stock(subject: _Subject) -> LoraConfig | None:
    """Return the adapter without experts' weights that the stock model keeps in a list of modules."""
    lora = copy.deepcopy(subject.lora)
    if lora is not None and lora.target_parameters:
        names = {name for name, _ in _stock(subject, subject.stock).named_parameters()}
        lora.target_parameters = [name for name in lora.target_parameters if name in names] or None
        if lora.target_parameters:
            lora.lora_dropout = 0.0  # compiled experts take it, which stock PEFT does not know
    return lora


@contextmanager
def _refusing(step: str) -> Generator[None]:
    """Raise a refusal for an exception of the step, unless memory is short."""
    try:
        yield
    except Exception as error:  # code of models and libraries raises anything
        if memory_fault(error) is not None:
            raise
        raise _refused(step, error) from error


def _refused(step: str, error: Exception) -> InputRefused:
    causes = error.diagnostics if isinstance(error, KtcError) else ()
    words = "it is refused" if causes else f"it raises {_in_words(error)}"
    hint = "nothing was written; see `ktc explain I147`"
    return InputRefused(Diagnostic("I147", f"the compiled model would not work: {step}: {words}", hint=hint), *causes)


def _in_words(error: Exception) -> str:
    """Return the exception with the place that raised it."""
    place = _place(error)
    return f"{type(error).__name__}: {first_line(error)}{place and f' ({place})'}"


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


@contextmanager
def _undisturbed() -> Generator[None]:
    """Keep the random numbers, modes and logs of the caller's process as they are."""
    ours, shown = logging.getLogger("ktc"), transformers_logging.get_verbosity()
    level = ours.level
    try:
        transformers_logging.set_verbosity_error()
        ours.setLevel(logging.ERROR)
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        ours.setLevel(level)
        transformers_logging.set_verbosity(shown)
