"""Whether PEFT loaded the whole of an adapter, by its own report of the load and by the values in the model.

In: the tensors of the file, and the model that they were loaded on. Out: the loss, in words, "" for none. PEFT alone
knows the names of an adapter's tensors, and it may convert them while it loads (experts one by one to stacks).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import peft
from torch import Tensor, nn

from ktc.adapters.own_weights import embeddings, has_values, own_name, own_weights
from ktc.diagnostics import listing
from ktc.model.linears.absent_weight import AbsentWeight

_peft = cast("Any", peft)  # its types are partly unknown
Read = Callable[[], Iterator[tuple[str, Tensor]]]


def find_loss(read: Read, attached: nn.Module, adapter_name: str) -> str:
    """Describe the tensors of those that `read` yields that the model has not; "" if it has all.

    A file of the names that PEFT would save is compared by value, and so are the model's own weights in it. Otherwise
    PEFT's report of the load has the names that it did not expect and that it missed. Converted tensors have the same
    sum of squares, since a conversion permutes values and adds zeros.
    """
    loaded: dict[str, Tensor] = _peft.get_peft_model_state_dict(
        attached, adapter_name=adapter_name, save_embedding_layers=False
    )
    model: nn.Module = cast("Any", attached).get_base_model()
    base, ends = own_weights(model), embeddings(model)
    others: set[str] = set()
    own_names: set[str] = set()
    for name, tensor in read():
        if name not in loaded:
            (own_names if _is_own(name, tensor, base, ends) else others).add(name)
        elif not has_values(loaded[name], tensor):
            return f"`{name}` has other values in the model than in the file"
    absent = loaded.keys() - {name for name, _ in read()}
    if not others and not absent:
        return ""
    converted = (loaded[name] for name in absent)
    return _reported(read, attached, adapter_name, own_names) or _unconserved(read, others, converted)


def _is_own(name: str, tensor: Tensor, base: Mapping[str, Tensor], ends: frozenset[str]) -> bool:
    """Return whether a tensor of the file is a weight that the model has without the adapter.

    PEFT saves such a weight of an embedding or a head. Its values are unknown where the model has it in another form.
    """
    plain = own_name(name, base)
    if plain is None:
        return False
    if isinstance(base[plain], AbsentWeight):
        return ".base_layer." in name or plain in ends
    return has_values(base[plain], tensor)


def _reported(read: Read, attached: nn.Module, adapter_name: str, own_names: set[str]) -> str:
    """Return PEFT's report of loading the same tensors again."""
    tensors = dict(read())
    result = _peft.set_peft_model_state_dict(attached, tensors, adapter_name=adapter_name)
    unexpected = sorted(set(cast("list[str]", result.unexpected_keys)) - own_names)
    if unexpected:
        return f"peft left out {listing(unexpected, 2)}"
    missing = sorted(name for name in cast("list[str]", result.missing_keys) if f".{adapter_name}." in f"{name}.")
    return f"the file lacks {listing(missing, 2)}, which its config names" if missing else ""


def _unconserved(read: Read, names: set[str], loaded: Iterable[Tensor]) -> str:
    wanted = _squares(tensor for name, tensor in read() if name in names)
    if math.isclose(_squares(loaded), wanted, rel_tol=1e-3, abs_tol=1e-12):
        return ""
    return f"the values of {listing(sorted(names), 2)} are not those in the model"


def _squares(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.detach().double().square().sum()) for tensor in tensors)
