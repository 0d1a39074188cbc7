"""New weights for a loaded model, in the memory of the old ones.

In: a loaded model, and the folder of a checkpoint with the same config. Out: the same model with those weights. Every
tensor keeps its address, so what holds addresses (adapters, optimizers, a user's own graphs) stays valid. Captured
steps are dropped: they may hold values that were computed from weights.

`restore`, `load` and `process` write in place, with one tensor beside the model; until `process`, calls are refused.
`stage` reads everything into memory of its own first, so that a fault leaves the model unchanged, bit for bit.
Refused: what a load refuses, another config (L405), a model whose weights are not its own or not known (L461), and
staged weights that do not fit the free memory (L462).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation import host
from ktc.foundation.progress import Progress
from ktc.model.checkpoint import open_index
from ktc.model.experts.load_state import LoadState
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.private_api import unsaved_buffers
from ktc.model.hf.patching import stock_class
from ktc.model.linears.absent_weight import LinearWithoutWeight
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.linears.streamed_linear import StreamedLinear
from ktc.model.loading.load_as import LoadedFrom, read_config, read_rows, realised_on_meta
from ktc.model.packed_store import weight_store
from ktc.model.packed_store.memory import in_gib, tensor_bytes
from ktc.model.packed_store.new_checkpoint import require_same_codes, require_same_config

Packed = FusedMoe | LinearWithoutWeight


def restore(model: PreTrainedModel) -> None:
    """Let all packed weights await a load. Raises InputRefused (L461) before any does."""
    _require_refreshable(model)
    for fqn, module in _packed(model):
        module.restore(fqn)
    _drop_captured(model)
    cast("Any", model).weights_state = LoadState.AWAITING_LOAD


def load(model: PreTrainedModel, checkpoint: Path, progress: Progress | None = None) -> None:
    """Read all weights of `checkpoint` into the memory of a model that awaits them, one tensor at a time.

    A fault leaves the model waiting. Raises InputRefused: L460 where `restore` did not come first, and the errors of
    a load.
    """
    if _state(model) is LoadState.KERNEL_LAYOUT:
        message = "weights are loaded over those that the model computes with"
        raise InputRefused(Diagnostic("L460", message, hint="call `restore_weights()` first, or `refresh(FOLDER)`"))
    shell = _shell(model)
    for _, made, target in _pairs(shell, model):
        _share(made, target)
    _fill(shell, model, checkpoint, progress)
    for _, module in _packed(model):
        if isinstance(module, StreamedLinear):
            module.loads.loaded_all()
    _loaded(model, checkpoint)


def process(model: PreTrainedModel) -> None:
    """Admit calls again; nothing where no `restore` came before. Raises InputRefused (L460) without a whole load."""
    if _state(model) is LoadState.KERNEL_LAYOUT:
        return
    if _state(model) is LoadState.AWAITING_LOAD:
        message = "the model awaits weights that were not loaded, or not all of them"
        raise InputRefused(Diagnostic("L460", message, hint="call `load_weights(FOLDER)` first"))
    for _, module in _packed(model):
        module.process()
    cast("Any", model).weights_state = LoadState.KERNEL_LAYOUT
    _drop_captured(model)


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights of `checkpoint` that were read and checked, `nbytes` in memory of their own, for the model `of`."""

    of: PreTrainedModel
    checkpoint: Path
    nbytes: int
    pairs: tuple[tuple[nn.Module, nn.Module], ...]

    def apply(self) -> None:
        """Copy them into the model's memory. Raises InputRefused (L461), before anything is changed."""
        restore(self.of)
        with torch.no_grad():
            for made, target in self.pairs:
                _copy(made, target)
        _loaded(self.of, self.checkpoint)
        process(self.of)


@dataclass(frozen=True, slots=True)
class Stage:
    """Memory for the weights of a model. `fill` may run beside forward passes, making one may not.

    Transformers sets the default dtype of the process while it builds the modules.
    """

    of: PreTrainedModel
    shell: PreTrainedModel

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Stage:
        """Build the modules, without memory yet. Raises InputRefused (L461)."""
        _require_refreshable(model)
        shell = _shell(model)
        for module in shell.modules():
            if isinstance(module, StoredLinear):
                module.stay_on_host()  # a GPU has no room for both
        return cls(model, shell)

    def fill(self, checkpoint: Path, progress: Progress | None = None) -> StagedWeights:
        """Read and check every tensor. Raises the errors of a load, and HostLacks (L462)."""
        needed = sum(tensor_bytes(self.shell, {}).values())
        if needed > (free := host.available_memory()):
            message = f"new weights need {in_gib(needed)} beside the model, and {in_gib(free)} are free"
            hint = "make room, or `restore_weights`, `load_weights` and `process_weights`, which need one tensor"
            raise HostLacks(Diagnostic("L462", message, hint=hint))
        _fill(self.shell, self.of, checkpoint, progress)
        pairs = tuple((made, target) for _, made, target in _pairs(self.shell, self.of))
        return StagedWeights(self.of, checkpoint, needed, pairs)


# The model ----------------------------------------------------------------------------------------------------------
def _require_refreshable(model: PreTrainedModel) -> None:
    """Raise InputRefused (L461)."""
    reason = _unrefreshable(model)
    if reason:
        hint = "load the compiled folder again, with `weights` of the new checkpoint"
        raise InputRefused(Diagnostic("L461", f"the weights of this model cannot be replaced: {reason}", hint=hint))


def _unrefreshable(model: PreTrainedModel) -> str:
    if getattr(model, "loaded_from", None) is None:
        return "it was not loaded from a compiled folder"
    for fqn, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if ".modules_to_save." in fqn:
            return f"`{fqn}` trains a copy of its weights, which a checkpoint does not replace"
        if getattr(module, "merged", False):
            return f"an adapter is merged into `{fqn}`"
        if isinstance(module, FusedMoe) and module.weights.packed is not None and module.weights.packed.is_mapped:
            return f"`{fqn}` is mapped read-only from a packed store"
    return ""


def _state(model: PreTrainedModel) -> LoadState:
    return cast("LoadState", cast("Any", model).weights_state)


def _packed(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    for fqn, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, Packed):
            yield fqn, module


def _loaded(model: PreTrainedModel, checkpoint: Path) -> None:
    """Record that the weights are those of `checkpoint`, which adapters saved from now on name as their base."""
    of = cast("Any", model)
    of.weights_state = LoadState.PACKED_CANONICAL
    of.name_or_path = of.config.name_or_path = str(checkpoint.absolute())


def _drop_captured(model: PreTrainedModel) -> None:
    graphs = getattr(model, "decode_graphs", None)
    if graphs is not None:
        graphs.clear()


# Modules without memory, in the names of the checkpoint's rows -------------------------------------------------------
def _shell(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model as it was built before its weights were read, without adapters."""
    of = cast("LoadedFrom", cast("Any", model).loaded_from)
    return realised_on_meta(type(model), of.folder, of.manifest, of.library, reference=of.reference)


def _fill(shell: PreTrainedModel, model: PreTrainedModel, checkpoint: Path, progress: Progress | None) -> None:
    of = cast("LoadedFrom", cast("Any", model).loaded_from)
    require_same_config(read_config(of.folder, type(model)), checkpoint)
    sources, index = read_rows(of.folder, of.manifest), open_index(checkpoint)
    require_same_codes(sources, index)
    weight_store.fill(shell, sources, index, {}, allow_nonfinite=of.allow_nonfinite, progress=progress)
    shell.tie_weights()
    weight_store.check_filled(shell, persistent=True)
    for module in shell.modules():
        if isinstance(module, FusedLinear):
            module.round_weight(in_place=True)


def _pairs(shell: nn.Module, model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield every module of the shell with the model's, past adapters. Raises InputRefused (L461)."""
    for fqn, made in cast("Iterator[tuple[str, nn.Module]]", shell.named_modules()):
        target = _plain_module(model, fqn)
        fault = "no module" if target is None else _misfit(made, target)
        if target is None or fault:
            message = f"the weights of this model cannot be replaced: `{fqn}` has {fault}"
            raise InputRefused(Diagnostic("L461", message, hint="load the compiled folder again"))
        yield fqn, made, target


def _plain_module(model: nn.Module, fqn: str) -> nn.Module | None:
    """Return a module by its stock name, without the wrappers that PEFT puts around it."""
    module: Any = model
    for name in fqn.split(".") if fqn else ():
        module = getattr(module, name, None)
        while isinstance(inner := getattr(module, "base_layer", getattr(module, "original_module", None)), nn.Module):
            module = inner
    return module if isinstance(module, nn.Module) else None


def _misfit(made: nn.Module, target: nn.Module) -> str:
    is_same = stock_class(made) is stock_class(target)  # a loaded layer may be patched
    if isinstance(made, Packed) and (not is_same or made.extra_repr() != target.extra_repr()):
        return f"a `{type(target).__name__}` of another kind"
    for name, tensor in _own_tensors(made):
        other = getattr(target, name, None)
        if not isinstance(other, Tensor) or other.shape != tensor.shape:
            return f"another `{name}`"
    return ""


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers of a module alone; those of packed experts have no values."""
    if isinstance(module, FusedMoe):
        return
    absent = unsaved_buffers(module)
    yield from module.named_parameters(recurse=False)
    yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in absent)


def _copy(made: nn.Module, target: nn.Module) -> None:
    if isinstance(made, FusedMoe) and isinstance(target, FusedMoe):
        target.weights.copy_from(made.weights)
    if isinstance(made, StoredLinear) and isinstance(target, StoredLinear):
        target.copy_from(made)
    for name, tensor in _own_tensors(made):
        if isinstance(target, StreamedLinear) and name == "weight":
            target.copy_from(tensor)
        else:
            cast("Tensor", getattr(target, name)).detach().copy_(tensor)


def _share(made: nn.Module, target: nn.Module) -> None:
    """Let a module of the shell write into the model's memory."""
    if isinstance(made, FusedMoe) and isinstance(target, FusedMoe):
        made.weights = target.weights
    if isinstance(made, StoredLinear) and isinstance(target, StoredLinear):
        made.packed, made.loads = target.packed, target.loads
    for name, tensor in list(_own_tensors(made)):
        of_device = target.kept if isinstance(target, StreamedLinear) and name == "weight" else getattr(target, name)
        shared = cast("Tensor", of_device).detach()
        if isinstance(tensor, nn.Parameter):
            setattr(made, name, nn.Parameter(shared, requires_grad=False))
        else:
            setattr(made, name, shared)
