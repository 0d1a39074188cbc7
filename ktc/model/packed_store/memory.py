"""Whether a loaded model is as large as its plan: bytes of tensors per device, before and after they are read.

In: the model, on meta tensors or loaded, and the bytes that the manifest records. Refused (L413): a device that would
hold, or holds, over 5 % more or less. So memory that was planned for one device and taken on another is reported before
it runs out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.module import FusedMoe
from ktc.model.graph.typed import named_modules
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.manifest.manifest import Manifest
from ktc.model.packed_store.host_table import is_on_host
from ktc.model.packed_store.placement import device_of

ALLOWED = 0.05
_SLACK = 1 << 20  # bytes; ignores a small model's caches of positions


def check_bytes(model: nn.Module, manifest: Manifest, folder: Path, placement: Mapping[str, str]) -> None:
    """Compare the model with the manifest's plan, if it has one. Raises InputRefused (L413)."""
    present, planned = tensor_bytes(model, placement), manifest.memory
    problems: list[Diagnostic] = []
    for device in sorted({*present, *planned} if planned else ()):
        size, wanted = present.get(device, 0), planned.get(device, 0)
        if abs(size - wanted) > max(ALLOWED * wanted, _SLACK):
            message = f"the model's tensors take {in_gib(size)} on `{device}`, its plan says {in_gib(wanted)}"
            hint = f"compile it again: `{manifest.renewal(folder)}`; if that does not help, please report it"
            problems.append(Diagnostic("L413", message, hint=hint))
    if problems:
        raise InputRefused(*problems)


def tensor_bytes(model: nn.Module, placement: Mapping[str, str]) -> dict[str, int]:
    """Return bytes by device of parameters, buffers and packed experts. Meta tensors count at their planned device."""
    totals = Counter[str]()
    for name, tensor in _tensors(model):
        device = device_of(name, placement) if tensor.is_meta else tensor.device
        totals["cpu" if is_on_host(tensor) else str(device)] += tensor.nbytes
    for module in model.modules():
        if isinstance(module, FusedMoe):
            totals["cpu"] += module.weights.nbytes
        if isinstance(module, StoredLinear):
            totals[str(module.device)] += module.packed_bytes
    return totals


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every registered tensor once; the placeholders of packed experts have no storage."""
    packed = tuple(f"{name}." for name, m in named_modules(model) if isinstance(m, FusedMoe) and m.packed_bytes)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not name.startswith(packed):
            yield name, tensor


def in_gib(size: int) -> str:
    """Return a number of bytes in GiB, or in MiB where it is less than one."""
    return f"{size / (1 << 30):,.2f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.1f} MiB"
