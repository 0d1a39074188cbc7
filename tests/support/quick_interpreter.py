"""Triton's interpreter with `triton.language` replaced once, and not for every kernel and every function that it calls.

The interpreter replaces the functions of the language when a kernel starts and puts them back when it ends. At each
call within the kernel it searches the language for functions that are not yet replaced. In the tests of GPU kernels
that took a quarter of the time. Here they stay replaced: with `TRITON_INTERPRET=1` nothing else uses them.
"""

from __future__ import annotations

import functools
import sys
from types import FunctionType, ModuleType
from typing import Any

_REPLACED: set[str] = set()  # the modules of `triton.language` whose functions are replaced


def use() -> None:
    """Let kernels leave `triton.language` as the first one replaced it, once the interpreter is imported.

    A release of Triton that puts nothing back stays as it is.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is not None and not isinstance(interpreter._patch_lang, functools.partial):
        interpreter._patch_lang = functools.partial(_replaced_once, interpreter._patch_lang, scope)


def _replaced_once(replace: Any, nothing: Any, function: FunctionType) -> Any:
    """Return what puts nothing back."""
    modules = _languages(function)
    if not modules or not modules <= _REPLACED:  # without a language Triton refuses the function
        replace(function)
        _REPLACED.update(modules)
    return nothing()


@functools.cache
def _languages(function: FunctionType) -> frozenset[str]:
    modules = (value for value in function.__globals__.values() if isinstance(value, ModuleType))
    return frozenset(module.__name__ for module in modules if module.__name__.startswith("triton.language"))
