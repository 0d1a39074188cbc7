"""The bytes that a decode step cannot do without: active weights as the file stores them, and keys and values.

In: the tensors of the file, the config, a case. Out: bytes. Over the read bandwidth they are the floor of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ktc.tools.bench.decode.model_file import FileTensor
from ktc.tools.bench.decode.request import Case

_CACHED_BYTES = 2  # of a key or a value: bf16 here, fp16 in llama.cpp


def weight_bytes(tensors: Sequence[FileTensor], config: Any, batch: int) -> float:
    """Return the bytes of the weights that a step of `batch` tokens reads.

    Experts count as often as a router that chooses independently and evenly is expected to hit them.
    """
    missed = (1 - config.num_experts_per_tok / config.num_experts) ** batch
    total = 0.0
    for tensor in tensors:
        if "_exps" in tensor.name:
            total += tensor.nbytes * (1 - missed)
        elif tensor.name.startswith("token_embd"):
            total += tensor.nbytes * batch / tensor.shape[0]
        else:
            total += tensor.nbytes
    return total


def cache_bytes(config: Any, case: Case) -> int:
    """Return the bytes of keys and values of a decode step."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * _CACHED_BYTES
    return case.batch * case.tokens * per_token


def floor_bytes(tensors: Sequence[FileTensor], config: Any, case: Case) -> float:
    """Return all bytes of a decode step."""
    return weight_bytes(tensors, config, case.batch) + cache_bytes(config, case)
