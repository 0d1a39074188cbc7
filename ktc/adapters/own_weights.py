"""The model's own weights, which PEFT changes when it loads some adapters.

PEFT saves the base layer of an adapted embedding with the factors, and with `bias` the biases of the model. Some
initialisations (PiSSA, OLoRA, KaSA) subtract the factors from the weights, whenever they are loaded. In: the tensors of
a file, and a model without it. Refused (A603): such a change where the model may not change. It is then as before, also
after any other error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class _Before:
    """A weight before the load: its storage, and its values if the file may write others into it."""

    weight: Tensor
    storage: Tensor
    values: Tensor | None

    @property
    def is_changed(self) -> bool:
        moved = self.weight.data_ptr() != self.storage.data_ptr()
        return moved or (self.values is not None and not torch.equal(self.storage, self.values))

    def put_back(self) -> None:
        if self.values is not None:
            self.storage.copy_(self.values)
        self.weight.data = self.storage


@contextmanager
def unchanged(
    tensors: Iterable[tuple[str, Tensor]], model: nn.Module, whose: str, *, alone: bool = False
) -> Generator[None]:
    """Load an adapter in the context, and put the weights of `model` back that it changes.

    One that is `alone` may change biases by its file, and any weight by its initialisation, as it does on the stock
    model. Raise `InputRefused` (A603) for other changes.
    """
    weights = {name: each for name, each in own_weights(model).items() if not isinstance(each, AbsentWeight)}
    written = {name: tensor for key, tensor in tensors if (name := own_name(key, weights)) is not None}
    differing = {name for name, tensor in written.items() if _differs(tensor, weights[name])}
    before = {
        name: _Before(held, held.detach(), held.detach().clone() if name in differing else None)
        for name, held in weights.items()
    }
    try:
        yield
    except BaseException:
        _put_back(before)
        raise
    changed = sorted(name for name, each in before.items() if each.is_changed)
    if wrong := [name for name in changed if not alone or (name in differing and not name.endswith(".bias"))]:
        _put_back(before)
        raise InputRefused(_changing(whose, wrong[0], wrong[0] in differing))


def _changing(whose: str, weight: str, by_file: bool) -> Diagnostic:
    if by_file and not weight.endswith(".bias"):
        message = f"adapter `{whose}` holds other values of `{weight}` than the model, which it would replace"
        hint = "use the model that the adapter was trained on, or save it with `save_embedding_layers=False`"
        return Diagnostic("A603", message, hint=hint)
    message = f"adapter `{whose}` changes `{weight}` of the model, which other adapters and requests use too"
    return Diagnostic("A603", message, hint="attach it alone: `ktc generate OUT --adapter FOLDER`")


def _differs(tensor: Tensor, held: Tensor) -> bool:
    if tensor.shape != held.shape:
        return False  # PEFT refuses it
    return not torch.equal(tensor.to(held.dtype), held.detach().to(tensor.device))


def _put_back(before: Mapping[str, _Before]) -> None:
    with torch.no_grad():
        for each in before.values():
            if each.is_changed:
                each.put_back()
