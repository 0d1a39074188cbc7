"""Functions without products as one kernel of a GPU each, by `torch.compile`, where the GPU has a compiler for them.

In: a device and a function of tensors. Out: a function with the same results. Without Triton it is the function itself,
step by step, and the log says so once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

import torch

from ktc.model.experts.private_api import floats_as_constants, without_function_modes

log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_on(device: torch.device, function: Callable[_P, _R], *, dynamic: bool = True) -> Callable[_P, _R]:
    """Return `function` compiled for a GPU, for inputs of any length, or `dynamic` off for each; on the CPU, as it is.

    Index expressions of permuted tensors of any length take minutes to compile; those of one length do not.
    """
    return _compiled(function, dynamic, device.index) if device.type == "cuda" and has_compiler() else function


@functools.cache
def has_compiler() -> bool:
    """Return whether `torch.compile` makes kernels for GPUs here."""
    if importlib.util.find_spec("triton") is not None:
        return True
    log.warning("Triton is not installed: experts on a GPU are decoded and activated step by step, which is slower")
    return False


@functools.cache
def _compiled(function: Callable[_P, _R], dynamic: bool, index: int | None) -> Callable[_P, _R]:
    assert isinstance(function, FunctionType), "a closure, not a callable object"
    # torch counts recompilations by code object, which closures of one definition share, and GPUs.
    code = function.__code__.replace(co_firstlineno=function.__code__.co_firstlineno)
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    compiled = torch.compile(cast("Callable[_P, _R]", copied), dynamic=dynamic)

    def on_this_thread(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # A derivative in `function` is traced by autograd, whose thread of another GPU has no frame of the caller:
        # torch.compile 2.11 fails there.
        with torch.autograd.set_multithreading_enabled(False), floats_as_constants(), without_function_modes():
            return compiled(*args, **kwargs)

    return on_this_thread
