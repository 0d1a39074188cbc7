"""Routing on a GPU by Triton: a program reads the logits of a token and writes its experts and their weights.

In: logits (T, E) and a bias (E,) of the choice on one GPU, and the `RouterForm` of the model. Out: what
`ktc.model.hf.router.route` computes without a gradient, the best expert first. Sums are in fp32, and values that the
model has in 16 bits are rounded as it rounds them. As in the kernel of the CPU, a NaN is greater than any number, and
of equal values the expert with the lower number is chosen. Importing this needs Triton.
"""

# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportReturnType=false
# The arguments of device code get their types from Triton, which is not typed itself.

from __future__ import annotations

import functools
import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktc.model.kernels.router_spec import RouterForm

_LEAST: Final = tl.constexpr(-(1 << 62))  # below the key of every number
_PLACES: Final = tl.constexpr(1 << 16)  # more than a router has experts


def route_on_gpu(form: RouterForm, logits: Tensor, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return weights (T, k) of `dtype` and expert numbers (T, k) int64 for logits (T, E) and a bias (E,) in fp32."""
    weights = logits.new_empty((len(logits), form.top_k), dtype=dtype)
    indices = logits.new_empty((len(logits), form.top_k), dtype=torch.int64)
    if len(logits):
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            _route[(len(logits),)](
                logits.contiguous(), logits if bias is None else bias, weights, indices, **_constants(form),
                CORRECTED=bias is not None, num_warps=1 if form.num_experts <= 256 else 2,
            )  # fmt: skip
    return weights, indices


@functools.cache
def _constants(form: RouterForm) -> dict[str, Any]:
    size = form.num_experts // form.groups
    limited = -math.inf if form.limited is None else form.limited
    return {
        "EXPERTS": form.num_experts, "TOP_K": form.top_k, "GROUPS": form.groups, "SIZE": size,
        "TOP_GROUPS": form.top_groups, "ROWS": triton.next_power_of_2(form.groups),
        "COLUMNS": triton.next_power_of_2(size), "CHOSEN": triton.next_power_of_2(form.top_k),
        "SCORING": form.scoring, "LATE": form.late, "TWO": form.group_score == "two_greatest", "LIMITED": limited,
        "TAKES_LIMITED": form.takes_limited, "PICKED_SCALE": form.picked_scale, "TOTAL": form.total,
        "TOTAL_CONSTANT": form.total_constant, "SCALE": form.scale, "WIDE_SCORES": form.scores == "fp32",
        "WIDE_COMPARED": "fp32" in (form.scores, form.compared),
    }  # fmt: skip


# Parts of the kernel -------------------------------------------------------------------------------------------------
@triton.jit
def _rounded(value, kind, WIDE: tl.constexpr):
    """Return numbers as the model rounds them: to the dtype of `kind`, or not where it computes in fp32."""
    return value if WIDE else value.to(kind).to(tl.float32)


@triton.jit
def _sum(values):
    return tl.sum(tl.sum(values, 1, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _most(values):
    return tl.max(tl.max(values, 1, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _score(x, there, kind, SCORING: tl.constexpr, WIDE: tl.constexpr):
    """Return the scores of logits (rows, columns)."""
    if SCORING == "softmax":
        power = tl.where(there, tl.exp(x - _most(tl.where(there, x, -float("inf")))), 0.0)
        return _rounded(power / _sum(power), kind, WIDE)
    elif SCORING == "sigmoid":
        return _rounded(1.0 / (1.0 + tl.exp(-x)), kind, WIDE)
    else:  # the root of PyTorch's softplus, with its threshold
        power = tl.exp(tl.minimum(x, 20.0))
        # log1p: for small powers the sum with one loses their digits
        soft = tl.where(power < 1e-4, power - power * power / 2, tl.log(1.0 + power))
        return _rounded(tl.sqrt(_rounded(tl.where(x > 20.0, x, soft), kind, WIDE)), kind, WIDE)


@triton.jit
def _keys(values, places, there):
    """Return int64 in the order of values, then of falling places."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    order = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(there, order.to(tl.int64) * _PLACES + (_PLACES - 1 - places), _LEAST)


@triton.jit
def _kept_groups(
    values, places, there, kind,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr, TWO: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return (rows, 1) bool: whether a group is among the best."""
    keys = _keys(values, places, there)
    best = tl.max(keys, 1, keep_dims=True)
    rank = tl.sum(tl.where(keys == best, values, 0.0), 1, keep_dims=True)
    if TWO:
        second = tl.max(tl.where(keys == best, _LEAST, keys), 1, keep_dims=True)
        rank = _rounded(rank + tl.sum(tl.where(keys == second, values, 0.0), 1, keep_dims=True), kind, WIDE)
    group = tl.arange(0, ROWS)[:, None]
    left = _keys(rank, group, group < GROUPS)
    kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        first = left == tl.max(left, 0, keep_dims=True)
        kept = kept | first
        left = tl.where(first, _LEAST, left)
    return kept


@triton.jit
def _weighted(
    picked, kind, WIDE: tl.constexpr,
    PICKED_SCALE: tl.constexpr, TOTAL: tl.constexpr, TOTAL_CONSTANT: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Return the weights (1, chosen) of scores; those of no expert are zero."""
    if PICKED_SCALE != 1.0:
        picked = _rounded(picked * PICKED_SCALE, kind, WIDE)
    if TOTAL != "none":
        total = _rounded(tl.sum(picked, 1, keep_dims=True), kind, WIDE)
        if TOTAL == "plus":
            total = _rounded(total + TOTAL_CONSTANT, kind, WIDE)
        else:
            total = tl.where(total < TOTAL_CONSTANT, TOTAL_CONSTANT, total)
        picked = _rounded(picked / total, kind, WIDE)
    if SCALE != 1.0:
        picked = _rounded(picked * SCALE, kind, WIDE)
    return picked


# The kernel ----------------------------------------------------------------------------------------------------------
@triton.jit
def _route(
    logits, bias, weights, indices,
    EXPERTS: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOSEN: tl.constexpr, SCORING: tl.constexpr, LATE: tl.constexpr,
    TWO: tl.constexpr, LIMITED: tl.constexpr, TAKES_LIMITED: tl.constexpr, PICKED_SCALE: tl.constexpr,
    TOTAL: tl.constexpr, TOTAL_CONSTANT: tl.constexpr, SCALE: tl.constexpr, WIDE_SCORES: tl.constexpr,
    WIDE_COMPARED: tl.constexpr, CORRECTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = logits.dtype.element_ty
    group, member = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    expert = group * SIZE + member
    there = (group < GROUPS) & (member < SIZE)
    x = tl.load(logits + token * EXPERTS + expert, mask=there, other=0).to(tl.float32)
    scores = x if LATE else _score(x, there, kind, SCORING, WIDE_SCORES)
    compared = scores
    if CORRECTED:
        compared = _rounded(scores + tl.load(bias + expert, mask=there, other=0), kind, WIDE_COMPARED)
    if TOP_GROUPS < GROUPS:
        kept = _kept_groups(compared, expert, there, kind, GROUPS, TOP_GROUPS, ROWS, TWO, WIDE_COMPARED)
        compared = tl.where(kept, compared, LIMITED)
    keys = _keys(compared, expert, there)
    source = compared if TAKES_LIMITED else scores
    lane = tl.arange(0, CHOSEN)[None, :]
    picked, chosen = tl.full((1, CHOSEN), 0, tl.float32), tl.full((1, CHOSEN), 0, tl.int64)
    for at in tl.static_range(TOP_K):
        best = _most(keys)
        is_best = keys == best
        picked = tl.where(lane == at, _sum(tl.where(is_best, source, 0.0)), picked)
        chosen = tl.where(lane == at, _PLACES - 1 - (best & (_PLACES - 1)), chosen)
        keys = tl.where(is_best, _LEAST, keys)
    known = lane < TOP_K
    if LATE:
        picked = tl.where(known, _score(picked, known, kind, SCORING, WIDE_SCORES), 0.0)
    result = _weighted(picked, kind, WIDE_SCORES, PICKED_SCALE, TOTAL, TOTAL_CONSTANT, SCALE)
    tl.store(weights + token * TOP_K + lane, result.to(weights.dtype.element_ty), mask=known)
    tl.store(indices + token * TOP_K + lane, chosen, mask=known)
