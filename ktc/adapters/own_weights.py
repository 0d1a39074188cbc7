"""The model's own weights, which PEFT changes when it loads some adapters.

PEFT saves the base layer of an adapted embedding with the factors, and with `bias` the biases of the model. Some
initialisations (PiSSA, OLoRA, KaSA) subtract the factors from the weights, whenever they are loaded. In: the tensors of
a file, its config, and a model without it. Out: the model, whose changed weights are recorded until they are put back.
Refused (A603): such a change where the model may not change. It is then as before, also after any other error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ktc.adapters.folder import PREFIX
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.linears.absent_weight import AbsentWeight

# Initialisations of LoRA that do not change the weights, or give them a new storage (pissa), which is noticed anyway.
_NOT_IN_PLACE: Final = ("gaussian", "orthogonal", "eva", "pissa")


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by the names that they have without adapters, also those in another form."""
    parts = cast("Iterable[tuple[str, nn.Module]]", cast("Any", model).named_modules(remove_duplicate=False))
    weights: dict[str, Tensor] = {}
    for prefix, module in parts:
        tensors = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if isinstance(absent := vars(module).get("weight"), AbsentWeight):
            tensors["weight"] = cast("Any", absent)
        weights |= {f"{_plain(prefix)}.{name}".lstrip("."): tensor for name, tensor in tensors.items()}
    return weights


def embeddings(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights of the embedding and the head, which PEFT may save beside an adapter."""
    ends = [cast("Any", model).get_input_embeddings(), cast("Any", model).get_output_embeddings()]
    inner = {id(getattr(end, "base_layer", getattr(end, "original_module", end))) for end in ends}
    parts = cast("Iterable[tuple[str, nn.Module]]", cast("Any", model).named_modules(remove_duplicate=False))
    names = (name for name, module in parts if id(module) in inner)
    return frozenset(f"{_plain(name)}.weight" for name in names)


def _plain(name: str) -> str:
    return f"{name}.".replace(".base_layer.", ".").replace(".original_module.", ".").rstrip(".")


def own_name(name: str, weights: Mapping[str, Tensor]) -> str | None:
    """Return which of the model's `weights` a tensor in a file is by its name, `None` for an adapter's own."""
    plain = name.removeprefix(PREFIX).replace(".base_layer.", ".")
    return plain if plain in weights else None


@dataclass(frozen=True, slots=True)
class _Before:
    """A weight before the load: its storage, and its values where others may be written into the storage."""

    weight: Tensor
    storage: Tensor
    values: Tensor | None

    @property
    def is_changed(self) -> bool:
        moved = self.weight.data_ptr() != self.storage.data_ptr()
        return moved or (self.values is not None and not torch.equal(self.storage, self.values))

    @property
    def original(self) -> Tensor:
        return self.storage if self.values is None else self.values

    def put_back(self) -> None:
        if self.values is not None:
            self.storage.copy_(self.values)
        self.weight.data = self.storage


_CHANGED: Final[WeakKeyDictionary[nn.Module, tuple[_Before, ...]]] = WeakKeyDictionary()


@contextmanager
def unchanged(
    tensors: Iterable[tuple[str, Tensor]],
    model: nn.Module,
    adapter: str,
    *,
    alone: bool,
    config: Mapping[str, Any] | None = None,
) -> Generator[None]:
    """Load an adapter in the context, and keep the weights of `model` as they are.

    An adapter that is `alone` may change biases by its file, and any weight by its initialisation, as it does on the
    stock model; `put_back` undoes that. `config` is that of the adapter. Raise `InputRefused` (A603) for other changes.
    """
    weights = {name: weight for name, weight in own_weights(model).items() if not isinstance(weight, AbsentWeight)}
    written = {name: tensor for key, tensor in tensors if (name := own_name(key, weights)) is not None}
    same_shape = (name for name, tensor in written.items() if tensor.shape == weights[name].shape)  # or PEFT refuses it
    differing = {name for name in same_shape if not has_values(weights[name], written[name])}
    copied = differing | _subtracted_in_place(config or {}, weights)
    before = {
        name: _Before(weight, weight.detach(), weight.detach().clone() if name in copied else None)
        for name, weight in weights.items()
    }
    try:
        yield
    except BaseException:
        _put_back(before.values())
        raise
    changed = {name: weight for name, weight in sorted(before.items()) if weight.is_changed}
    if wrong := [name for name in changed if not alone or (name in differing and not name.endswith(".bias"))]:
        _put_back(before.values())
        raise InputRefused(_changing(adapter, wrong[0], wrong[0] in differing))
    if changed:
        _CHANGED[model] = tuple(changed.values())


def put_back(model: nn.Module) -> None:
    """Undo what adapters that were attached alone have changed in the weights of `model`."""
    _put_back(_CHANGED.pop(model, ()))


@contextmanager
def as_before(model: nn.Module) -> Generator[None]:
    """Give the weights of `model` in the context the values that they had before an adapter changed them."""
    changed = _CHANGED.get(model, ())
    tuned = [before.weight.data for before in changed]
    try:
        for before in changed:
            before.weight.data = before.original
        yield
    finally:
        for before, tensor in zip(changed, tuned, strict=True):
            before.weight.data = tensor


def _subtracted_in_place(config: Mapping[str, Any], weights: Iterable[str]) -> set[str]:
    """Return the weights from which the initialisation of LoRA may subtract without a new storage, as OLoRA does."""
    kind = config.get("init_lora_weights")
    if not isinstance(kind, str) or kind.startswith(_NOT_IN_PLACE):
        return set()
    from peft import PeftConfig
    from peft.tuners import tuners_utils

    is_target = cast("Any", tuners_utils).check_target_module_exists
    targets = config.get("target_modules")
    every = isinstance(targets, str) and targets.lower() == "all-linear"
    known: Any = cast("Any", PeftConfig).from_peft_type(**config)
    return {name for name in weights if every or is_target(known, name.rpartition(".")[0])}


def _changing(adapter: str, weight: str, by_file: bool) -> Diagnostic:
    if by_file and not weight.endswith(".bias"):
        message = f"adapter `{adapter}` has other values of `{weight}` than the model, which it would replace"
        hint = "use the model that the adapter was trained on, or save it with `save_embedding_layers=False`"
        return Diagnostic("A603", message, hint=hint)
    message = f"adapter `{adapter}` changes `{weight}` of the model, which other adapters and requests use too"
    hint = "attach it alone: `ktc generate OUT --adapter FOLDER`, or `ktc serve OUT --adapter FOLDER` without updates"
    return Diagnostic("A603", message, hint=hint)


def has_values(weight: Tensor, stored: Tensor) -> bool:
    """Return whether a weight has the `stored` values, compared in its dtype, to which PEFT converts what it loads."""
    return torch.equal(stored.to(weight.dtype), weight.detach().to(stored.device))


def _put_back(before: Iterable[_Before]) -> None:
    with torch.no_grad():
        for weight in before:
            if weight.is_changed:
                weight.put_back()
