"""Prompts of answers whose attention has sinks: PyTorch's fused attention, for blocks of rows.

Stock code keeps the scores of all heads: 2 GB in bf16 for 64 heads and 4,096 tokens, with further copies. Here
`sinks.attend` computes blocks of rows, and of the keys it is given those that some row of the block sees. The mask
says which: with a window they are few, and of a causal mask half. So masks of any kind are read as they are.

In: a call of many tokens without gradients. Out: the stock function's output, rounded once.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ktc.model.attention.interface import eager_function
from ktc.model.attention.sinks import AGREES, READ, ROUNDINGS, attend
from ktc.model.hf.patching import stock_class
from ktc.model.hf.private_api import attention_of

BLOCK: Final = 1024  # rows
COPIES: Final = 1 << 28  # bytes of keys and values, which are copied for each head
_ranges: Final[Any] = WeakIdKeyDictionary()  # of masks and their versions: one is read for all layers of a kind


def serves(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether a call is one of many tokens, without gradients, of plain tensors of one dtype and device."""
    from ktc.model.attention.decode import MOST_TOKENS  # the plan, which asks `computes_prompts`, needs none of these
    from ktc.model.linears.gemv import is_plain, is_traced

    if query.shape[2] <= MOST_TOKENS or torch.is_grad_enabled() or is_traced():
        return False
    if torch.is_autocast_enabled(query.device.type):
        return False
    same = all(is_plain(one) and (one.dtype, one.device) == (query.dtype, query.device) for one in (query, key, value))
    return same and (mask is None or (is_plain(mask) and _is_mask(mask, query, key)))


def _is_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    known = mask.dtype == torch.bool or mask.is_floating_point()
    if not known or mask.dim() != 4 or mask.device != query.device:
        return False
    batch, heads, rows, columns = mask.shape
    return batch in (1, len(query)) and heads == 1 and rows == query.shape[2] and columns >= key.shape[2]


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, s_aux: Tensor,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Compute query (B, h, T, D), key and value (B, g, S, D) -> (B, T, h, D). The sinks `s_aux` are (h,).

    Without a mask, rows are the last positions, and each sees those before it, or the last `window` of them.
    """
    rows, length, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    one_head = 4 * groups * len(key) * length * key.shape[3] * key.element_size()
    at_once = min(key.shape[1], max(1, COPIES // one_head))
    out = query.new_empty(len(query), rows, query.shape[1], value.shape[3])
    ranges = _seen_causally(rows, length, window) if mask is None else _seen(mask, rows, length)
    for block, (first, end) in zip(_blocks(rows), ranges, strict=True):
        seen = _causal(block, first, end, length - rows, window, query) if mask is None else mask[:, :, block]
        seen = seen if mask is None else seen[..., first:end]
        for head in range(0, key.shape[1], at_once):
            of_keys = slice(head, head + at_once)
            heads = slice(head * groups, (head + at_once) * groups)
            out[:, block, heads] = attend(
                None, query[:, heads, block], key[:, of_keys, first:end], value[:, of_keys, first:end], seen,
                scaling=scaling, s_aux=s_aux[heads],
            )[0]  # fmt: skip
    return out


def _blocks(rows: int) -> list[slice]:
    return [slice(begin, min(rows, begin + BLOCK)) for begin in range(0, rows, BLOCK)]


def _seen_causally(rows: int, length: int, window: int | None) -> list[tuple[int, int]]:
    before = length - rows
    return [
        (0 if window is None else max(0, before + block.start - window + 1), before + block.stop)
        for block in _blocks(rows)
    ]


def _causal(block: slice, first: int, end: int, before: int, window: int | None, query: Tensor) -> Tensor:
    """Return which of the keys from `first` until before `end` the rows of a block see: (1, 1, rows, keys)."""
    row = torch.arange(block.start, block.stop, device=query.device)[:, None] + before
    key = torch.arange(first, end, device=query.device)
    seen = key <= row
    return (seen if window is None else seen & (row - key < window))[None, None]


def _seen(mask: Tensor, rows: int, length: int) -> list[tuple[int, int]]:
    """Return the first key that some row of each block sees, and the one behind the last. Waits for the device."""
    state = None if mask.is_inference() else (length, mask._version)  # tensors of inference mode count no changes
    known = cast("tuple[tuple[int, int], list[tuple[int, int]]] | None", _ranges.get(mask))
    if known is not None and known[0] == state:
        return known[1]
    counted = torch.arange(length, device=mask.device)
    ends = list[Tensor]()
    for block in _blocks(rows):
        part = mask[:, :, block, :length]
        seen = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
        seen = seen.flatten(0, 2).any(0)
        ends += [torch.where(seen, counted, length).amin(), torch.where(seen, counted, -1).amax()]
    pairs = cast("list[tuple[int, int]]", torch.stack(ends).view(-1, 2).tolist())
    ranges = [(first, last + 1) if last >= first else (0, 1) for first, last in pairs]  # a block may see the sink alone
    if state is not None:
        _ranges[mask] = state, ranges
    return ranges


def computes_prompts(module: nn.Module, dtype: torch.dtype, device: torch.device | str = "cpu") -> bool:
    """Return whether these blocks compute what the model's own eager function does, on a small example.

    Of `module` the sizes and the class are read, so that it may be on meta tensors.
    """
    if not isinstance(getattr(module, "sinks", None), Tensor) or not all(hasattr(module, name) for name in READ):
        return False
    config: Any = getattr(module, "stock_config", None) or getattr(module, "config", None)
    if attention_of(config) != "eager":
        return False
    made: Any = module
    sizes = made.sinks.numel(), int(made.num_key_value_groups), int(made.head_dim)
    return _agrees(stock_class(module), sizes, float(made.scaling), dtype, torch.device(device))


@functools.cache
def _agrees(
    stock: type[nn.Module], sizes: tuple[int, int, int], scaling: float, dtype: torch.dtype, device: torch.device
) -> bool:
    function, (heads, groups, width) = eager_function(stock), sizes
    if function is None or heads % groups:
        return False
    generator, tokens = torch.Generator().manual_seed(0), 40

    def random(*shape: int, of: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, of)

    for of, bound in {torch.float32: AGREES, dtype: max(AGREES, ROUNDINGS * torch.finfo(dtype).eps)}.items():
        query = random(2, heads, tokens, width, of=of)
        key, value = (random(2, heads // groups, tokens, width, of=of) for _ in range(2))
        sinks, hidden = random(heads, of=of), torch.ones(tokens, tokens, device=device, dtype=torch.bool).triu(1)
        mask = torch.zeros(1, 1, tokens, tokens, device=device, dtype=of).masked_fill(hidden, torch.finfo(of).min)
        module = SimpleNamespace(
            num_key_value_groups=groups, head_dim=width, scaling=scaling, sinks=sinks, training=False
        )
        given: dict[str, Any] = {"scaling": scaling, "dropout": 0.0, "s_aux": sinks}
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            try:
                wanted = function(module, query, key, value, mask, **given)[0]
                ours = attend_in_blocks(query, key, value, mask, scaling=scaling, s_aux=sinks)
            except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes other arguments
                return False
        if not bool((ours - wanted).float().abs().max() <= bound * wanted.float().abs().max()):
            return False
    return True
