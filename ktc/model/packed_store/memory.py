"""Whether a loaded model is as large as its plan said: bytes of tensors per device, before and after they are read.

In: the model, on meta tensors or loaded, and the bytes that the manifest records. Refused (L413): a device that would
hold, or holds, over 5 % more or less. Memory that was planned for one device and taken on another is found here, not
by running out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.module import FusedMoe
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.manifest.manifest import Manifest
from ktc.model.packed_store.placement import device_of

ALLOWED = 0.05
_SLACK = 1 << 20  # bytes; ignores a small model's caches of positions


def check_bytes(model: nn.Module, manifest: Manifest, folder: Path, placement: Mapping[str, str]) -> None:
    """Compares the model with the manifest's plan; says nothing where the manifest has none. Raises L413."""
    found, planned = tensor_bytes(model, placement), manifest.memory
    problems: list[Diagnostic] = []
    for device in sorted({*found, *planned} if planned else ()):
        held, wanted = found.get(device, 0), planned.get(device, 0)
        if abs(held - wanted) > max(ALLOWED * wanted, _SLACK):
            message = f"the model's tensors take {in_gib(held)} on `{device}`, its plan says {in_gib(wanted)}"
            hint = f"compile it again: `{manifest.renewal(folder)}`; if that does not help, please report it"
            problems.append(Diagnostic("L413", message, hint=hint))
    if problems:
        raise InputRefused(*problems)


def tensor_bytes(model: nn.Module, placement: Mapping[str, str]) -> dict[str, int]:
    """Return bytes by device of parameters, buffers and packed experts. Meta tensors count at their planned device."""
    totals: dict[str, int] = {}
    for name, tensor in _tensors(model):
        device = str(device_of(name, placement) if tensor.is_meta else tensor.device)
        totals[device] = totals.get(device, 0) + tensor.numel() * tensor.element_size()
    for module in model.modules():
        if isinstance(module, FusedMoe | StoredLinear):
            totals["cpu"] = totals.get("cpu", 0) + (
                module.weights.nbytes if isinstance(module, FusedMoe) else module.packed_bytes
            )
    return totals


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every registered tensor once; the placeholders of packed experts have no storage."""
    packed = {f"{name}." for name, m in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()) if _packs(m)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not any(name.startswith(stem) for stem in packed):
            yield name, tensor


def _packs(module: nn.Module) -> bool:
    return isinstance(module, FusedMoe) and module.packed_bytes > 0


def in_gib(size: int) -> str:
    """Return a number of bytes in GiB, or in MiB where it is less than one."""
    return f"{size / (1 << 30):,.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.1f} MiB"
