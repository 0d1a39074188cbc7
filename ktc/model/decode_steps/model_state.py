"""The state of a model that a captured step depends on, to compare two of them.

In: a model, with adapters or without. Out: a value that differs where a step would compute with other tensors, other
modules, other settings or other code: methods of the modules' classes, and functions that a module holds. Functions
that these call are not compared. Values that change in place on a GPU are read at every replay, and still make another
state: the kernels of experts may have copies of adapters in another dtype.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktc.model.experts.private_api import HOOKS, version_of
from ktc.model.hf.private_api import attention_of, experts_of
from ktc.model.manifest.code_facts import functions_of

_COMPARED_ELSEWHERE: Final = frozenset(vars(nn.Module()))  # tensors, children and hooks
# Modules whose hooks a replay may leave out: they do nothing in a step that returns logits alone, or a replay does it.
_IDLE: Final = ("ktc.", "transformers.")
# Bytes of a tensor whose values are compared. A step reads larger ones where they are; of small ones, such as a
# router's weights, it may have copies in another dtype.
_MOST_CHECKED: Final = 1 << 22
_PLAIN: Final = (bool, int, float, str, type(None))
_CODE: Final[tuple[type, ...]] = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """`facts` are compared; `tensors` are kept, so that no other tensor gets the address of one of them.

    Functions are among the facts themselves, which keeps them alive too.
    """

    tensors: tuple[Tensor, ...]
    facts: tuple[object, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the present state."""
        tensors = (*model.parameters(), *model.buffers())
        config, modules = getattr(model, "config", None), tuple(model.modules())
        facts = (
            *map(_identity, tensors),
            *(
                _checksum(tensor)
                for tensor in tensors
                if tensor.device.type == "cpu" and tensor.nbytes <= _MOST_CHECKED
            ),
            _implementations(config),
            *(_facts(module) for module in modules),
            *(_methods(module_class) for module_class in dict.fromkeys(map(type, modules))),
            None if config is None else repr(config.to_dict()),
            *(torch.get_autocast_dtype(kind) for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)),
        )
        return cls(tensors, facts)

    def is_same(self, other: ModelState | None) -> bool:
        """Return whether a step of the one state serves the other."""
        return other is not None and self.facts == other.facts


def foreign_hook(model: nn.Module) -> str:
    """Return the name of a module with a user's forward hook, which a replay would not call; "" without one."""
    for name, module in cast("Any", model).named_modules():
        hooks = [hook for kind in HOOKS[:2] for hook in cast("dict[int, object]", vars(module)[kind]).values()]
        if any(not getattr(hook, "__module__", "").startswith(_IDLE) for hook in hooks):
            return name or type(module).__name__
    return ""


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of the values: fused optimizers and `.data` change them without a new version."""
    values: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(values)


def _facts(module: nn.Module) -> tuple[object, ...]:
    attributes = vars(module)
    hooks = tuple(tuple(attributes[kind]) for kind in HOOKS[:2])
    settings = [(name, value) for name, value in attributes.items() if name not in _COMPARED_ELSEWHERE]
    plain = tuple((name, spelled) for name, value in settings if (spelled := _spelled(value)))
    code = tuple((name, cast("object", value)) for name, value in settings if isinstance(value, _CODE))
    tensors = tuple((name, *_identity(value)) for name, value in settings if type(value) is Tensor)
    configs = tuple((name, _implementations(value)) for name, value in settings if isinstance(value, PreTrainedConfig))
    return id(module), type(module), module.training, hooks, plain, code, configs, tensors


def _identity(tensor: Tensor) -> tuple[int, int, int]:
    return id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else version_of(tensor)


def _methods(module_class: type[nn.Module]) -> tuple[FunctionType, ...]:
    return tuple(function for _, _, function in functions_of(module_class))


def _implementations(config: object) -> tuple[object, ...]:
    """Return the code that a config chooses for attention and experts, which its dictionary does not have."""
    return attention_of(config), experts_of(config)


def _spelled(value: Any) -> str:
    """Return a plain value, or a container of some, as text; "" for anything else."""
    members: list[Any] = [value]
    if isinstance(value, dict | list | tuple | set):
        members = list(cast("Any", value))
    if isinstance(value, dict):
        members += cast("Any", value).values()
    return repr(cast("object", value)) if all(isinstance(member, _PLAIN) for member in members) else ""
