"""The actions of code while it runs: the torch functions that it calls, and every name that it mentions.

In: a module, and a function that runs it. Out: `Ran`, whose calls are equal for two runs that compute the same.
Functions are recorded as the author calls them: which operators they become depends on gradients. Names are read from
the code objects that ran, so those of branches that were not taken are among them, and from the functions that they
called. Code of torch, of Python, of transformers' configs and of ktc is not read.
"""

from __future__ import annotations

import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import huggingface_hub
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import configuration_utils

_PYTHON, _PACKAGES = (sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
_NOT_OF_MODELS = (
    *(str(Path(str(library.__file__)).parent) for library in (torch, huggingface_hub)),
    # Every read of a setting runs these two.
    str(configuration_utils.__file__),
    str(Path(configuration_utils.__file__).parent / "integrations" / "heterogeneity"),
    *(str(Path(__file__).parents[1]), "<frozen"),
)
# Functions whose result has the numbers and the gradients of their first argument, in any dtype and place.
_COPIES = frozenset({
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "alias", "view_as", "cpu",
    "cuda",
})  # fmt: skip
_DEVICES = ("meta", "cpu", "cuda")
_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_WRAPPED = re.compile(r"\bbase_layer\.|\bparametrizations\.|\.original\b")  # in the name of a weight that PEFT wraps
_LIMITS = frozenset(
    float(getattr(torch.finfo(dtype), limit))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for limit in ("min", "max", "eps", "tiny")
)


_unrecorded: ContextVar[bool] = ContextVar("unrecorded", default=False)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run.

    `blocked` states of each call whether the code has switched gradients off for it. `missing` are the attributes that
    the code asked of modules without them.
    """

    calls: tuple[str, ...]
    blocked: tuple[bool, ...]
    graded: bool
    mentioned: frozenset[str]
    missing: tuple[tuple[nn.Module, str], ...]

    def computes_as(self, other: Ran) -> bool:
        """Return whether both compute the same, with the same gradients if both have any."""
        graded = self.graded and other.graded
        return self.calls == other.calls and (not graded or self.blocked == other.blocked)


def observed(module: nn.Module, run: Callable[[], object], *, names: bool) -> Ran:
    """Return what `run`, which runs the code of `module`, does. Raises what `run` raises.

    Without `names`, which take most of the time, only what a tensor was asked is mentioned.
    """
    found, missing = set[str](), dict[tuple[int, str], tuple[nn.Module, str]]()
    graded = torch.is_grad_enabled()
    with _Calls(module) as calls, _missing_attributes(missing), _names(found) if names else nullcontext():
        run()
    mentioned = frozenset(found | calls.asked)
    return Ran(tuple(calls.rows), tuple(calls.blocked), graded, mentioned, tuple(missing.values()))


@contextmanager
def unrecorded() -> Generator[None]:
    """Record no call inside: those that prepare an input are not of the module."""
    token = _unrecorded.set(True)
    try:
        yield
    finally:
        _unrecorded.reset(token)


def names_of(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code, and its texts, those of nested functions included."""
    nested = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return frozenset({*code.co_names, *texts}).union(*nested)


def is_of_a_model(file: str) -> bool:
    """Return whether a file may hold the code of a model: it is not of torch, of Python itself or of ktc."""
    if file.startswith(_NOT_OF_MODELS):
        return False
    return not file.startswith(_PYTHON) or file.startswith(_PACKAGES)


class _Calls(TorchFunctionMode):
    """Records each call that makes or changes a tensor, with its constants and connections; others are `asked`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.rows: list[str] = []
        self.blocked: list[bool] = []
        self.asked: set[str] = set()
        self._num_given = 0
        held = (*module.named_parameters(), *module.named_buffers())
        self._names = {id(tensor): _WRAPPED.sub("", name) for name, tensor in held}
        self._held: list[Tensor] = []  # an id is unique only as long as its tensor lives

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = dict(kwargs or {}), name_of(func)
        if _unrecorded.get():
            return func(*args, **given)
        spelled = [self._spelled(leaf) for leaf in pytree.tree_leaves((args, given))]
        result = func(*args, **given)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if name in _COPIES and made:
            self._name(made[0], spelled[0])
        elif made or result is None or name in _HOOKS:
            self._add(name, spelled, made)
        else:
            self.asked.add(name)
        return result

    def _add(self, name: str, spelled: list[str], made: list[Tensor]) -> None:
        if name == "_set_grad_enabled":
            return
        self.rows.append(f"{name} {spelled}")
        self.blocked.append(not torch.is_grad_enabled())
        for place, tensor in enumerate(made):
            self._name(tensor, f"%{len(self.rows)}.{place}")

    def _name(self, tensor: Tensor, name: str) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name
            self._held.append(tensor)
        return self._names[id(tensor)]

    def _spelled(self, leaf: object) -> str:
        if isinstance(leaf, Tensor):
            if id(leaf) not in self._names:
                self._num_given += 1
            return self._name(leaf, f"given {self._num_given}")
        if isinstance(leaf, torch.dtype | torch.device) or (isinstance(leaf, str) and leaf in _DEVICES):
            return "a dtype or a device"
        return "a limit of a dtype" if isinstance(leaf, float) and leaf in _LIMITS else repr(leaf)


def name_of(func: Any) -> str:
    """Return the name of a torch function as a mode receives it, or of the property of a tensor that it gets."""
    name = str(getattr(func, "__name__", func))
    return str(func.__self__.__name__) if name == "__get__" else name


@contextmanager
def _names(found: set[str]) -> Generator[None]:
    """Collect what the code of models mentions inside, and the functions that it calls, by their own names.

    An author may import a function by another name, or keep it as an attribute.
    """
    before, own = sys.getprofile(), dict[CodeType, bool]()

    def event(frame: FrameType, kind: str, called: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if code not in own:
            own[code] = is_of_a_model(code.co_filename)
            found.update(_mentioned(frame) if own[code] else ())
        if kind == "c_call" and own[code]:
            found.add(str(called.__name__))
        elif kind == "call" and not own[code] and caller is not None and own.get(caller.f_code):
            found.add(code.co_name)

    sys.setprofile(event)
    try:
        yield
    finally:
        sys.setprofile(before)


def _mentioned(frame: FrameType) -> frozenset[str]:
    """Return the names in the code of a frame, and those that its globals have themselves."""
    names = names_of(frame.f_code)
    return names | {str(getattr(frame.f_globals.get(name), "__name__", name)) for name in names}


@contextmanager
def _missing_attributes(found: dict[tuple[int, str], tuple[nn.Module, str]]) -> Generator[None]:
    """Collect the attributes that the code of models asks of modules without them."""
    stock = nn.Module.__getattr__

    def asked(self: nn.Module, name: str) -> Any:
        try:
            return stock(self, name)
        except AttributeError:
            frame = inspect.currentframe()
            caller = None if frame is None else frame.f_back
            if caller is not None and is_of_a_model(caller.f_code.co_filename):
                found[id(self), name] = self, name
            raise

    cast("Any", nn.Module).__getattr__ = asked
    try:
        yield
    finally:
        cast("Any", nn.Module).__getattr__ = stock
