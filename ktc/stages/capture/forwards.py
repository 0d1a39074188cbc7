"""Other code for `forward` of modules, for a time: capture runs modules as markers, or watches their calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(replacements: Iterable[tuple[nn.Module, Forward]]) -> Generator[None]:
    """Call each module by its replacement inside the context. A `forward` of the instance itself comes back."""
    before: list[tuple[nn.Module, Forward | None]] = []
    try:
        for module, forward in replacements:
            before.append((module, vars(module).get("forward")))
            module.forward = forward
        yield
    finally:
        for module, own in reversed(before):
            del module.forward
            if own is not None:
                module.forward = own
