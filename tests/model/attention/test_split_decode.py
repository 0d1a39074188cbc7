"""Attention of few new tokens on a GPU: the kernels beside attention in fp64, and models that decode by them.

Without a GPU, Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decoding_models import CHUNKS, absorbed, decoded, difference, latent_modules, stock_model
from recorded_steps import eager_graphs
from torch import Tensor, nn
from transformers import DynamicCache

from ktc.diagnostics import HostLacks
from ktc.model.attention import split_decode, split_kernels
from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.decoding import decoding
from ktc.model.attention.split_decode import (
    SplitDecode,
    check_split_decode,
    has_kernels,
    reference,
    relative_error,
)

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
INTERPRETED = pytest.mark.skipif(DEVICE.type == "cuda", reason="these models are on the CPU, which has an interpreter")
BOUND = {torch.bfloat16: 0.01, torch.float16: 2e-3, torch.float32: 1e-5}
# Sequences, query heads, key heads, tokens, positions, widths of keys, of rotary keys, of values (0: latents).
QUICK = [
    (1, 4, 4, 1, 1, 64, 0, 64, torch.float32),
    (2, 8, 2, 1, 77, 128, 0, 128, torch.bfloat16),
    (1, 8, 1, 3, 150, 192, 0, 128, torch.float32),
    (1, 16, 1, 1, 70, 512, 64, 0, torch.bfloat16),
    (3, 16, 1, 2, 33, 24, 8, 0, torch.float32),
    (1, 4, 2, 1, 40, 96, 0, 0, torch.float32),
]
SLOW = [
    (1, 16, 1, 1, 515, 256, 0, 256, torch.bfloat16),
    (1, 64, 8, 1, 1000, 64, 0, 64, torch.float16),
    (2, 128, 1, 1, 300, 512, 64, 0, torch.float32),
    (1, 32, 2, 16, 200, 96, 0, 80, torch.float32),
    (5, 32, 4, 1, 4097, 128, 0, 128, torch.bfloat16),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


def drawn(case: tuple[Any, ...]) -> tuple[Tensor, KVCacheView]:
    B, H, K, T, L, width, rope, value, dtype = case
    generator = torch.Generator().manual_seed(L)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    keys = random(B, K, L, width)
    kv = KVCacheView(keys, random(B, K, L, value) if value else keys, random(B, K, L, rope) if rope else None)
    return random(B, H, T, width + rope), kv


def masks(case: tuple[Any, ...]) -> Iterator[Tensor | None]:
    """None, a window over a longer capacity, and numbers that are added, which hide the first of several tokens."""
    B, T, L, dtype = case[0], case[3], case[4], case[8]
    yield None
    at, last = torch.arange(L + 5), torch.arange(T)[:, None] + max(L - T, 0)
    yield ((at <= last) & (at > last - 40)).expand(B, 1, T, L + 5).contiguous().to(DEVICE)
    added = torch.randn(B, 1, T, L, generator=torch.Generator().manual_seed(0))
    added[:, :, 0, : L // 3 if T == 1 else L] = torch.finfo(dtype).min
    yield added.to(DEVICE, dtype)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_it_is_attention_in_fp64(case: tuple[Any, ...]) -> None:
    query, kv = drawn(case)
    sinks = torch.randn(case[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for mask, more in zip(masks(case), ({}, {"sinks": sinks}, {"sinks": sinks}), strict=True):
        decode = SplitDecode(DEVICE.type)
        with torch.no_grad():
            assert decode.serves(query, kv, mask)
            found = decode(query, kv, scale=0.1, mask=mask, **more)
        assert relative_error(found, reference(query, kv, scale=0.1, mask=mask, **more)) <= BOUND[case[8]]


def test_a_token_that_sees_nothing_is_zero_and_unseen_blocks_are_not_read() -> None:
    query, kv = drawn((2, 8, 2, 1, 300, 64, 0, 64, torch.float32))
    mask = torch.zeros(2, 1, 1, 300, dtype=torch.bool, device=DEVICE)
    mask[1, ..., 130:190] = True
    kv.keys[:, :, :64] = kv.values[:, :, :64] = torch.nan
    found = split_kernels.attend(query, kv, scale=0.1, mask=mask)
    assert not found[0].any()
    seen = KVCacheView(kv.keys[1:, :, 130:190], kv.values[1:, :, 130:190])
    assert relative_error(found[1:], reference(query[1:], seen, scale=0.1)) <= 1e-5


def test_rows_of_different_lengths_do_not_depend_on_the_capacity() -> None:
    query, kv = drawn((3, 4, 2, 1, 260, 32, 0, 32, torch.float32))
    lengths = torch.tensor([1, 200, 77], device=DEVICE)
    mask = (torch.arange(260, device=DEVICE) < lengths[:, None]).view(3, 1, 1, 260)
    found = split_kernels.attend(query, kv, scale=0.2, mask=mask)
    for at, length in enumerate(lengths.tolist()):
        row = KVCacheView(*(tensor[at : at + 1, :, :length] for tensor in kv.tensors))
        assert relative_error(found[at : at + 1], reference(query[at : at + 1], row, scale=0.2)) <= 1e-5


def test_few_kernels_serve_all_lengths_rows_and_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kernel for each set of constants, and for each set of integers that are multiples of 16."""
    found = {name: set[object]() for name in ("_split", "_merge")}

    class Launched:
        def __init__(self, name: str) -> None:
            self.kernel, self.kinds = getattr(split_kernels, name), found[name]

        def __getitem__(self, _: object) -> Any:
            return self.launch

        def launch(self, *args: Any, **constants: Any) -> None:
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            free = split_kernels.NOT_SPECIALISED
            numbers = {name: value for name, value in named.items() if isinstance(value, int) and name not in free}
            kinds = {name: (value == 1, value % 16 == 0) for name, value in numbers.items()}
            pointers = {name: value.data_ptr() % 16 for name, value in named.items() if isinstance(value, Tensor)}
            self.kinds.add((*kinds.items(), *pointers.items(), *constants.items()))

    for name in found:
        monkeypatch.setattr(split_kernels, name, Launched(name))
    for tokens in range(1, 17):
        for rows, positions in ((1, 33), (3, 77), (5, 1000)):
            query, kv = drawn((rows, 16, 1, tokens, positions, 512, 64, 0, torch.bfloat16))
            for mask in (None, torch.zeros(rows, 1, tokens, positions, dtype=torch.bool, device=DEVICE)):
                split_kernels.attend(query, kv, scale=0.1, mask=mask)
    assert len(found["_split"]) == 4 and len(found["_merge"]) == 2  # one token or several, with a mask or without


def test_results_are_equal_to_the_bit_from_run_to_run() -> None:
    query, kv = drawn((2, 8, 2, 1, 300, 64, 0, 64, torch.bfloat16))
    first, *others = [split_kernels.attend(query, kv, scale=0.1) for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


def test_memory_of_a_gpu_bounds_the_tiles_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory in (48 << 10, 99 << 10, 227 << 10):
        monkeypatch.setattr(split_kernels, "_gpu", lambda device, memory=memory: (100, memory))
        for case in (*QUICK, *SLOW):
            query, kv = drawn((1, *case[1:4], 64, *case[5:]))
            tiling = split_kernels.tiling_of(query, kv)
            row = query.shape[-1] + (0 if kv.values is kv.keys else kv.values.shape[-1])
            taken = tiling.positions * row * query.element_size() * tiling.stages
            assert taken <= memory or tiling.stages == 1


# Calls of models -----------------------------------------------------------------------------------------------------
class Counted(SplitDecode):
    calls: list[int] = []  # noqa: RUF012 - of all modules of a test

    def __call__(self, query: Tensor, *args: Any, **options: Any) -> Tensor:
        self.calls.append(query.shape[2])
        return super().__call__(query, *args, **options)


def split(name: str) -> tuple[nn.Module, nn.Module]:
    """A model on the device, and the same whose attention is split."""
    stock = stock_model(name, torch.float32)
    Counted.calls.clear()
    model = absorbed(stock, absorb="decode") if any(latent_modules(stock)) else copy.deepcopy(stock)
    for layer in model.model.layers:
        if any(latent_modules(stock)):
            layer.self_attn.decode = Counted("cpu")
        else:
            decoding(layer.self_attn, Counted("cpu"))
    return stock, model


# Grouped queries; sinks, windows and masks that are added; latents; a soft cap, which stays with the stock function.
FAMILIES = [("gpt_oss", True), ("gemma2", False), ("qwen3_moe", True), ("deepseek_v2", True)]


@INTERPRETED
@pytest.mark.parametrize(
    ("family", "taken"), [*FAMILIES[:2], *(pytest.param(*row, marks=pytest.mark.slow) for row in FAMILIES[2:])]
)
def test_few_tokens_of_a_model_are_split(family: str, taken: bool) -> None:
    stock, model = split(family)
    assert difference(decoded(model), decoded(stock)) <= 1e-5
    layers = model.config.num_hidden_layers
    assert Counted.calls == ([chunk for chunk in CHUNKS[1:] for _ in range(layers)] if taken else [])


@INTERPRETED
@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
def test_captured_steps_are_split(family: str) -> None:
    stock, model = split(family)
    graphs, ids = eager_graphs(), torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    cache, mask = DynamicCache(config=model.config), torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        model(input_ids=ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], past_key_values=cache)
        Counted.calls.clear()
        for at in range(8, 11):
            found = graphs.step(
                model, input_ids=ids[:, at : at + 1], attention_mask=mask[:, : at + 1],
                position_ids=positions[:, at : at + 1], past_key_values=cache, use_cache=True, return_dict=True,
            ).logits[:, -1]  # fmt: skip
            whole = stock(input_ids=ids[:, : at + 1], attention_mask=mask[:, : at + 1],
                          position_ids=positions[:, : at + 1], use_cache=False).logits[:, -1]  # fmt: skip
            assert difference(found, whole) <= 1e-5
    assert set(Counted.calls) == {1}


def test_calls_that_it_does_not_take() -> None:
    query, kv = drawn((1, 4, 2, 1, 20, 32, 0, 32, torch.float32))
    decode = SplitDecode(DEVICE.type)
    assert not decode.serves(query, kv, None)  # gradients
    with torch.no_grad():
        assert decode.serves(query, kv, None)
        assert not SplitDecode("cpu" if DEVICE.type == "cuda" else "cuda").serves(query, kv, None)
        assert not decode.serves(query, KVCacheView(kv.keys, kv.values.double()), None)
        assert not decode.serves(query, kv, torch.ones(1, 4, 1, 20, dtype=torch.bool, device=DEVICE))
        assert not decode.serves(query.expand(-1, -1, 17, -1), kv, None)
        assert not decode.serves(query, kv, torch.ones(1, 1, 1, 19, dtype=torch.bool, device=DEVICE))


# What is missing or wrong --------------------------------------------------------------------------------------------
def test_a_host_without_triton_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    query, kv = drawn((1, 4, 2, 1, 20, 32, 0, 32, torch.float32))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    has_kernels.cache_clear()
    try:
        with caplog.at_level(logging.WARNING), torch.no_grad():
            assert not any(SplitDecode(DEVICE.type).serves(query, kv, None) for _ in range(3))
    finally:
        has_kernels.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "Triton is not installed: attention of new tokens on a GPU is computed by PyTorch, which is slower"
    ]


def test_kernels_are_checked_before_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_decode, "_SHAPES", split_decode._SHAPES[:1])
    check_split_decode.__wrapped__(DEVICE)
    monkeypatch.setattr(split_kernels, "attend", lambda query, kv, **_: query.new_zeros(2, 1, 8, 128))
    with pytest.raises(HostLacks, match="attention of new tokens is wrong on") as refused:
        check_split_decode.__wrapped__(DEVICE)
    assert refused.value.diagnostics[0].code == "H248"


# On a GPU ------------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize("case", [*QUICK, *SLOW], ids=lambda case: "-".join(map(str, case)))
def test_a_graph_follows_the_lengths_in_its_mask(case: tuple[Any, ...]) -> None:
    query, kv = drawn(case)
    mask = torch.ones(case[0], 1, case[3], case[4], dtype=torch.bool, device=DEVICE)
    split_kernels.attend(query, kv, scale=0.1, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = split_kernels.attend(query, kv, scale=0.1, mask=mask)
    for length in sorted({case[4], 1, case[4] // 2 + 1}):
        mask.copy_((torch.arange(case[4], device=DEVICE) < length).expand_as(mask))
        graph.replay()
        assert relative_error(out, reference(query, kv, scale=0.1, mask=mask)) <= BOUND[case[8]]
