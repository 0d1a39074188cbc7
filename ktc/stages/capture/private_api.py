"""Every private name of torch that capture uses besides those of `experts/private_api.py`.

`tests/stages/capture/test_private_api.py` checks each name with the oldest and the newest release (`make versions`).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeTensorMode"]  # tensors without values, whose sizes may be symbols


def source_of(name: str) -> Any:
    """Return a name for a symbolic size. It imports a compiler, which no command needs before."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which this one is a view."""
    return tensor._base


@contextmanager
def as_if_compiling() -> Generator[None]:
    """Let torch say that it compiles and exports."""
    compiler = cast("Any", torch.compiler)
    before = compiler._is_compiling_flag, compiler._is_exporting_flag, compiler.is_dynamo_compiling
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    compiler.is_dynamo_compiling = lambda: True
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag, compiler.is_dynamo_compiling = before
