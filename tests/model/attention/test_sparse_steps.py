"""Sparse attention in recorded steps on a GPU: its kernels beside the reference, and models that decode by them.

Without a GPU, Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoding_models import absorbed, difference, latent_modules, stock_model
from engine_answers import Answers, alone, config_of
from recorded_steps import eager_graphs
from torch import Tensor
from transformers import DynamicCache

from ktc.diagnostics import HostLacks
from ktc.inference.serving import row_memory
from ktc.inference.serving.engine import Engine
from ktc.inference.serving.graph_rows import GraphRows
from ktc.inference.serving.model_runner import ModelRunner
from ktc.inference.serving.pages import LayerRow
from ktc.inference.serving.request import Limits, Request
from ktc.inference.serving.row_cache import CachedRow
from ktc.inference.serving.row_memory import RowMemory, memory_shape
from ktc.model.attention import sparse_check, sparse_kernels
from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.decoding import decoding
from ktc.model.attention.key_codes import encode, estimates
from ktc.model.attention.selection import attend_chosen, choose, chosen_of, visible_positions
from ktc.model.attention.sparse import Sparse, follows_cache, indexed_layers, unindexed
from ktc.model.attention.sparse_check import check_sparse_steps
from ktc.model.attention.sparse_kernels import StepKeys, attend_sparsely
from ktc.model.attention.sparsity import IndexFormat, Sparsity
from ktc.model.attention.step_index import IndexedLayer, unfit_width
from ktc.model.decode_steps.cuda_graph import DecodeGraphs

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
# Sequences, query heads, key heads, positions, widths of keys, of rotary keys, of values (0: latents), codes, who
# chooses.
CASES: list[tuple[int, int, int, int, int, int, int, torch.dtype, IndexFormat, bool]] = [
    (1, 4, 2, 700, 64, 0, 64, torch.float32, "int4", False),
    (2, 8, 2, 600, 128, 0, 128, torch.bfloat16, "int4", True),
    (2, 16, 1, 500, 256, 64, 0, torch.bfloat16, "sign", True),
    (1, 4, 1, 1200, 128, 0, 0, torch.float32, "sign", False),
    (1, 4, 2, 600, 192, 0, 128, torch.float32, "int4", False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_step_reads_what_the_reference_chooses(case: tuple[Any, ...]) -> None:
    B, H, K, L, width, rope, value, dtype, index, shared = case
    generator = torch.Generator().manual_seed(L)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    keys = random(B, K, L, width)
    kv = KVCacheView(keys, random(B, K, L, value) if value else keys, random(B, K, L, rope) if rope else None)
    query, sinks = 2 * random(B, H, 1, width + rope), random(H)
    end, sparsity = L - 60, Sparsity(64, 4, 16, index, shared)
    lengths = [end, end - 150][:B]
    columns = torch.arange(L, device=DEVICE)
    mask = torch.stack([(columns < end) & (columns >= end - length) for length in lengths])[:, None, None]
    layer = IndexedLayer(index, rope > 0, sparsity.budget)
    second = kv.values if kv.rope_keys is None else kv.rope_keys
    coded = layer.index(keys, second)
    for row, length in enumerate(lengths):  # the step itself adds the last key
        layer.encode(coded, keys, second, row, slice(end - length, end - 1))
    step = StepKeys(kv, coded, torch.tensor([end - 1], device=DEVICE), mask)
    summed, choice = attend_sparsely(query, step, scale=0.1, sparsity=sparsity, sinks=sinks)

    codes = encode(
        torch.cat([tensor for tensor in (kv.keys, kv.rope_keys) if tensor is not None], -1), coded.mean, index
    )
    assert torch.equal(coded.scales[:, :, end - 1], codes.scales[:, :, end - 1])
    visible = visible_positions(mask, B, 1, L, DEVICE)
    wanted = choose(estimates(query, codes, index, L, 0.1), K, visible, sparsity)
    rows = torch.zeros(choice.numbers.shape, dtype=torch.bool, device=DEVICE)
    for row, selector in torch.cartesian_prod(torch.arange(B), torch.arange(rows.shape[1])).tolist():
        count = wanted.counts[row, 0, selector]
        rows[row, selector, wanted.positions[row, 0, selector, :count].long()] = True
    taken = choice.taken(sparsity.k)
    missing, more = int((rows & ~taken).sum()), int((taken & ~rows).sum())
    assert missing <= (0.02 * int(rows.sum()) if shared else 0)
    assert more <= 0.06 * int(rows.sum())  # those with the number of the last
    expected = attend_chosen(query, kv, chosen_of(taken[:, None], L), scale=0.1, sinks=sinks).double()
    error = float((summed.double() - expected).norm() / expected.norm())
    assert error <= (1e-5 if dtype == torch.float32 else 0.01)


def test_rows_of_few_positions_read_all_of_them() -> None:
    keys, values = torch.randn(2, 1, 2, 300, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    query, kv = torch.randn(1, 2, 1, 64, device=DEVICE), KVCacheView(keys, values)
    layer = IndexedLayer("int4", False, 80)
    coded = layer.index(keys, values)
    layer.encode(coded, keys, values, 0, slice(230, 289))
    mask = ((torch.arange(300, device=DEVICE) >= 230) & (torch.arange(300, device=DEVICE) < 290)).view(1, 1, 1, 300)
    step = StepKeys(kv, coded, torch.tensor([289], device=DEVICE), mask)
    _, choice = attend_sparsely(query, step, scale=0.125, sparsity=Sparsity(64, 4, 12, "int4", True))
    assert torch.equal(choice.taken(64)[0, 0], mask[0, 0, 0])


@pytest.mark.parametrize(("width", "rope", "fits"), [
    (128, 0, True), (512, 64, True), (192, 0, True), (256, 0, True), (80, 0, False), (224, 0, False),
    (512, 16, False), (64, 64, False),
])  # fmt: skip
def test_widths_of_codes(width: int, rope: int, fits: bool) -> None:
    assert (not unfit_width(width, rope)) == fits


# Models --------------------------------------------------------------------------------------------------------------
@pytest.fixture(params=[pytest.param("qwen3_moe", marks=pytest.mark.slow), "deepseek_v2"])
def sparse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that reads all of up to 124 positions by the kernels of steps, in memory for more."""
    monkeypatch.setattr("ktc.model.attention.sparse._DENSE_STEPS", 0)
    # Products of int8 on a GPU have 32 terms at least.
    latent_sizes = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 32}
    model: Any = stock_model(
        request.param, torch.float32, **latent_sizes if "v2" in request.param else {"head_dim": 32}
    )
    latent = any(latent_modules(model))
    model = (absorbed(model) if latent else model).to(DEVICE)
    answers = Sparse(Sparsity(100, 4, 20, "int4", shared=latent), None)
    model.set_experts_implementation("batched_mm")  # others wait for the GPU, which no capture may
    module = model.model.layers[1].self_attn  # one layer: the interpreter is slow
    if latent:
        module.sparse = answers
        follows_cache(type(module)).put_on(module)
    else:
        decoding(module, None, answers)
    model.decode_graphs = DecodeGraphs() if torch.cuda.is_available() else eager_graphs()
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call of the kernels."""
    rows, attend = list[int](), sparse_kernels.attend_sparsely

    def counted(query: Tensor, *given: Any, **more: Any) -> Any:
        rows.append(len(query))
        return attend(query, *given, **more)

    monkeypatch.setattr(sparse_kernels, "attend_sparsely", counted)
    return rows


@torch.no_grad()
def test_recorded_steps_have_codes_of_padded_rows(sparse: Any, calls: list[int]) -> None:
    ids = torch.randint(3, 90, (2, 22), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    wanted = sparse(input_ids=ids, attention_mask=mask, position_ids=places).logits
    cache = DynamicCache(config=sparse.config)
    sparse(input_ids=ids[:, :20], attention_mask=mask[:, :20], position_ids=places[:, :20], past_key_values=cache)
    assert not calls
    for at in range(20, 22):
        if at == 21:  # the memory is left, and taken again
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        given = {"input_ids": ids[:, at : at + 1], "position_ids": places[:, at : at + 1], "past_key_values": cache}
        logits = sparse.decode_graphs.step(sparse, **given, attention_mask=mask[:, : at + 1]).logits
        assert difference(logits[:, 0], wanted[:, at]) <= 1e-5
    assert set(calls) == {2}


@torch.no_grad()
def test_recorded_steps_over_few_positions_are_dense_and_say_so(
    sparse: Any, calls: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ktc.model.attention.sparse._DENSE_STEPS", 256)
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    wanted, cache, mask = sparse(input_ids=ids).logits, DynamicCache(config=sparse.config), torch.ones_like(ids)
    sparse(input_ids=ids[:, :8], past_key_values=cache)
    given = {"input_ids": ids[:, 8:], "position_ids": torch.full_like(ids[:, 8:], 8), "past_key_values": cache}
    logits = sparse.decode_graphs.step(sparse, **given, attention_mask=mask).logits
    assert difference(logits[:, 0], wanted[:, 8]) <= 1e-5
    assert not calls
    assert "positions stay dense, which takes no longer on a GPU" in caplog.text


@pytest.mark.slow
def test_rows_of_running_batches_keep_their_codes(
    sparse: Any, calls: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    config, answers = config_of(sparse), Answers()
    prompts = [(5, 9, 33), tuple(range(20, 43)), (7,)]
    engine = Engine(ModelRunner(sparse), Limits(batch=2), answers)
    engine.start()
    try:
        for at, prompt in enumerate(prompts):  # rows leave and take places of others
            engine.submit(Request(str(at), prompt, 3 + at, config))
        found = [answers.wait(str(at))[0] for at in range(3)]
    finally:
        engine.stop()
    assert "L451" not in caplog.text and max(calls) == 2
    assert found == [alone(sparse, prompt, config, 3 + at) for at, prompt in enumerate(prompts)]


def test_kernels_that_a_gpu_cannot_run_leave_recorded_steps_dense(sparse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def lacking(*_: Any, **__: Any) -> Any:
        raise OutOfResources(259_072, 232_448, "shared memory")

    module = sparse.model.layers[1].self_attn
    assert list(indexed_layers(sparse, DEVICE.type)) == [1]
    sparse_check._check.cache_clear()
    monkeypatch.setattr(sparse_kernels, "attend_sparsely", lacking)
    check_sparse_steps([module], DEVICE)
    sparse_check._check.cache_clear()
    assert "shared memory, Required: 259072" in unindexed(module, DEVICE.type)
    assert not indexed_layers(sparse, DEVICE.type)


def test_devices_without_kernels_have_no_sparse_steps(sparse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sparse.model.layers[1].self_attn
    monkeypatch.setattr("ktc.model.attention.sparse.has_kernels", lambda _: False)
    assert f"has no kernels for {DEVICE}" in unindexed(module, DEVICE.type)
    monkeypatch.setattr(sparse_check, "_check", None)
    check_sparse_steps([module], DEVICE)


def test_the_size_of_a_cache_has_the_codes_of_its_keys(sparse: Any) -> None:
    counted = ModelRunner(sparse).size.nbytes(500)
    row = ModelRunner(sparse).example
    assert row is not None
    memory = RowMemory(1, 0, GraphRows(sparse, sparse.decode_graphs).indexed)
    memory.join(row)
    slots, positions = memory_shape(1, 500)
    assert counted == memory.nbytes // (memory.slots * memory.capacity) * slots * positions


def test_rows_that_outgrow_the_budget_have_codes_of_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_memory, "capacity_for", lambda positions: -(-positions // 16) * 16)
    monkeypatch.setattr(row_memory, "ROOM", 2)
    memory = RowMemory(1, 0, {0: IndexedLayer("int4", False, 40)})
    keys = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    memory.join(CachedRow(20, (LayerRow(keys, keys),), (None,)))
    for _ in range(40):
        slots = memory.begin_step()
        (layer,) = memory.places(slots).cache.layers
        column, used = memory._end, slice(memory._end - memory.lengths[0], memory._end)
        if memory.capacity > 40:
            assert bool(layer.index.scales[0, :, used].all())
            layer.index.scales[0, :, column] = 1.0  # as a sparse step does
        layer.keys[0, :, column] = layer.values[0, :, column] = torch.randn(32)
        memory.appended()
    assert memory.capacity > 48


def test_kernels_are_checked_before_their_first_use(sparse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_check, "_LENGTH", 130)
    monkeypatch.setattr(sparse_check, "_ROOM", 192)
    module = sparse.model.layers[1].self_attn
    sparse_check._check.cache_clear()
    check_sparse_steps([module], DEVICE)
    sparse_check._check.cache_clear()
    attend = sparse_kernels.attend_sparsely

    def doubled(*given: Any, **more: Any) -> Any:
        summed, choice = attend(*given, **more)
        return 2 * summed, choice

    monkeypatch.setattr(sparse_kernels, "attend_sparsely", doubled)
    with pytest.raises(HostLacks, match="sparse attention of new tokens is wrong on") as refused:
        check_sparse_steps([module], DEVICE)
    assert refused.value.diagnostics[0].code == "H248"
