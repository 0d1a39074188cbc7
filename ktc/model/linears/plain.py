"""Whether a linear layer is only that: a replacement would lose other code that runs with it."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from ktc.model.experts.private_api import HOOKS


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether calling `module` is `nn.Linear` on its own weight and bias, and nothing more."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and type(module).__call__ is nn.Module.__call__
        and "forward" not in vars(module)
        and not has_hooks(module)
        and not parametrize.is_parametrized(module)
    )


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module calls other code too."""
    return bool(hooks_of(module))


def hooks_of(module: nn.Module) -> list[object]:
    """Return the functions that are called with the module."""
    return [hook for hooks in HOOKS for hook in getattr(module, hooks).values()]
