"""`Spec`: what one kernel is generated from, of any kind.

Every spec is hashable and has `op`, the name of its kind; `entry`, the kernel's name in a library; `dtype` and `isa`,
what the kernel computes in and with which instructions; and `summary`, for people.
"""

from __future__ import annotations

from ktc.model.kernels.attention_spec import AttentionSpec, Int8AttentionSpec, SparseAttentionSpec
from ktc.model.kernels.kernel_spec import KernelSpec
from ktc.model.kernels.linear_spec import LinearSpec, PackedLinearSpec
from ktc.model.kernels.step_spec import StepSpec

Spec = KernelSpec | LinearSpec | PackedLinearSpec | AttentionSpec | Int8AttentionSpec | SparseAttentionSpec | StepSpec
