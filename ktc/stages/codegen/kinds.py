"""The kinds of kernels, one row each.

A kind has a name, the `op` of its specs, which names its template too (`templates/OP.cpp.j2`). A kernel with state has
a Python class of its own (`runtime/python/ktc_python/OP.hpp`); one that is only functions shares `functions.hpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from ktc.diagnostics import Diagnostic
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.spec import Spec
from ktc.stages.codegen import attention, fused_moe, linear, packed_linear, router, step
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
    is the reason (H220) why there is no kernel for a spec. `interface` is the namespace of its entries in
    `ktc_python/entries.hpp`, "" for that of the op's name. With "functions", its C++ is the template and its header
    alone. `unit` is a file of `runtime/python` that only libraries with such a kernel compile.
    """

    choices: Callable[[_Spec], dict[str, object]]
    self_test: Callable[[Kernel, _Spec], None]
    unsupported: Callable[[_Spec], Diagnostic | None] = lambda _: None
    interface: str = ""
    unit: str = ""


KINDS: Final[Mapping[str, Kind[Any]]] = {
    "fused_moe": Kind(fused_moe.choices, self_test, fused_moe.unsupported),
    "linear": Kind(linear.choices, self_test_linear),
    "packed_linear": Kind(packed_linear.choices, self_test_packed_linear),
    "attention": Kind(attention.choices, self_test_attention),
    "int8_attention": Kind(attention.choices, self_test_int8_attention),
    "sparse_attention": Kind(attention.choices, self_test_sparse_attention),
    "router": Kind(router.choices, router.self_test_router, interface="functions"),
    "step": Kind(step.choices, self_test_step, unit="step_module.cpp"),
}


def kind_of(spec: Spec) -> Kind[Any]:
    """Return the row of a spec's kind."""
    return KINDS[spec.op]
