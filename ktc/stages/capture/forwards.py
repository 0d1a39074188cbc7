"""Other code for `forward` of modules, for a time: capture runs modules as markers, or watches their calls."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ktc.model.hf.patching import with_attributes

Forward = Callable[..., Any]


@contextmanager
def replaced_forwards(replacements: Iterable[tuple[nn.Module, Forward]]) -> Generator[None]:
    """Call each module by its replacement inside the context. A `forward` of the instance itself comes back."""
    with ExitStack() as stack:
        for module, forward in replacements:
            stack.enter_context(with_attributes(module, forward=forward))
        yield
