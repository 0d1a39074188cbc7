"""Values that hold for a block of code: attributes of an object and variables of a context, put back after it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Value = TypeVar("Value")


@contextmanager
def attributes(owner: object, **values: Any) -> Generator[None]:
    """Set attributes of `owner`, which it has already, inside the block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def context_value(variable: ContextVar[Value], value: Value) -> Generator[Value]:
    """Yield `value`, which the variable has inside the block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
