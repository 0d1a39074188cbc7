"""Weights from a checkpoint into a model, one tensor at a time, each directly to its module and device.

In: a model on meta tensors with its modules realised, and the rows of `weights.json`. Out: the same model, filled.
Memory grows by the final weights and little more: experts are packed one matrix at a time, or a matrix per thread where
their codes or blocks are kept, a fused tensor is read one expert at a time, and codes are dequantised a band of rows at
a time. Refused: a value that is not finite, a parameter without a
value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.anonymous_memory import collapse
from ktc.foundation.progress import Progress
from ktc.model.checkpoint import CheckpointIndex, Span, WeightSource
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.checkpoint.values import read_weight
from ktc.model.experts.layouts.stock_layout import StockTensor
from ktc.model.experts.module import FusedMoe
from ktc.model.graph.typed import named_modules, owner_of
from ktc.model.hf.expert_layout import has_columns
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.packed_store.finite_weights import is_finite, not_finite
from ktc.model.packed_store.packing import Packing
from ktc.model.packed_store.placement import device_of
from ktc.model.packed_store.stored_experts import by_part, is_half, misfit_of_experts, stored_loader
from ktc.model.packed_store.stored_linears import misfit_of_blocks, rows_loader


def fill(
    model: nn.Module,
    sources: Sequence[WeightSource],
    index: CheckpointIndex,
    placement: Mapping[str, str],
    *,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Read every row of `sources` into `model`, in the dtypes that its meta tensors have.

    Raises `InputRefused`: L406 where the checkpoint is not the one that was compiled, L408 for rows that fit nothing in
    the model, L407 for a tensor with a value that is not finite, I112 for a truncated file.
    """
    _check_targets(model, sources)
    check_unchanged(sources, index)
    sizes = [stored_bytes(source, index) for source in sources]
    done, total = 0, sum(sizes)
    with TensorReader(index.folder) as reader, Packing() as packing, torch.no_grad():
        for source, size in zip(sources, sizes, strict=True):
            dtype = cast("Tensor", getattr(*owner_of(model, source.target))).dtype  # of values restored from codes
            of_experts = stored_loader(model, source, allow_nonfinite)
            put_stored = of_experts or rows_loader(model, source, allow_nonfinite)
            experts = tuple(experts_of(source))
            for expert in experts:
                if put_stored is not None:
                    packing.add(put_stored(reader, index, expert), size // len(experts))
                    continue
                tensor = read_weight(reader, index, source, expert, dtype)
                if not allow_nonfinite and not is_finite(tensor):
                    raise InputRefused(not_finite(source, expert))
                _put(model, source, expert, tensor, placement)
                del tensor  # before the next read: one piece is in memory at a time
            if of_experts is not None:
                packing.finish()  # gate and up of an expert share panels, and may be two rows
            done += size
            if progress is not None:
                progress(done, total)
        packing.finish()


def stored_bytes(source: WeightSource, index: CheckpointIndex) -> int:
    """Return the bytes that a row reads, scales included; tensors that the checkpoint lacks count as none."""
    entries = (index.tensors.get(stored.key) for stored in source.parts)
    return sum(entry.end - entry.begin for entry in entries if entry is not None)


def experts_of(source: WeightSource) -> Iterable[int | None]:
    """Yield the parts to read of a row: its expert, or each expert of a stack."""
    return range(source.num_stacked) if source.transform == "per_expert" else (source.expert,)


def check_unchanged(sources: Iterable[WeightSource], index: CheckpointIndex) -> None:
    """Raise `InputRefused` (L406) with tensors that have changed since the compilation."""
    hint = "compile the model again, or name the checkpoint it was compiled from: `load(weights=...)`"
    problems: list[Diagnostic] = []
    for stored in (stored for source in sources for stored in source.parts):
        entry = index.tensors.get(stored.key)
        present = "no such tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        if present != f"{stored.dtype} {list(stored.shape)}":
            expected = f"compiled from {stored.dtype} {list(stored.shape)}"
            message = f"`{stored.key}` was {expected}, the checkpoint has {present}"
            problems.append(Diagnostic("L406", message, hint=hint))
    if problems:
        raise InputRefused(*problems[:10])


def _check_targets(model: nn.Module, sources: Iterable[WeightSource]) -> None:
    """Raise `InputRefused` (L408) for rows of tensors that the model lacks or has in another shape."""
    hint = "`weights.json` does not belong to this model; compile it again"
    problems = [
        Diagnostic("L408", f"`weights.json` fills `{source.target}` from `{source.source_key}`: {fault}", hint=hint)
        for source in sources
        if (fault := _misfit(model, source))
    ]
    if problems:
        raise InputRefused(*problems[:10])


def check_rows(model: nn.Module, sources: Sequence[WeightSource]) -> None:
    """Check, without a checkpoint, that the rows of `weights.json` fill a model on meta with its modules realised.

    Raises `InputRefused` (L408) for a row that fits nothing, and for a tensor that no row fills and that is not tied to
    one that is filled.
    """
    _check_targets(model, sources)
    filled = {source.target for source in sources}
    tied = cast("dict[str, str]", getattr(model, "all_tied_weights_keys", None) or {})
    filled |= {name for pair in tied.items() if filled & set(pair) for name in pair}
    tensors = cast("dict[str, Tensor]", model.state_dict(keep_vars=True))
    written = {id(tensors[name]) for name in filled & tensors.keys()}  # one module may be at two places
    wanted = [name for name, tensor in tensors.items() if tensor.is_meta and id(tensor) not in written]
    for fqn, module in named_modules(model):
        if isinstance(module, FusedMoe):
            wanted += [f"{fqn}.{name}" for name in module.weights.stock]
    _require_filled([name for name in wanted if name not in filled])


def _misfit(model: nn.Module, source: WeightSource) -> str:
    """Return why a row cannot be loaded; empty if it can."""
    try:
        module, leaf = owner_of(model, source.target)
    except AttributeError:
        return "the model has no such module"
    tensor = getattr(module, leaf, None)
    if not isinstance(tensor, Tensor):
        return "the model has no such tensor"
    if isinstance(module, FusedMoe):
        misfit = misfit_of_experts(module, source, leaf)
        if misfit:
            return misfit
    if isinstance(module, StoredLinear) and leaf == "weight" and (misfit := misfit_of_blocks(module, source)):
        return misfit
    return _misfit_of_slice(source, tuple(_as_rows(module, source, tensor).shape), leaf)


def _misfit_of_slice(source: WeightSource, shape: tuple[int, ...], leaf: str) -> str:
    """Return why the row's tensor is not the named slice of a tensor of `shape`."""
    if source.viewed and math.prod(source.viewed) != math.prod(shape):
        return f"it is {list(shape)}, not {list(source.viewed)}"
    shape = source.viewed or shape
    wanted = list(shape)
    if source.part is not None and not is_half(source, leaf) and leaf != _leaf_of(source.part):
        return f"it is not a stack of experts that holds `{source.part}`"
    if source.expert is not None:
        if len(shape) < 2 or source.expert >= shape[0]:
            return f"it is {list(shape)}, the row is of expert {source.expert}"
        wanted = [shape[1] // 2 if is_half(source, leaf) else shape[1], *shape[2:]]
    elif source.span is not None:
        span = source.span
        if span.dim >= len(shape) or _places(source, span).stop > shape[span.dim]:
            return f"it is {list(shape)}, the row fills {span.length} from {span.start} of dimension {span.dim}"
        wanted[span.dim] = span.length
    loaded = list(source.loaded_shape)
    return "" if loaded == wanted else f"it is {list(shape)}, the row gives {loaded} where {wanted} is needed"


def _as_rows(module: nn.Module, source: WeightSource, tensor: Tensor) -> Tensor:
    """Return the target as its row sees it: a matrix of one expert is (out, in), also of a stack of (in, out)."""
    turned = source.expert is not None and tensor.dim() == 3 and has_columns(module)
    return tensor.transpose(1, 2) if turned else tensor


def _leaf_of(part: str) -> str:
    """Return the stock tensor of a part."""
    return part.replace("_bias", "") + "_proj" + ("_bias" if part.endswith("_bias") else "")


def _put(
    model: nn.Module, source: WeightSource, expert: int | None, tensor: Tensor, placement: Mapping[str, str]
) -> None:
    module, leaf = owner_of(model, source.target)
    if isinstance(module, FusedMoe):
        assert expert is not None, f"the row of `{source.target}` names no expert"
        for part, piece in by_part(source, module.form, cast("StockTensor", leaf), tensor):
            module.load_expert(expert, part, piece)
        return
    device = device_of(source.target, placement)
    if expert is None and source.span is None:
        target = cast("Tensor", getattr(module, leaf))
        if target.is_meta:
            assign(module, leaf, tensor.to(device, target.dtype).contiguous())
        else:
            target.detach().copy_(tensor)
        return
    place = _materialised(module, leaf, device)
    place = place.view(source.viewed) if source.viewed else place
    if expert is not None:
        place = _as_rows(module, source, place)[expert]
    if source.span is not None:
        dim = source.span.dim - (expert is not None)
        place = place[(*[slice(None)] * dim, _places(source, source.span))]
    elif expert is not None:
        place = _rows(place, source, leaf)
    place.copy_(tensor)


def _places(source: WeightSource, span: Span) -> slice:
    """Return the indices of a dimension that a row fills."""
    return slice(span.start, span.start + (span.length - 1) * source.stride + 1, source.stride)


def _rows(matrix: Tensor, source: WeightSource, leaf: str) -> Tensor:
    """Return the rows of an expert's slice that a row fills: gate and up share one, gate first."""
    if not is_half(source, leaf):
        return matrix
    gate, up = matrix.chunk(2)
    return gate if source.part == "gate" else up


def _materialised(module: nn.Module, leaf: str, device: torch.device) -> Tensor:
    """Return a tensor that is filled in pieces (experts that no rule rewrote), allocated at its first use."""
    tensor = cast("Tensor", getattr(module, leaf))
    if tensor.is_meta:
        assign(module, leaf, torch.empty_like(tensor, device=device))
    return cast("Tensor", getattr(module, leaf))


def assign(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Put `tensor` in the place of a module's parameter or buffer. A matrix on a CPU moves to huge pages."""
    if tensor.dim() == 2 and tensor.device.type == "cpu":
        collapse(tensor.data_ptr(), tensor.nbytes)
    old = getattr(module, leaf)
    if isinstance(old, nn.Parameter):
        setattr(module, leaf, nn.Parameter(tensor, requires_grad=old.requires_grad))
    else:
        setattr(module, leaf, tensor)


def check_filled(model: nn.Module, *, persistent: bool = False) -> None:
    """Raise `InputRefused` (L408) with every tensor, or every `persistent` one, that is still without a value."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    tensors = state.items() if persistent else [*model.named_parameters(), *model.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    for name, module in named_modules(model):
        if isinstance(module, FusedMoe):
            empty += [f"{name} (expert {expert}, {part})" for expert, part in module.missing()]
        if isinstance(module, StoredLinear) and module.packed is None:
            empty.append(f"{name}.weight")
    _require_filled(empty)


def _require_filled(empty: Sequence[str]) -> None:
    if empty:
        shown = ", ".join(f"`{name}`" for name in empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        hint = "`weights.json` does not belong to this model; compile it again"
        raise InputRefused(Diagnostic("L408", f"nothing in the checkpoint fills {shown}", hint=hint))
