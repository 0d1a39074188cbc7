"""The activations of experts and their derivatives, as parts of Triton kernels.

In: numbers in fp32, and the constants of an `ExpertsForm`. Out: what `reference.activated` computes, and its
derivatives, as PyTorch defines them where a function has a kink. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl

from ktc.model.kernels.form import ExpertsForm


@functools.cache
def constants_of_form(form: ExpertsForm) -> dict[str, Any]:
    """Return the arguments of a kernel that the activation decides."""
    act = form.activation
    return {
        "FUNCTION": act.function, "ALPHA": act.alpha, "LIMIT": act.limit, "UP_OFFSET": act.up_offset,
        "GATE_CAP": act.gate_cap, "UP_CAP": act.up_cap,
    }  # fmt: skip


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(y):
    """Return tanh, of small numbers by its series, whose digits the sum with one loses."""
    square = y * y
    series = y * (1.0 - square * (0.3333333333 - square * (0.1333333333 - square * 0.0539682540)))
    return tl.where(square < 0.01, series, 2.0 * _sigmoid(2.0 * y) - 1.0)


@triton.jit
def function(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, GATE_CAP: tl.constexpr):
    """Return the function of an activation; comparisons leave NaN as it is."""
    if FUNCTION == "silu":
        factor = x if GATE_CAP is None else GATE_CAP * _tanh(x / GATE_CAP)
        return factor * _sigmoid(ALPHA * x)
    elif FUNCTION == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        return x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        return positive if FUNCTION == "relu" else positive * positive


@triton.jit
def gated(
    gate, up, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """Return the activation of gate times up, as `reference.activated`."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if UP_CAP is not None:
        up = UP_CAP * _tanh(up / UP_CAP)
    return function(gate, FUNCTION, ALPHA, GATE_CAP) * (up + UP_OFFSET)


@triton.jit
def function_and_slope(x, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, GATE_CAP: tl.constexpr):
    """Return the function of an activation and its derivative."""
    if FUNCTION == "silu":
        share = _sigmoid(ALPHA * x)
        if GATE_CAP is None:
            value = x * share
            return value, share + ALPHA * value * (1.0 - share)
        else:
            part = _tanh(x / GATE_CAP)
            value = GATE_CAP * part * share
            return value, (1.0 - part * part) * share + ALPHA * value * (1.0 - share)
    elif FUNCTION == "gelu":
        share = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
        return x * share, share + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif FUNCTION == "gelu_tanh":
        share = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value = x * share
        return value, share + value * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        positive = tl.where(x < 0.0, 0.0, x)
        if FUNCTION == "relu":
            return positive, tl.where(x > 0.0, 1.0, 0.0)
        else:
            return positive * positive, 2.0 * positive


@triton.jit
def gated_and_slopes(
    gate, up, FUNCTION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    GATE_CAP: tl.constexpr, UP_CAP: tl.constexpr,
):  # fmt: skip
    """Return what `gated` does, and its derivatives by gate and by up."""
    of_gate, of_up = gate, up
    if LIMIT is not None:
        of_gate = tl.where(gate > LIMIT, LIMIT, gate)
        of_up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    slope = 1.0
    if UP_CAP is not None:
        part = _tanh(up / UP_CAP)
        of_up, slope = UP_CAP * part, 1.0 - part * part
    value, by_gate = function_and_slope(of_gate, FUNCTION, ALPHA, GATE_CAP)
    of_up += UP_OFFSET
    by_gate *= of_up
    by_up = value * slope
    if LIMIT is not None:
        by_gate = tl.where(gate > LIMIT, 0.0, by_gate)
        by_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, by_up)
    return value * of_up, by_gate, by_up
