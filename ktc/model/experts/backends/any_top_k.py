"""Calls with another number of experts per token than a kernel was built for.

A kernel has its `top_k` as a constant, and a router may choose more or fewer: its `top_k` is an attribute that users
set. In: a call's tensors with any number K. Out: the same call as rows of `top_k` choices, and its result per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RoutedCall = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A call of experts with rows (T, H), indices (T, K) and weights (T, K)."""


def with_top_k(top_k: int, call: RoutedCall, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the result of `call`, which takes `top_k` choices, for any number of choices: (T, H)."""
    if index_TK.shape[1] == top_k:
        return call(x_TH, index_TK, weights_TK)
    return per_token(call(*rows_of(top_k, x_TH, index_TK, weights_TK)), x_TH.shape[0])


def rows_of(top_k: int, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the choices of each token into rows of `top_k`: `(T, H), (T, K), (T, K) -> (R, H), (R, top_k), (R, top_k)`.

    The rows of a token follow each other. Free places repeat the token's first expert with weight 0.
    """
    tokens, given = index_TK.shape
    rows = -(-given // top_k)
    free = rows * top_k - given
    index = torch.cat((index_TK, index_TK[:, :1].expand(tokens, free)), 1)
    weights = torch.cat((weights_TK, weights_TK.new_zeros(tokens, free)), 1)
    return x_TH.repeat_interleave(rows, 0), index.reshape(-1, top_k), weights.reshape(-1, top_k)


def per_token(out_RH: Tensor, tokens: int) -> Tensor:
    """Add the rows of each token: `(R, H) -> (T, H)`."""
    return out_RH.view(tokens, -1, out_RH.shape[1]).sum(1) if tokens else out_RH
