"""Whether a linear layer is only that: a replacement would lose other code that runs with it."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

from ktc.model.experts.private_api import HOOKS


class SameProduct:
    """A base of patches of `nn.Linear` that compute its product with other kernels, and nothing more."""


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether calling `module` is `nn.Linear` on its own weight and bias, and nothing more."""
    return (
        isinstance(module, nn.Linear)
        and has_linear_code(type(module))
        and type(module).__call__ is nn.Module.__call__
        and "forward" not in vars(module)
        and not has_hooks(module)
        and not parametrize.is_parametrized(module)
    )


def has_linear_code(kind: type[nn.Module]) -> bool:
    """Return whether a class has the code of `nn.Linear`, or that of a patch which computes the same."""
    codes: list[object] = [vars(base)["forward"] for base in kind.__mro__ if _is_code(base)]
    return bool(codes) and codes[0] is nn.Linear.forward


def _is_code(base: type) -> bool:
    return "forward" in vars(base) and not issubclass(base, SameProduct)


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling the module calls other code too."""
    return bool(hooks_of(module))


def hooks_of(module: nn.Module) -> list[object]:
    """Return the functions that are called with the module."""
    return [hook for hooks in HOOKS for hook in getattr(module, hooks).values()]
