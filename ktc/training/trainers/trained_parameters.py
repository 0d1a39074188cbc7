"""The parameters of a model in training, without a walk through its modules in each step.

In: a model with an adapter, and the optimizer. Out: what can have a gradient, in the order of `model.parameters()`. A
parameter may start or stop training in a run: callbacks freeze layers and add adapters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

from peft import PeftModel
from torch import nn
from torch.nn import Parameter

from ktc.model.hf.patching import Patch


class TrainedParameters:
    """All parameters of a model, frozen ones included.

    They are read again where PEFT has other adapters, or the optimizer has a parameter that was not there.
    """

    def __init__(self, model: PeftModel) -> None:
        self._model = model
        self._all: dict[int, Parameter] = {}
        self._adapters: tuple[str, ...] = ()
        self._outside: dict[int, Parameter] = {}  # of the optimizer, and not of the model

    def all(self, optimizer: Any) -> Iterable[Parameter]:
        """Return all parameters of the model; `optimizer` is None before there is one."""
        of_optimizer = parameters_of(optimizer)
        adapters = tuple(cast("Mapping[str, object]", self._model.peft_config))
        known = all(key in self._all or key in self._outside for key in of_optimizer)
        if not known or adapters != self._adapters:
            self._all = {id(parameter): parameter for parameter in self._model.parameters()}
            self._adapters = adapters
            self._outside = {key: value for key, value in of_optimizer.items() if key not in self._all}
        return self._all.values()

    def trained(self, optimizer: Any) -> list[Parameter]:
        """Return the parameters that have a gradient, or receive one in backward."""
        return [value for value in self.all(optimizer) if value.requires_grad or value.grad is not None]

    def clear(self, optimizer: Any) -> None:
        """Do what `nn.Module.zero_grad` does to all parameters."""
        for parameter in self.all(optimizer):
            if parameter.grad is not None:
                parameter.grad = None


def parameters_of(optimizer: Any) -> dict[int, Parameter]:
    """Return the parameters of an optimizer by their `id`."""
    groups: Iterable[Mapping[str, Any]] = getattr(optimizer, "param_groups", ())
    return {id(parameter): parameter for group in groups for parameter in group["params"]}


_CLEARED: Final[weakref.WeakKeyDictionary[nn.Module, Callable[[], bool]]] = weakref.WeakKeyDictionary()


class _ClearedBy(Patch):
    """Copies and pickles of the model are without it: theirs are other parameters."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        clear = _CLEARED.get(cast("nn.Module", self))
        if not set_to_none or clear is None or not clear():
            cast("Any", super()).zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: Any) -> Any:
        make, (stock, patches), *state = super().__reduce_ex__(protocol)
        return (make, (stock, tuple(patch for patch in patches if patch is not _ClearedBy)), *state)


@contextmanager
def cleared_by(model: nn.Module, clear: Callable[[], bool]) -> Generator[None]:
    """Send `model.zero_grad()` to `clear`; where it returns False, and for copies, the stock method runs."""
    before = _CLEARED.get(model)
    _ClearedBy.put_on(model)
    _CLEARED[model] = clear
    try:
        yield
    finally:
        if before is None:
            del _CLEARED[model]
            _ClearedBy.remove_from(model)
        else:
            _CLEARED[model] = before
