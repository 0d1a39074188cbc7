"""The kinds of kernels, one row each.

A kind has a name, the `op` of its specs. That names its template (`templates/OP.cpp.j2`) and the header of its Python
class (`runtime/python/ktc_python/OP.hpp`) too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ktc.diagnostics import Diagnostic
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.spec import Spec
from ktc.stages.codegen import attention, fused_moe, linear, packed_linear, step
from ktc.stages.codegen.self_test import self_test
from ktc.stages.codegen.self_test_attention import (
    self_test_attention,
    self_test_int8_attention,
    self_test_sparse_attention,
)
from ktc.stages.codegen.self_test_linear import self_test_linear
from ktc.stages.codegen.self_test_packed_linear import self_test_packed_linear
from ktc.stages.codegen.self_test_step import self_test_step

_Spec = TypeVar("_Spec")


@dataclass(frozen=True, slots=True)
class Kind(Generic[_Spec]):
    """The codegen interface of one kind of kernel.

    `choices` are the variables of its template. `self_test` raises `KtcError` (H225) for a wrong kernel. `unsupported`
    is the reason (H220) why there is no kernel for a spec.
    """

    choices: Callable[[_Spec], dict[str, object]]
    self_test: Callable[[Kernel, _Spec], None]
    unsupported: Callable[[_Spec], Diagnostic | None] = lambda _: None


KINDS: Final[Mapping[str, Kind[Any]]] = {
    "fused_moe": Kind(fused_moe.choices, self_test, fused_moe.unsupported),
    "linear": Kind(linear.choices, self_test_linear),
    "packed_linear": Kind(packed_linear.choices, self_test_packed_linear),
    "attention": Kind(attention.choices, self_test_attention),
    "int8_attention": Kind(attention.choices, self_test_int8_attention),
    "sparse_attention": Kind(attention.choices, self_test_sparse_attention),
    "step": Kind(step.choices, self_test_step),
}


def kind_of(spec: Spec) -> Kind[Any]:
    """Return the row of a spec's kind."""
    return KINDS[spec.op]
