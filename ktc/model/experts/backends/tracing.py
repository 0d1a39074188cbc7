"""Functions that `torch.compile` runs as they are, outside of its graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude from tracing a function that reads data, such as which tokens an expert has.

    Dynamo would break the graph inside it, and try again at every call.
    """
    return cast("Callable[P, R]", torch.compiler.disable(function))
