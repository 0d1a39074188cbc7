"""A batch of a cache in pages, as other tensors hold it, and models whose attention reads pages."""

from __future__ import annotations

from typing import Any, cast

import torch
from decoding_models import absorbed, latent_modules, stock_model
from kernel_layers import built
from torch import Tensor

from ktc.model.attention.decode import DecodeAttention, Heads
from ktc.model.attention.decoding import decoding
from ktc.model.attention.int8_tensor import Int8Tensor
from ktc.model.attention.paged_tensor import PAGE, PagedTensor, PageTable
from ktc.model.kernels.attention_spec import AttentionSpec


def table_for(lengths: list[int], spare: int = 3, seed: int = 0) -> tuple[PageTable, int]:
    """Return pages in a random order for sequences of these lengths, and their number, of which some are unused."""
    counts = [-(-length // PAGE) for length in lengths]
    total = sum(counts) + spare
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).int()
    pages, at = torch.zeros(len(lengths), max(counts), dtype=torch.int32), 0
    for row, count in enumerate(counts):
        pages[row, :count] = order[at : at + count]
        at += count
    return PageTable(pages, torch.tensor(lengths)), total


def paged(held: Tensor, table: PageTable, total: int) -> Tensor:
    """Return (B, heads, L, d), aligned at the last position, in pages. Other places of the memory are NaN."""
    if isinstance(held, Int8Tensor):
        codes, scales = (paged(each, table, total) for each in (held.codes, held.scales))
        return Int8Tensor(codes, scales, held.dtype)
    _, heads, columns, width = held.shape
    unused = torch.nan if held.is_floating_point() else 77
    memory = torch.full((total, heads, PAGE, width), unused, dtype=held.dtype)
    for row, length in enumerate(table.lengths.tolist()):
        for at in range(0, length, PAGE):
            count = min(PAGE, length - at)
            first = columns - length + at
            memory[int(table.pages[row, at // PAGE]), :, :count] = held[row, :, first : first + count]
    return PagedTensor(memory, table, columns)


def paged_heads(heads: Heads, lengths: list[int]) -> Heads:
    """Return a cache in pages; values that are the keys stay so."""
    table, total = table_for(lengths)
    keys = paged(heads.keys, table, total)
    values = keys if heads.values is heads.keys else paged(heads.values, table, total)
    return Heads(keys, values, None if heads.more_keys is None else paged(heads.more_keys, table, total))


def padding_mask(lengths: list[int], columns: int) -> Tensor:
    """Return the mask (B, 1, 1, L) of sequences that are padded on the left."""
    return (torch.arange(columns) >= columns - torch.tensor(lengths)[:, None])[:, None, None]


def paged_model(family: str) -> Any:
    """Return a tiny model in fp32 whose attention is ktc's, by a scalar kernel."""
    spec = AttentionSpec("attention", "fp32", "scalar")
    decode = DecodeAttention(built((spec,)).kernel(spec.entry), 1)
    model: Any = stock_model(family, torch.float32)
    if any(latent_modules(model)):
        model = absorbed(model, absorb="decode")
        for module in cast("Any", latent_modules(model)):
            module.decode = decode
    else:
        for layer in model.model.layers:
            decoding(layer.self_attn, decode)
    return model
