"""The model's own weights in the file of an adapter, which PEFT writes over those of the model when it loads them.

PEFT saves the base layer of an adapted embedding with the factors, and with `bias` the biases of the model. In: the
tensors of a file, and a model without it. Refused (A603): other values than the model has, where the model may not
change. It is then as before, also after any other error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.linears.absent_weight import AbsentWeight

_PREFIX = "base_model.model."


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by the names that they have without adapters, also those held in another form."""
    parts = cast("Iterable[tuple[str, nn.Module]]", cast("Any", model).named_modules(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    for prefix, module in parts:
        held = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if isinstance(absent := vars(module).get("weight"), AbsentWeight):
            held["weight"] = cast("Any", absent)
        place = f"{prefix}.".replace(".base_layer.", ".").replace(".original_module.", ".")
        found |= {f"{place}{name}".lstrip("."): tensor for name, tensor in held.items()}
    return found


def own_name(name: str, weights: Mapping[str, Tensor]) -> str | None:
    """Return which of the model's `weights` a tensor in a file is by its name, `None` for an adapter's own."""
    plain = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
    return plain if plain in weights else None


@contextmanager
def unchanged(
    tensors: Iterable[tuple[str, Tensor]], model: nn.Module, whose: str, *, biases: bool = False
) -> Generator[None]:
    """Load an adapter in the context, and put the weights of `model` back that it changes; `biases` may change.

    Raise `InputRefused` (A603) if it changed some.
    """
    weights = own_weights(model)
    before = {
        name: (weights[name], weights[name].detach().clone())
        for key, tensor in tensors
        if (name := own_name(key, weights)) is not None and _differs(tensor, weights[name])
    }
    try:
        yield
    except BaseException:
        _put_back(before)
        raise
    changed = {name: each for name, each in before.items() if not torch.equal(each[0].detach(), each[1])}
    if wrong := [name for name in changed if not (biases and name.endswith(".bias"))]:
        _put_back(changed)
        message = f"adapter `{whose}` holds other values of `{wrong[0]}` than the model, which it would replace"
        hint = "use the model that the adapter was trained on, or save it with `save_embedding_layers=False`"
        if wrong[0].endswith(".bias"):
            hint = "an adapter that trains the model's biases is attached alone: `ktc generate --adapter`"
        raise InputRefused(Diagnostic("A603", message, hint=hint))


def _differs(tensor: Tensor, held: Tensor) -> bool:
    if isinstance(held, AbsentWeight) or tensor.shape != held.shape:
        return False  # PEFT leaves it out, or refuses it
    return not torch.equal(tensor.to(held.dtype), held.detach().to(tensor.device))


def _put_back(before: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for held, values in before.values():
            held.copy_(values)
