"""A trace of a block on meta tensors: its operators with constants and connections, and the settings that it reads.

Input: a block and a call. Output: plain values, equal for two blocks that compute the same under any names of
classes and attributes. Nothing is exported, so a trace takes milliseconds.
"""

from __future__ import annotations

import logging
import re
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktc.foundation.temporary_values import attributes, context_value
from ktc.model.experts.private_api import TorchDispatchMode, pytree

# Operators that move values and compute nothing. Which of them run may depend on sizes.
LAYOUT = (
    "slice", "split", "select", "view", "reshape", "permute", "transpose", "expand", "squeeze", "narrow", "cat",
    "clone", "aten.t.", "_to_copy", "alias", "detach", "as_strided", "copy", "sym_size", "empty",
)  # fmt: skip
_FRACTION = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?")

Reads = dict[str, set[str]]  # a setting of a config, by class and name -> the values that code read

_reads: ContextVar[Reads | None] = ContextVar("reads", default=None)
_STOCK_READ = PreTrainedConfig.__getattribute__
_LOCK = threading.Lock()
_collecting: list[None] = []  # one entry for each context that collects


class Trace(TorchDispatchMode):
    """Records every operator inside: its name, its constants, and which earlier result or parameter each tensor is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.rows: list[str] = []
        self._names = {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}
        self._held: list[Tensor] = []  # an id is unique only as long as its tensor lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves, spec = pytree.tree_flatten((args, dict(kwargs or {})))
        self.rows.append(f"{func} {[self._spelled(leaf) for leaf in leaves]} {spec}")
        for produced in pytree.tree_leaves(result):
            if isinstance(produced, Tensor):
                self._name(produced)
        return result

    def _name(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            self._names[id(tensor)] = f"%{len(self._held)} {tensor.dtype} {tuple(tensor.shape)}"
            self._held.append(tensor)
        return self._names[id(tensor)]

    def _spelled(self, leaf: object) -> str:
        return self._name(leaf) if isinstance(leaf, Tensor) else repr(leaf)


@contextmanager
def recording_reads() -> Generator[Reads]:
    """Collect the public settings of every config that code reads inside the context, with all values that it reads.

    Layers may have configs of their own, of one class.
    """
    with _reporting_configs(), context_value(_reads, Reads()) as reads:
        assert reads is not None, "a context that collects has a table"
        yield reads


def note_reads(reads: Reads) -> None:
    """Add what other code read to the settings that are being collected."""
    recording = _reads.get()
    if recording is not None:
        for name, values in reads.items():
            recording.setdefault(name, set()).update(values)


@contextmanager
def _reporting_configs() -> Generator[None]:
    """Let configs report reads while any thread collects them. Afterwards they are stock, as `torch.compile` needs."""
    with _LOCK:
        _collecting.append(None)
        if len(_collecting) == 1:
            cast("Any", PreTrainedConfig).__getattribute__ = _reporting(_STOCK_READ)
    try:
        yield
    finally:
        with _LOCK:
            _collecting.pop()
            if not _collecting:
                cast("Any", PreTrainedConfig).__getattribute__ = _STOCK_READ


def _reporting(stock: Callable[[PreTrainedConfig, str], Any]) -> Callable[[PreTrainedConfig, str], Any]:

    def read(self: PreTrainedConfig, name: str) -> Any:
        value = stock(self, name)
        recording = None if name.startswith("_") else _reads.get()
        if recording is not None and is_plain(value):
            recording.setdefault(f"{type(self).__name__}.{name}", set()).add(repr(value))
        return value

    return read


def is_plain(value: object) -> bool:
    """Return whether a setting is made of numbers, texts, dtypes and containers of these alone."""
    if isinstance(value, Mapping):
        return all(map(is_plain, cast("Mapping[object, object]", value).values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, cast("Sequence[object]", value)))
    return value is None or isinstance(value, int | float | str | torch.dtype)


def plain_settings(module: nn.Module) -> dict[str, object]:
    """Return the attributes of a module that may change its computation, without its tensors and children."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE and is_plain(value)}


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def without_sizes(rows: Sequence[str]) -> list[str]:
    """Return the operators of a trace and their fractions, without layout and sizes, which differ by input."""
    named = [(row.partition(" ")[0], _FRACTION.findall(row)) for row in rows]
    return [f"{name} {fractions}" for name, fractions in named if not any(layout in name for layout in LAYOUT)]


def traced(module: nn.Module, run: Callable[[], object]) -> list[str]:
    """Return the trace of `run()`, without gradients. Raises what `run` raises."""
    with torch.no_grad(), Trace(module) as trace:
        run()
    return trace.rows


@contextmanager
def silent_torch() -> Generator[None]:
    """Compute without gradients, warnings and messages of torch inside the context."""
    log = logging.getLogger("torch")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        log.setLevel(before)


_DEVICES = ("cpu", "cuda")


@contextmanager
def autocast() -> Generator[None]:
    """Let code see that autocast is enabled inside the context. Meta tensors are not cast."""
    before = [torch.is_autocast_enabled(device) for device in _DEVICES]
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, True)
        yield
    finally:
        for device, enabled in zip(_DEVICES, before, strict=True):
            torch.set_autocast_enabled(device, enabled)


def inference() -> AbstractContextManager[None]:
    """Return a context in which code sees that inference mode is on. The mode itself would name other operators."""
    return attributes(torch, is_inference_mode_enabled=lambda: True)


@contextmanager
def training_mode(module: nn.Module, training: bool | None = None) -> Generator[None]:
    """Put a module into training or evaluation inside the context; afterwards every module has its mode again.

    Without `training` the block itself changes the mode.
    """
    before = {inner: inner.training for inner in module.modules()}
    if training is not None:
        module.train(training)
    try:
        yield
    finally:
        for inner, mode in before.items():
            inner.training = mode


# The modes of torch in which a model's code may be called, besides evaluation and training.
MODES: tuple[Callable[[], AbstractContextManager[object]], ...] = (nullcontext, inference, autocast)
