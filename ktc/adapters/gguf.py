"""LoRA adapters as GGUF files, which llama.cpp loads beside a model.

In: factors. Out: a file; and back. Tensors have the `gguf` package's names with `.lora_a` (r, in) and `.lora_b`
(out, r), experts stacked first. q and k of `llama` are permuted as in the model's converter. One alpha holds for all
weights, so other scalings go into B. Refused: an unknown architecture, a weight without a GGUF name, and the latent
keys and values of `deepseek2`, to which llama.cpp applies no adapter (A606); an invalid file (A602).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ktc.adapters.base_model import BaseModel, Target
from ktc.adapters.factors import Factors, halves, joined
from ktc.adapters.save import EXPORT, WRITTEN_BY
from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, listing
from ktc.foundation import versions
from ktc.model.checkpoint.adapter_uses import no_architecture, no_gguf_adapter
from ktc.model.checkpoint.gguf_architectures import ARCHITECTURES, gguf_architecture, gguf_name_of, without_gguf_name

_TYPE, _KIND, _ALPHA, _ARCHITECTURE = "general.type", "adapter.type", "adapter.lora.alpha", "general.architecture"


def write_gguf(
    factors: Sequence[Factors], base: BaseModel, path: Path, merged_hint: str = "", layout_hint: str = ""
) -> int:
    """Write the adapter to `path` and return its number of tensors.

    The hints say how an adapter without a place in a GGUF file is used: merged into its model, or in another layout.

    Raises:
        InputRefused: A606 for an architecture or a weight without a place in GGUF files.
    """
    gguf = require_gguf()
    architecture = architecture_of(base, layout_hint)
    targets = [weight.target for weight in factors if not weight.target.experts]
    if faults := tuple(_faults(targets, base, architecture, merged_hint, layout_hint)):
        raise InputRefused(*faults)
    name_of = gguf_name_of(architecture, base.config.get_text_config().num_hidden_layers)
    names = {weight.target.name: tuple(_named(weight.target, base, architecture, name_of)) for weight in factors}
    alpha = factors[0].scaling * factors[0].r
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(_KIND, "lora")
    writer.add_float32(_ALPHA, alpha)
    writer.add_string(WRITTEN_BY, EXPORT)
    count = 0
    for weight in factors:
        bs: dict[str, Tensor] = {}
        if weight.target.is_gate_up:
            bs["gate"], bs["up"] = halves(weight)
        for name, part, heads in names[weight.target.name]:
            b = bs.get(part, weight.b).float() * (weight.scaling * weight.r / alpha)
            for side, tensor in (("lora_a", weight.a.float()), ("lora_b", _by_pairs(b, heads))):
                writer.add_tensor(f"{name}.{side}", tensor.contiguous().numpy())
                count += 1
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return count


def read_gguf_adapter(path: Path, base: BaseModel) -> tuple[Factors, ...]:
    """Return the factors in the file, for the weights of the model `base`. Raise `InputRefused` (A602, A603, A606)."""
    gguf = require_gguf()
    try:
        file = gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise InputRefused(_broken(path, f"it cannot be read: {error}")) from error
    settings = {
        name: file.fields[name].contents() for name in (_TYPE, _KIND, _ALPHA, _ARCHITECTURE) if name in file.fields
    }
    if (settings.get(_TYPE), settings.get(_KIND)) != ("adapter", "lora"):
        raise InputRefused(_broken(path, "it is not a LoRA adapter"))
    architecture = architecture_of(base)
    if settings.get(_ARCHITECTURE) != architecture:
        message = f"`{path.name}` is of architecture `{settings.get(_ARCHITECTURE)}`, `{base.name}` of `{architecture}`"
        raise InputRefused(Diagnostic("A603", message, hint="use the model that the adapter was trained on"))
    tensors = {str(tensor.name): torch.from_numpy(tensor.data.copy()) for tensor in file.tensors}
    factors = tuple(_take_factors(tensors, base, architecture, float(settings.get(_ALPHA) or 0.0)))
    if tensors:
        message = f"`{path.name}` has tensors that no weight of `{base.name}` takes: {listing(tensors, 3)}"
        raise InputRefused(Diagnostic("A603", message, hint="use the model that the adapter was trained on"))
    return factors


def _take_factors(tensors: dict[str, Tensor], base: BaseModel, architecture: str, alpha: float) -> Iterator[Factors]:
    """Yield the factors of the model's weights, and remove them from `tensors`."""
    name_of = gguf_name_of(architecture, base.config.get_text_config().num_hidden_layers)
    for target in base.targets.values():
        if not target.experts and name_of(target.name) is None:
            continue
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, part, heads in _named(target, base, architecture, name_of):
            keys = (f"{name}.lora_a", f"{name}.lora_b")
            if all(key in tensors for key in keys):
                a, b = (tensors.pop(key) for key in keys)
                pairs[part] = (a, _by_halves(b, heads))
        if not pairs:
            continue
        a, b = next(iter(pairs.values()))
        scaling = alpha / a.shape[-2] if alpha else 1.0
        if target.is_gate_up:
            zeros = (torch.zeros_like(a), torch.zeros_like(b))
            yield joined(target, pairs.get("gate", zeros), pairs.get("up", zeros), scaling)
        else:
            yield Factors(target, a, b, scaling)


def _faults(
    targets: Sequence[Target], base: BaseModel, architecture: str, merged_hint: str, layout_hint: str
) -> Iterator[Diagnostic]:
    """Yield one finding (A606) for each reason why weights of layers have no place in the file."""
    layers = base.config.get_text_config().num_hidden_layers
    unnamed = without_gguf_name(architecture, layers, [target.name for target in targets])
    names_by_reason: dict[tuple[str, str], list[str]] = {}
    for target in targets:
        if why := no_gguf_adapter(architecture, target.module):
            reason = f"cannot go into a GGUF adapter: {why}"
            names_by_reason.setdefault((reason, merged_hint), []).append(target.module)
        elif target.name in unnamed:
            reason = f"has no name in GGUF files of `{architecture}`"
            names_by_reason.setdefault((reason, layout_hint), []).append(target.name)
    for (why, hint), names in names_by_reason.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Diagnostic("A606", f"`{names[0]}`{more} {why}", hint=hint)


def _named(
    target: Target, base: BaseModel, architecture: str, name_of: Callable[[str], str | None]
) -> Iterator[tuple[str, str, int]]:
    """Yield the tensors of a weight in the file: name, part of stacked experts, and heads whose rows are in pairs."""
    if not target.experts:
        yield str(name_of(target.name)), "", heads_by_pairs(target.leaf, base, architecture)
        return
    layer = next(part for part in target.name.split(".") if part.isdigit())
    for part in ("gate", "up") if target.is_gate_up else (target.leaf.removesuffix("_proj"),):
        yield f"blk.{layer}.ffn_{part}_exps.weight", part, 0


def heads_by_pairs(leaf: str, base: BaseModel, architecture: str) -> int:
    """Return the heads of a layer whose rows files of `architecture` order by pairs, 0 for other layers."""
    if architecture != "llama" or leaf not in ("q_proj", "k_proj"):
        return 0
    return int(base.config.num_attention_heads if leaf == "q_proj" else base.config.num_key_value_heads)


def _by_pairs(b: Tensor, heads: int) -> Tensor:
    """Take the rows of each head's first and second half in turns, as the file's rotary embedding pairs them."""
    return b if not heads else b.reshape(heads, 2, -1, b.shape[1]).transpose(1, 2).reshape(b.shape)


def _by_halves(b: Tensor, heads: int) -> Tensor:
    """Undo `_by_pairs`."""
    return b if not heads else b.reshape(heads, -1, 2, b.shape[1]).transpose(1, 2).reshape(b.shape)


def architecture_of(base: BaseModel, hint: str = "") -> str:
    """Return the GGUF architecture of the model. Raises InputRefused (A606), with the `hint` or the known models."""
    if architecture := gguf_architecture(base.model_type):
        return architecture
    kinds = sorted({kind for kinds in ARCHITECTURES.values() for kind in kinds})
    raise InputRefused(Diagnostic("A606", no_architecture(base.model_type), hint=hint or f"known are {listing(kinds)}"))


def _broken(path: Path, what: str) -> Diagnostic:
    return Diagnostic("A602", f"GGUF adapter `{path}` is damaged or half written: {what}", hint="export it again")


def require_gguf() -> Any:
    """Return the package `gguf`. Raises HostLacks (H230)."""
    if versions.installed("gguf") is None:
        message = "GGUF files are written with the package `gguf`, which is not installed"
        raise HostLacks(Diagnostic("H230", message, hint="`pip install 'ktc[gguf]'`"))
    import gguf

    return cast("Any", gguf)
