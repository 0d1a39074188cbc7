"""The device of each tensor of a compiled model, and how activations follow: module names to devices.

The entry of the nearest ancestor counts. A module receives its inputs on its own device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.experts.private_api import HOOKS
from ktc.model.linears.streamed_linear import StreamedLinear


def device_of(fqn: str, placement: Mapping[str, str]) -> torch.device:
    """Return the device of the module or tensor `fqn`: the entry of itself or its nearest ancestor; default CPU."""
    while fqn not in placement and fqn:
        fqn = _parent(fqn)
    return torch.device(placement.get(fqn, "cpu"))


def check_devices(devices: Iterable[str]) -> None:
    """Raise `HostLacks` (L409) for the devices that this process does not see."""
    seen = torch.cuda.device_count()
    absent = {name for name in devices if (d := torch.device(name)).type == "cuda" and (d.index or 0) >= seen}
    if absent:
        names = ", ".join(f"`{name}`" for name in sorted(absent))
        hint = "compile it again on this machine, or make the GPUs visible"
        raise HostLacks(
            Diagnostic("L409", f"the model was placed on {names}; this process sees {seen} GPUs", hint=hint)
        )


def follow(model: nn.Module, placement: Mapping[str, str]) -> None:
    """Register hooks that move activations. The largest modules on one device receive their inputs there.

    Decoder layers leave their output on their device. A part of a layer returns its output to the device of its input,
    since the layer adds the two. Routed experts move tensors themselves. A model on the CPU gets no hooks.
    Models that read images call their language model's embeddings themselves: these receive token ids in any case.
    """
    if set(placement.values()) <= {"cpu"}:
        return
    modules = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
    streamed = {fqn: str(module.device) for fqn, module in modules.items() if isinstance(module, StreamedLinear)}
    placement = {**placement, **streamed}  # they compute on another device than that of their weights
    devices = _devices_below(model, placement)
    embeddings: object = cast("Any", model).get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for fqn, module in modules.items():
        if not fqn or isinstance(module, nn.ModuleList):  # a list is never called
            continue
        around = [name for name in _ancestors(fqn) if not isinstance(modules[name], nn.ModuleList)]
        largest = len(devices[fqn]) == 1 and (around[0] == "" or len(devices[around[0]]) > 1)
        if not largest and fqn not in placement and module is not embeddings:
            continue
        part_of_layer = any(isinstance(modules[name], nn.ModuleList) for name in _ancestors(_parent(fqn)))
        mover = _Mover(device_of(fqn, placement), gives_back=part_of_layer)
        module.register_forward_pre_hook(mover.inputs, with_kwargs=True)
        module.register_forward_hook(mover.output)


def _devices_below(model: nn.Module, placement: Mapping[str, str]) -> Mapping[str, set[torch.device]]:
    """Return the devices of the tensors in every module."""
    below: defaultdict[str, set[torch.device]] = defaultdict(set)
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, _ in tensors:
        device = device_of(name, placement)
        for module in _ancestors(name):
            below[module].add(device)
    return below


def _ancestors(fqn: str) -> Iterator[str]:
    """Yield the names of the modules around `fqn`, the model's own (empty) last."""
    while fqn:
        fqn = _parent(fqn)
        yield fqn


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def return_loss_to_labels(model: PreTrainedModel) -> None:
    """Let `loss_function` return its loss on the device of the labels, which is that of the model's inputs.

    Stock trainers add losses there, also for a model whose head is on another GPU. A hook on the model would be too
    late: PEFT calls its `forward` without hooks.
    """
    any_model = cast("Any", model)
    any_model.loss_function = partial(_loss_on_labels, any_model.loss_function)


def loss_function_of(model: Any) -> Any:
    """Return the model's `loss_function` as it was before `return_loss_to_labels`, None where it has none."""
    function: Any = getattr(model, "loss_function", None)
    return function.args[0] if getattr(function, "func", None) is _loss_on_labels else function


def _loss_on_labels(loss_function: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    labels = kwargs["labels"] if "labels" in kwargs else args[1]
    return loss_function(*args, **kwargs).to(labels.device)


class _Mover:
    """The hooks of one module: its inputs move to `device`; a cache stays on the devices of its layers."""

    def __init__(self, device: torch.device, gives_back: bool) -> None:
        self._device, self._gives_back = device, gives_back
        self._home = device

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self._home = tensors[0].device if tensors and self._gives_back else self._device
        return _moved(args, self._device), _moved(kwargs, self._device)

    def output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _moved(output, self._home)


def hooks_move_alone(module: nn.Module) -> bool:
    """Return whether the module's hooks, if any, do no more than move its inputs to its device (`follow`)."""
    return all(moves_alone(hook) for kind in HOOKS for hook in vars(module)[kind].values())


def moves_alone(hook: Any) -> bool:
    """Return whether a hook of a module does no more than move its inputs or its output (`follow`)."""
    return isinstance(getattr(hook, "__self__", None), _Mover)


def _moved(value: Any, device: torch.device) -> Any:
    """Move the tensors in plain containers; return a cache or an output object unchanged."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in cast("dict[str, Any]", value).items()}
    return value


def device_map(placement: Mapping[str, str]) -> dict[str, int] | None:
    """Return the GPUs of the placement as Hugging Face's `hf_device_map`, `None` for a single device.

    Modules on the CPU are left out: PEFT takes them for offloaded and, when it loads an adapter, places the whole model
    again.
    """
    if len(set(placement.values())) < 2:
        return None
    return {fqn: int(name.partition(":")[2] or 0) for fqn, name in placement.items() if name.startswith("cuda")}
