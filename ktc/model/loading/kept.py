"""Single experts that GPUs keep for the decoding steps of a loaded model, and the counts that they begin with.

In: a model whose plan gives its layers places on a device, loaded. Out: the tables are filled, and the layers' steps
read them. `begin_with` places the experts by a file of counts, `add_counts` adds those of this run to it.
Refused: a file of another kind, or of another model (L457), and counts of a model that keeps no experts (L458).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from ktc.diagnostics import Diagnostic, InputRefused, render
from ktc.foundation.decode import Undecodable, decode, read_json
from ktc.foundation.files import refusing, write_file
from ktc.foundation.regular_files import read_regular
from ktc.model.experts.backends.backend import Kept
from ktc.model.experts.kept.kept_experts import KeptExperts, can_keep
from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.products.coded_check import check_addressed
from ktc.model.kernels.form import ExpertsForm

log = logging.getLogger(__name__)

SCHEMA: Final = 1
_WRAPPED: Final = "base_layer"  # the name that PEFT gives a module within an adapter's
_MOST: Final = 2**53  # of a count
_HINT: Final = "name a file that `--expert-counts` of this model wrote, or one that does not exist yet"


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """A file of counts: how often each expert was chosen, by layer, in steps of the model with this config."""

    schema: int
    config_sha256: str
    layers: Mapping[str, tuple[int, ...]]


def keep_experts(model: nn.Module) -> None:
    """Send the experts that devices keep, and let steps read them. Warn (L456) where a device cannot multiply them.

    Raises HostLacks (H247) where it multiplies them wrongly.
    """
    by_device: dict[torch.device, list[FusedMoe]] = {}
    for module in model.modules():
        if isinstance(module, FusedMoe) and module.offload is not None and module.offload.kept is not None:
            by_device.setdefault(module.offload.devices[0], []).append(module)
    for device, modules in by_device.items():
        layers = [(module.weights.packed, module.form) for module in modules]
        if not all(packed is not None and can_keep(packed, device) for packed, _ in layers):
            _tell_unkept(device)
            continue
        if device.type == "cuda":
            for panels in {panels for packed, _ in layers if packed is not None for panels in packed.panels}:
                check_addressed(panels, device)
        settings = [cast("Kept", module.offload.kept) for module in modules if module.offload is not None]
        store = KeptExperts(
            cast("list[tuple[PackedExperts, ExpertsForm]]", layers), device, sum(kept.places for kept in settings),
            share=settings[0].share, fixed=settings[0].fixed,
        )  # fmt: skip
        for module, layer in zip(modules, store.layers, strict=True):
            module.kept = layer


def _tell_unkept(device: torch.device) -> None:
    message = f"no experts stay on `{device}` for decoding: it cannot multiply them as they are stored"
    hint = "see `ktc explain L456`"
    log.warning("%s", render([Diagnostic("L456", message, hint=hint, severity="warning")]))


def kept_layers(model: nn.Module) -> dict[str, FusedMoe]:
    """Return the modules of which devices keep experts, by their names without adapters."""
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    kept = ((name, module) for name, module in modules if isinstance(module, FusedMoe) and module.kept is not None)
    return {".".join(part for part in name.split(".") if part != _WRAPPED): module for name, module in kept}


def kept_stores(model: nn.Module) -> tuple[KeptExperts, ...]:
    """Return the stores of a model's kept experts, one for each device."""
    return tuple(dict.fromkeys(m.kept.store for m in kept_layers(model).values() if m.kept is not None))


def begin_with(model: nn.Module, path: Path) -> None:
    """Place experts by the counts of a file, if it exists. Raises InputRefused (L457, L458).

    Warn (L458) where no device has a place for an expert: counts are written all the same.
    """
    compiled = _compiled(model)
    if not kept_layers(compiled):
        message = "`--expert-counts` has no effect: decoding steps split no experts between a GPU and the CPU"
        hint = "give the program experts with `place(cpu, prefill = cuda:0)` and CUDA graphs; see `ktc explain L458`"
        raise InputRefused(Diagnostic("L458", message, hint=hint))
    if not any(store.num_places for store in kept_stores(compiled)):
        message = "`--expert-counts` places no experts: no GPU has room for one; the counts of this run are written"
        hint = "give the GPU a budget, as `plan { cuda:0 = 12GiB }`; see `ktc explain L458`"
        log.warning("%s", render([Diagnostic("L458", message, hint=hint, severity="warning")]))
    counts = _counts_before(compiled, path)
    if not counts:
        return
    for store in kept_stores(compiled):
        rows = torch.zeros(store.table.shape)
        for name, module in kept_layers(compiled).items():
            if module.kept is not None and module.kept.store is store:
                rows[module.kept.number, : module.num_experts] = torch.tensor(counts[name]).float()
        store.place(rows)


def add_counts(model: nn.Module, path: Path) -> None:
    """Add the counts of this run to those of a file. Raises InputRefused (L457, U003), or HostLacks."""
    compiled = _compiled(model)
    before, layers = _counts_before(compiled, path), dict[str, tuple[int, ...]]()
    for name, module in kept_layers(compiled).items():
        assert module.kept is not None, "one of the layers above"
        new = cast("list[int]", module.kept.counts.tolist())
        old = before.get(name, (0,) * module.num_experts)
        layers[name] = tuple(min(one + other, _MOST) for one, other in zip(new, old, strict=True))
    written = asdict(ExpertCounts(SCHEMA, _config_of(compiled), layers))
    with refusing(path):
        write_file(path, json.dumps(written, indent=1) + "\n")


def _counts_before(model: nn.Module, path: Path) -> Mapping[str, tuple[int, ...]]:
    return read_counts(path, _config_of(model), model).layers if path.exists() else {}


def _compiled(model: nn.Module) -> nn.Module:
    """Return the compiled model itself, of a `PeftModel` too."""
    unwrapped: Any = getattr(model, "get_base_model", None)
    return model if unwrapped is None else unwrapped()


def read_counts(path: Path, config_sha256: str, model: nn.Module) -> ExpertCounts:
    """Read a file of counts of this model. Raises InputRefused (L457)."""
    try:
        counts = decode(read_json(read_regular(path)), ExpertCounts)
    except (OSError, ValueError, Undecodable) as error:
        raise _refused(path, f"is not a file of counts: {error}") from error
    if counts.schema != SCHEMA:
        raise _refused(path, f"has schema {counts.schema} at `.schema`; this version reads {SCHEMA}")
    if counts.config_sha256 != config_sha256:
        raise _refused(path, "is of a model with another config (`.config_sha256`)")
    for name, module in kept_layers(model).items():
        of_layer = counts.layers.get(name)
        if of_layer is None or len(of_layer) != module.num_experts or min(of_layer) < 0:
            wanted = f"{module.num_experts} numbers that are not negative"
            raise _refused(path, f"lacks {wanted} at `.layers[{json.dumps(name)}]`")
        if max(of_layer) > _MOST:
            raise _refused(path, f"has a count above 2**53 at `.layers[{json.dumps(name)}][{_greatest(of_layer)}]`")
    return counts


def _greatest(counts: tuple[int, ...]) -> int:
    return counts.index(max(counts))


def _config_of(model: nn.Module) -> str:
    return str(cast("Any", model).loaded_from.manifest.model.config_sha256)


def _refused(path: Path, what: str) -> InputRefused:
    return InputRefused(Diagnostic("L457", f"`{path}` {what}", hint=_HINT))
