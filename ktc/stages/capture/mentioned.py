"""The names that a model's code mentions, attributes that its modules lack, and mutable values outside of modules.

In: code that runs inside `Mentions`. Names are read from the code objects that ran, including branches that were not
taken, and from the functions that they called. Code of torch, Python, transformers' configs and ktc is not read.
"""

from __future__ import annotations

import argparse
import dis
import enum
import inspect
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import (
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any, cast

import huggingface_hub
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import configuration_utils

from ktc.foundation.temporary_values import attributes

_PYTHON, _PACKAGES = (sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "purelib"))
_NOT_OF_MODELS = (
    *(str(Path(str(library.__file__)).parent) + os.sep for library in (torch, huggingface_hub)),
    # Every read of a setting runs these two.
    str(configuration_utils.__file__),
    str(Path(configuration_utils.__file__).parent / "integrations" / "heterogeneity") + os.sep,
    *(str(Path(__file__).parents[2]) + os.sep, "<frozen"),
)
_LIBRARIES = ("torch", "transformers", "logging", "re")  # objects of their classes are no flags
_GLOBAL = re.compile(r"^[ \t]+global[ \t]+([\w, \t]+)$", re.MULTILINE)
_STORED = re.compile(r"^[ \t]+([A-Za-z_]\w*)\.(\w+)[ \t]*(?:[-+*/|&]|//)?=(?!=)", re.MULTILINE)


class Mentions:
    """Collects inside: `names`, attributes that are `missing` on their module, and values `outside` that may change.

    An author may import a function by another name, or keep it as an attribute: it counts by its own name.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.missing: dict[str, None] = {}
        self.outside: dict[str, None] = {}
        self._of_a_model: dict[str, bool] = {}  # by file
        self._read: dict[int, CodeType] = {}  # an id is unique only as long as its code lives

    @contextmanager
    def collected(self) -> Generator[None]:
        """Collect inside the context. `TorchCallsIgnored` leaves out torch's functions, which cause most events."""
        before = sys.getprofile()
        with _missing_attributes(self.missing):
            sys.setprofile(self._event)
            try:
                yield
            finally:
                _profile_again(before)

    def _event(self, frame: FrameType, kind: str, called: Any) -> None:
        code, of_a_model = frame.f_code, self._of_a_model
        file = code.co_filename
        if file not in of_a_model:
            of_a_model[file] = is_of_a_model(file)
        if of_a_model[file]:
            if id(code) not in self._read:
                self._read[id(code)] = code
                self._read_frame(frame)
            if kind == "c_call":
                self.names.add(str(called.__name__))
        elif kind == "call" and frame.f_back is not None and of_a_model.get(frame.f_back.f_code.co_filename):
            self.names.add(code.co_name)

    def _read_frame(self, frame: FrameType) -> None:
        """Add the names in the code of a frame, those that its globals have themselves, and its values outside."""
        code, names = frame.f_code, names_of(frame.f_code)
        enclosing = {name: frame.f_locals.get(name) for name in code.co_freevars}
        known = {name: frame.f_globals[name] for name in names if name in frame.f_globals} | enclosing
        self.names |= names
        for value in known.values():
            self.names |= set(own_names(value))
        self.outside |= {name: None for name, value in enclosing.items() if _may_change(value)}
        for name, attribute in _loaded(code):
            if name in frame.f_globals and _changes(frame.f_globals, code.co_filename, name, attribute):
                self.outside[name] = None


def _profile_again(profiler: Any) -> None:
    """Continue with the profiler that `sys.getprofile` returned: a function, or before 3.12 an object of cProfile."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        sys.setprofile(None)
        profiler.enable()


class TorchCallsIgnored(TorchFunctionMode):
    """Collects no names while torch computes. It is entered last, so that it runs before every other mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        collecting = sys.getprofile()
        sys.setprofile(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.setprofile(collecting)


@lru_cache(maxsize=4096)
def is_of_a_model(file: str) -> bool:
    """Return whether a file may hold the code of a model: it is not of torch, of Python itself or of ktc."""
    if file.startswith(_NOT_OF_MODELS):
        return False
    return not file.startswith(_PYTHON) or file.startswith(_PACKAGES)


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code, and its texts, those of nested functions included."""
    nested = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset({*code.co_names, *texts}).union(*nested)


def own_names(value: object) -> Iterator[str]:
    """Yield the names of functions that a value is, or that a `functools.partial` or a container holds."""
    if isinstance(value, partial):
        yield from own_names(cast("partial[object]", value).func)
    elif isinstance(value, dict | list | tuple | set | frozenset):
        items = cast("Iterable[object]", value.values() if isinstance(value, dict) else value)
        yield from (name for item in items if callable(item) for name in own_names(item))
    else:
        name = getattr(value, "__name__", None)
        yield from (name,) if isinstance(name, str) else ()


def _missing_attributes(names: dict[str, None]) -> AbstractContextManager[None]:
    """Return a context that collects the attributes which the code of models asks of modules without them."""
    stock = nn.Module.__getattr__

    def noting(self: nn.Module, name: str) -> Any:
        try:
            return stock(self, name)
        except AttributeError:
            frame = inspect.currentframe()
            caller = None if frame is None else frame.f_back
            if caller is not None and is_of_a_model(caller.f_code.co_filename):
                names[name] = None
            raise

    return attributes(nn.Module, __getattr__=noting)


# Values outside of modules --------------------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def _loaded(code: CodeType) -> frozenset[tuple[str, str]]:
    """Return the globals that code loads, each with the attribute that it reads of it, "" if none."""
    steps = list(dis.get_instructions(code))
    return frozenset(
        (str(step.argval), str(after.argval) if after.opname in ("LOAD_ATTR", "LOAD_METHOD") else "")
        for step, after in zip(steps, [*steps[1:], steps[-1]], strict=True)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    )


def _changes(file_globals: Mapping[str, Any], file: str, name: str, attribute: str) -> bool:
    """Return whether a global of a file, or the attribute that is read of it, may be another value in a later call."""
    value, rebound = file_globals[name], _rebound(file)
    if name in rebound or (attribute and f"{name}.{attribute}" in rebound):
        return True
    if isinstance(value, ModuleType):
        inner = str(getattr(value, "__file__", None) or "")
        of_a_model = inner.endswith(".py") and is_of_a_model(inner) and not value.__name__.startswith(_LIBRARIES)
        return of_a_model and attribute in vars(value) and _changes(vars(value), inner, attribute, "")
    return _may_change(value)


@lru_cache(maxsize=1024)
def _rebound(file: str) -> frozenset[str]:
    """Return the names that functions of a file rebind by `global`, and `name.attribute` for those they set."""
    text = "".join(linecache.getlines(file))
    names = (name.strip() for names in _GLOBAL.findall(text) for name in names.split(","))
    return frozenset(names) | {f"{name}.{attribute}" for name, attribute in _STORED.findall(text) if name != "self"}


def _may_change(value: object) -> bool:
    """Return whether a value is mutable by purpose: a container, a context or thread variable, an object.

    Exceptions are tables of functions or classes, and objects of torch and transformers.
    """
    if isinstance(value, ContextVar | threading.local | SimpleNamespace | argparse.Namespace):
        return True
    if isinstance(value, type | ModuleType | Tensor | nn.Module | enum.Enum | partial):
        return False
    if type(value).__module__.partition(".")[0] in _LIBRARIES:
        return False
    if isinstance(value, MutableMapping | MutableSequence | MutableSet):
        items = cast("Any", value.values() if isinstance(value, MutableMapping) else value)
        return not value or not all(callable(item) or isinstance(item, ModuleType) for item in items)
    frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None) or ""
    return bool(getattr(value, "__dict__", None)) and not frozen and not callable(value) and is_of_a_model(file)
