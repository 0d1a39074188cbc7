"""The code of modules, and the values of a config that it reads, by inspection: nothing runs.

In: classes of modules, and the configs that the modules hold. Out: the functions that the classes run, a digest of
their source, and the names of the config's values that these functions mention. A function that does not mention the
attribute with the config reads none of its values, so names are few; a name in another role counts too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from torch import nn
from transformers import PreTrainedConfig

_VARY = frozenset({"dtype", "torch_dtype"})  # a load as reference changes them


def functions_of(module_class: type[nn.Module]) -> Iterator[tuple[type, str, FunctionType]]:
    """Yield the methods and properties that a class defines or inherits below `nn.Module`: owner, name, function."""
    for owner in module_class.__mro__[: module_class.__mro__.index(nn.Module)]:
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                yield owner, name, function


def digest(module_class: type[nn.Module]) -> str:
    """Return the sha256 of the source of all functions that the class runs, its helpers included."""
    reached = _reached(function for _, _, function in functions_of(module_class))
    parts = sorted(f"{function.__qualname__}\n{_source(function)}" for function in reached)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def names_read(classes: Iterable[type[nn.Module]], config: PreTrainedConfig, holders: frozenset[str]) -> frozenset[str]:
    """Return the keys of `config` that the classes read in a call. `holders` are the attributes that hold it."""
    called = (f for module_class in classes for _, name, f in functions_of(module_class) if name != "__init__")
    mentioned = (_names(function.__code__) for function in _reached(called))
    read = frozenset[str]().union(*(names for names in mentioned if names & holders))
    aliases: dict[str, str] = getattr(config, "attribute_map", {})
    read |= {aliases[name] for name in read & aliases.keys()}
    return frozenset(name for name in read & vars(config).keys() - _VARY if not name.startswith("_"))


def _reached(functions: Iterable[FunctionType]) -> list[FunctionType]:
    """Return the functions, those that they wrap or close over, and the helpers of their modules that they mention."""
    waiting, reached = list(functions), dict[int, FunctionType]()
    while waiting:
        function = waiting.pop()
        if id(function) in reached:
            continue
        reached[id(function)] = function
        cells = (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))
        mentioned = (function.__globals__.get(name) for name in _names(function.__code__))
        helpers = (value for value in mentioned if getattr(value, "__module__", None) == function.__module__)
        candidates = (getattr(function, "__wrapped__", None), *cells, *helpers)
        waiting += [value for value in candidates if isinstance(value, FunctionType)]
    return list(reached.values())


def _is_filled(cell: object) -> bool:
    return hasattr(cell, "cell_contents")


def _names(code: CodeType) -> frozenset[str]:
    """Return the names and texts in code, nested functions included: `config.limit` and `getattr(config, "limit")`."""
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset({*code.co_names, *code.co_varnames, *code.co_freevars, *texts}).union(*nested)


def _source(function: FunctionType) -> str:
    try:
        return inspect.getsource(function.__code__)
    except (OSError, TypeError):  # made at run time: its code takes the place of its source
        return repr((function.__code__.co_code, sorted(_names(function.__code__))))
