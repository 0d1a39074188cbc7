"""States in which a model's code may run: other gradients, modes of torch, dtypes, devices, wrapped layers.

A state is a context around a run on meta tensors. It yields a function that changes the inputs, and undoes its changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from ktc.stages.capture.observed_run import name_of
from ktc.stages.capture.private_api import as_if_compiling
from ktc.stages.capture.trace import autocast as autocast_enabled

Given = Callable[[Tensor], Tensor]  # what an input becomes
Around = Callable[[nn.Module], AbstractContextManager[Given]]


@dataclass(frozen=True, slots=True)
class State:
    """A context around a run of a module. The run itself enters `inside`, after the modes that let it run on meta."""

    around: Around
    inside: Callable[[], AbstractContextManager[object]] | None = None


def _as_given(tensor: Tensor) -> Tensor:
    return tensor


def _state(around: Callable[[nn.Module], Generator[Given]]) -> State:
    return State(contextmanager(around))


# Gradients -----------------------------------------------------------------------------------------------------------
def _frozen_where(chosen: Callable[[int], bool]) -> State:
    """Freeze the parameters whose position among the names is `chosen`; members of a list share one name."""

    def around(module: nn.Module) -> Generator[Given]:
        places = _places(module)
        before = {parameter: parameter.requires_grad for parameter in module.parameters()}
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not chosen(places[_without_numbers(name)]))
        try:
            yield _as_given
        finally:
            for parameter, trained in before.items():
                parameter.requires_grad_(trained)

    return _state(around)


def _places(module: nn.Module) -> dict[str, int]:
    names = dict.fromkeys(_without_numbers(name) for name, _ in module.named_parameters())
    return {name: place for place, name in enumerate(names)}


def _without_numbers(name: str) -> str:
    return re.sub(r"\b\d+\.", "", name)


frozen = _frozen_where(lambda _: True)
_ALONE = 16  # names of which each is trained alone


def partly_frozen(module: nn.Module) -> Sequence[State]:
    """Return states in which any two differently named parameters differ, and states that train one parameter alone."""
    count = len(_places(module))
    bits = [
        _frozen_where(lambda place, bit=bit, value=value: (place >> bit) % 2 == value)
        for bit in range((count - 1).bit_length()) for value in (0, 1)
    ]  # fmt: skip
    if count <= 2:  # each is alone already
        return bits
    return [*bits, *(_frozen_where(lambda place, alone=alone: place != alone) for alone in range(min(count, _ALONE)))]


@_state
def inputs_frozen(_: nn.Module) -> Generator[Given]:
    """Inputs that need no gradient."""
    yield Tensor.detach


@_state
def with_gradients(module: nn.Module) -> Generator[Given]:
    """Parameters that have a gradient already."""
    before = {parameter: parameter.grad for parameter in module.parameters()}
    for parameter in before:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield _as_given
    finally:
        for parameter, gradient in before.items():
            parameter.grad = gradient


# Modes of torch -------------------------------------------------------------------------------------------------------
@_state
def without_gradients(_: nn.Module) -> Generator[Given]:
    with torch.no_grad():
        yield _as_given


@_state
def inference(_: nn.Module) -> Generator[Given]:
    with torch.inference_mode():
        yield Tensor.clone


@_state
def _autocast(_: nn.Module) -> Generator[Given]:
    with autocast_enabled():
        yield _as_given


@_state
def _autocast_half(_: nn.Module) -> Generator[Given]:
    devices = ("cpu", "cuda")
    before = [torch.get_autocast_dtype(device) for device in devices]
    try:
        for device, dtype in zip(devices, before, strict=True):
            torch.set_autocast_dtype(device, torch.float16 if dtype == torch.bfloat16 else torch.bfloat16)
        with autocast_enabled():
            yield _as_given
    finally:
        for device, dtype in zip(devices, before, strict=True):
            torch.set_autocast_dtype(device, dtype)


AUTOCAST = (_autocast, _autocast_half)


@_state
def compiling(_: nn.Module) -> Generator[Given]:
    """Code that is being compiled or exported."""
    with as_if_compiling():
        yield _as_given


@_state
def other_default_dtype(_: nn.Module) -> Generator[Given]:
    """Another default dtype than fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if before == torch.float32 else torch.float32)
    try:
        yield _as_given
    finally:
        torch.set_default_dtype(before)


# Modules --------------------------------------------------------------------------------------------------------------
def _unchanging(*_: object) -> None:
    """Change nothing, as a hook."""


@_state
def hooked(module: nn.Module) -> Generator[Given]:
    """Hooks on every module, and global ones, that change nothing."""
    handles = [inner.register_forward_hook(_unchanging, with_kwargs=True) for inner in module.modules()]
    handles += [inner.register_forward_pre_hook(_unchanging, with_kwargs=True) for inner in module.modules()]
    handles += [nn.modules.module.register_module_forward_hook(_unchanging)]
    handles += [nn.modules.module.register_module_forward_pre_hook(_unchanging)]
    try:
        yield _as_given
    finally:
        for handle in handles:
            handle.remove()


class _Wrapped(nn.Module):
    """A linear layer as PEFT wraps it, with an adapter that adds nothing."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ParameterDict({"default": torch.empty(1, device="meta")})
        self.lora_B = nn.ParameterDict({"default": torch.empty(1, device="meta")})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)


@_state
def wrapped(module: nn.Module) -> Generator[Given]:
    """Linear layers that PEFT has wrapped."""
    linears = [
        (parent, name, child)
        for parent in module.modules() for name, child in parent.named_children() if isinstance(child, nn.Linear)
    ]  # fmt: skip
    for parent, name, child in linears:
        setattr(parent, name, _Wrapped(child))
    try:
        yield _as_given
    finally:
        for parent, name, child in linears:
            setattr(parent, name, child)


class _Alias(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)


@_state
def parametrised(module: nn.Module) -> Generator[Given]:
    """Parameters that PEFT computes from others while a layer runs."""
    parameters = [(inner, name) for inner in module.modules() for name, _ in inner.named_parameters(recurse=False)]
    for inner, name in parameters:
        parametrize.register_parametrization(inner, name, _Alias(), unsafe=True)
    try:
        yield _as_given
    finally:
        for inner, name in parameters:
            parametrize.remove_parametrizations(inner, name, leave_parametrized=False)


# Tensors --------------------------------------------------------------------------------------------------------------
@contextmanager
def _changed(module: nn.Module, change: Given) -> Generator[None]:
    """Replace the float parameters and buffers of a module inside the context."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    before = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = change(tensor.data)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, before, strict=True):
            tensor.data = data


def _strided(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape with every second element of another."""
    return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2] if tensor.dim() else tensor


@_state
def strided_inputs(_: nn.Module) -> Generator[Given]:
    """Inputs that are not contiguous."""
    yield _strided


@_state
def strided_parameters(module: nn.Module) -> Generator[Given]:
    """Parameters that are not contiguous."""
    with _changed(module, _strided):
        yield _as_given


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _in_another_dtype(place: int) -> State:
    @_state
    def around(module: nn.Module) -> Generator[Given]:
        main = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        dtype = [other for other in _FLOATS if other != main][place]

        def change(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.dtype == main else tensor

        with _changed(module, change):
            yield change

    return around


DTYPES = tuple(map(_in_another_dtype, (0, 1)))


class _Pretended(TorchFunctionMode):
    """Simulates a device: code sees its tensors there. They stay on meta, and so do all results."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._device = torch.device(kind)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = name_of(func)
        if name == "device":
            return self._device
        if name in _ASKS_DEVICE:
            return name == f"is_{self._device.type}"
        if name == "get_device":
            return 0 if self._device.type == "cuda" else -1
        if name == "type" and len(args) == 1 and not kwargs:
            return str(func(*args)).replace(".meta.", ".cuda." if self._device.type == "cuda" else ".")
        if name in ("cpu", "cuda"):
            return args[0]
        return func(*map(_on_meta, args), **{key: _on_meta(value) for key, value in (kwargs or {}).items()})


_ASKS_DEVICE = frozenset({"is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu"})


def _on_meta(argument: Any) -> Any:
    named = isinstance(argument, str) and argument.partition(":")[0] in ("cpu", "cuda")
    return torch.device("meta") if named or isinstance(argument, torch.device) else argument


@_state
def _anywhere(_: nn.Module) -> Generator[Given]:
    yield _as_given


DEVICES = tuple(State(_anywhere.around, lambda kind=kind: _Pretended(kind)) for kind in ("cuda", "cpu"))
