"""Every private name of torch that ktc uses outside of training and capture.

`tests/model/experts/test_private_api.py` checks each name with the oldest and the newest release (`make versions`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map, tree_map_only

from ktc.foundation.temporary_values import attributes

# torch has no public module of nested containers, and no public base of modes that receive each operation
__all__ = ["TorchDispatchMode", "pytree", "tree_iter", "tree_map", "tree_map_only"]

_Module = nn.Module if TYPE_CHECKING else object
Of = TypeVar("Of", bound=Tensor)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of a module with the functions that are called with it."""


def schema_of(operator: Any) -> Any:
    """Return the names of an operator's arguments, and which of them it changes; None for another function."""
    return getattr(operator, "_schema", None)


def version_of(tensor: Tensor) -> int:
    """Return a number that every write into a tensor or a view of it changes. Raises for an inference tensor."""
    return tensor._version


def wrapper_tensor(
    of: type[Of], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **layout: Any
) -> Any:
    """Return a tensor without memory that has this shape for PyTorch, in which `of` keeps others.

    `layout` are strides and the offset in the storage.
    """
    return Tensor._make_wrapper_subclass(of, shape, dtype=dtype, device=device, **layout)


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that no checkpoint has."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]


class LoadHooks(_Module):
    """A base before a module class: methods that run before and after its own entries of a state dict are loaded."""

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.before_load(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.after_load(state_dict, prefix)

    def before_load(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Check the entries that begin with `prefix`."""

    def after_load(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Change the loaded tensors."""


class ConversionHook(_Module):
    """A base before a module class: a method that runs where `to`, `float` and the like convert its tensors."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(fn, recurse) if self.converts(fn) else self

    def converts(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Return whether the registered tensors of the module are converted by `fn`."""
        return True


def floats_as_constants() -> AbstractContextManager[None]:
    """Compile code inside the context with the floats of its modules as constants: epsilons, scales, LoRA's scaling.

    By default they are inputs, as tensors on the CPU. Then each call makes and reads them, and the code for a GPU has a
    kernel for the CPU, for which torch tries each of the CPU's instruction sets: 50 of 80 seconds of a first step.
    The setting's own `patch` makes a class for each call.
    """
    return attributes(cast("Any", torch)._dynamo.config, specialize_float=True)


@contextmanager
def without_function_modes() -> Generator[None]:
    """Call functions in the block as if no context of `torch.overrides` were entered around it.

    A compiled function belongs to the contexts in which it was compiled. In others it is compiled again: within the
    capture of a CUDA graph, which holds nothing of what a compiler does.
    """
    private = cast("Any", torch)._C
    modes = [private._pop_torch_function_stack() for _ in range(private._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            private._push_on_torch_function_stack(mode)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended, before `backward` returns to its caller.

    Public hooks belong to tensors and nodes; none is called after all of a graph.
    """
    cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(call)
