"""Decoding steps at fixed addresses: those of the model itself, whatever happens to its cache, adapters and hooks."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding_models import absorbed, difference, generated, stock_model
from recorded_steps import LastMoment, call_at_once, eager_graphs, record_eagerly
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, masking_utils
from transformers.cache_utils import DynamicLayer

from ktc.model.decode_steps import cuda_graph, step_memory
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.decode_steps.growing_cache import GrowingLayer, growing
from ktc.model.decode_steps.model_state import ModelState
from ktc.model.decode_steps.step_memory import StepMemory, capacity_for, length_of, unfit

PROMPT, STEPS = 7, 6
CLOSE = 1e-6  # routers compute in fp32


class Sequences:
    """Sequences of a model, the last ones padded on the left, that are continued token by token."""

    def __init__(self, model: PreTrainedModel, batch: int, prompt: int = PROMPT) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        ids = torch.randint(
            3, model.config.vocab_size, (batch, prompt + 64), generator=torch.Generator().manual_seed(1)
        )
        self.ids, self.mask = ids, torch.ones_like(ids)
        self.mask[1:, :3] = 0
        self.length = 0
        self.take(model, prompt)

    def take(self, step: Callable[..., Any], tokens: int = 1) -> Tensor:
        """The logits of the next tokens."""
        end = self.length + tokens
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, self.length : end]
        with torch.no_grad():
            out = step(
                input_ids=self.ids[:, self.length : end], attention_mask=self.mask[:, :end], position_ids=positions,
                past_key_values=self.cache, use_cache=True, return_dict=True,
            )  # fmt: skip
        self.length = end
        return out.logits[:, -1]

    def exact(self) -> Tensor:
        """The same logits as one forward without a cache computes them."""
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, : self.length]
        with torch.no_grad():
            out = self.model(
                input_ids=self.ids[:, : self.length], attention_mask=self.mask[:, : self.length],
                position_ids=positions, use_cache=False,
            )  # fmt: skip
        return out.logits[:, -1]


def graphs_of(model: PreTrainedModel) -> tuple[DecodeGraphs, Callable[..., Any]]:
    graphs = eager_graphs()
    return graphs, lambda **inputs: graphs.step(model, **inputs)


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if "L451" in record.getMessage())


# Windows and sinks (gpt_oss), latents, a soft cap (gemma2, whose stock code has no numbers for padded rows).
@pytest.mark.parametrize(
    ("family", "batch"), [("gpt_oss", 1), ("gpt_oss", 3), ("deepseek_v2", 1), ("deepseek_v2", 3), ("gemma2", 1)]
)
def test_a_step_is_that_of_the_model(family: str, batch: int, caplog: pytest.LogCaptureFixture) -> None:
    model = stock_model(family)
    graphs, step = graphs_of(model)
    sequences = Sequences(model, batch)
    for _ in range(STEPS):
        assert difference(sequences.take(step), sequences.exact()) <= CLOSE
    assert not told(caplog)
    assert len(graphs._steps) == 1
    assert length_of(sequences.cache) == PROMPT + STEPS


def test_a_mask_that_transformers_cannot_make_is_made_by_the_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kinds: dict[str, Any] = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

    def as_before(*, or_mask_function: object, and_mask_function: object, **known: Any) -> Any:
        raise TypeError("unexpected keyword argument `block_sequence_ids`")  # of transformers 5.17

    monkeypatch.setitem(kinds, "chunked_attention", as_before)
    model = stock_model("llama4_text", attention_chunk_size=8)
    _, step = graphs_of(model)
    sequences = Sequences(model, 3)
    for _ in range(STEPS):
        assert difference(sequences.take(step), sequences.exact()) <= CLOSE
    assert not told(caplog)


def test_the_error_that_broke_a_capture_is_the_reason(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    graphs = DecodeGraphs(StepRecorder(record=broken, device="cpu"))
    Sequences(model, 1).take(lambda **inputs: graphs.step(model, **inputs))
    assert "operation not permitted" in told(caplog)
    assert "previous error" not in told(caplog)


def test_absorbed_attention_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = absorbed(stock_model("deepseek_v2"), absorb="decode")
    _, step = graphs_of(model)
    sequences = Sequences(model, 2)
    for _ in range(STEPS):
        assert difference(sequences.take(step), sequences.exact()) <= CLOSE
    assert not told(caplog)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return stock_model("gpt_oss")


def test_steps_of_the_model_and_captured_ones_follow_each_other(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    sequences = Sequences(model, 2)
    for tokens in (1, 1, 5, 1, 3, 1, 1):
        found = sequences.take(step if tokens == 1 else model, tokens)
        assert difference(found, sequences.exact()) <= CLOSE
    assert len(graphs._memories) == 1


def test_a_cache_that_outgrows_its_memory_moves_to_a_larger_one(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    sequences = Sequences(model, 1, prompt=254)
    for _ in range(4):
        assert difference(sequences.take(step), sequences.exact()) <= CLOSE
    assert [memory.capacity for memory in graphs._memories] == [256, 512]
    assert graphs._memories[0].is_free(DynamicCache())


@pytest.fixture
def memories_are_long_from_256_positions_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cuda_graph, step_memory):
        monkeypatch.setattr(module, "DOUBLED", 256)


@pytest.mark.usefixtures("memories_are_long_from_256_positions_on")
def test_a_long_memory_is_dropped_when_its_cache_outgrows_it(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    sequences = Sequences(model, 1, prompt=258)
    sequences.take(step)
    assert [memory.capacity for memory in graphs._memories] == [320]
    old, kept = weakref.ref(graphs._memories[0]), sequences.cache.layers[0].keys
    content = kept.clone()
    sequences.take(model, 61)
    assert difference(sequences.take(step), sequences.exact()) <= CLOSE
    assert [memory.capacity for memory in graphs._memories] == [384]
    assert len(graphs._steps) == 1
    assert old() is None
    assert torch.equal(kept, content)


@pytest.mark.usefixtures("memories_are_long_from_256_positions_on")
def test_long_memories_of_caches_that_ended_are_dropped_for_a_longer_one(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    ended, pair, longer = (Sequences(model, batch, prompt) for batch, prompt in ((1, 258), (2, 258), (1, 330)))
    ended.take(step), pair.take(step)
    del ended
    longer.take(step)
    assert [(memory.rows, memory.capacity) for memory in graphs._memories] == [(2, 320), (1, 384)]


@pytest.mark.parametrize(
    ("positions", "capacity"),
    [(1, 256), (256, 256), (257, 512), (4096, 4096), (4097, 5120), (8192, 8192), (8193, 10240), (131072, 131072)],
)
def test_capacities_double_and_leave_little_unused_in_long_contexts(positions: int, capacity: int) -> None:
    assert capacity_for(positions) == capacity


def test_memory_is_used_again_where_no_cache_needs_it(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    first, second = Sequences(model, 1), Sequences(model, 1)
    first.take(step), second.take(step)
    assert len(graphs._memories) == 2
    assert difference(first.take(step), first.exact()) <= CLOSE
    del first
    gc.collect()
    third = Sequences(model, 1)
    assert difference(third.take(step), third.exact()) <= CLOSE
    assert len(graphs._memories) == len(graphs._steps) == 2


@pytest.mark.parametrize(
    "part",
    [lambda keys: keys, pytest.param(lambda keys: keys[..., 2:], marks=pytest.mark.slow), lambda keys: keys.numpy()],
)
def test_keys_that_outlive_their_cache_stay_as_they_are(model: PreTrainedModel, part: Callable[..., Any]) -> None:
    graphs, step = graphs_of(model)
    first = Sequences(model, 1)
    first.take(step)
    kept = [part(layer.keys) for layer in first.cache.layers]
    wanted = copy.deepcopy(kept)
    del first
    gc.collect()
    for _ in range(2):
        second = Sequences(model, 1, prompt=PROMPT + 1)
        assert difference(second.take(step), second.exact()) <= CLOSE
        assert all((found == before).all() for found, before in zip(kept, wanted, strict=True))
        del second
        gc.collect()
    assert len(graphs._memories) == 2
    kept.clear()
    third = Sequences(model, 1)
    third.take(step)
    assert len(graphs._memories) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(-1),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
    ],
)
def test_a_changed_cache_goes_on_as_changed(change: Callable[[Any], object]) -> None:
    model = stock_model("qwen3_moe")
    _, step = graphs_of(model)
    sequences = Sequences(model, 2)
    sequences.take(step), sequences.take(step)
    change(sequences.cache)
    other = copy.deepcopy(sequences.cache)
    rows, length = other.layers[0].keys.shape[0], length_of(other)
    given = {
        "input_ids": torch.full((rows, 1), 5),
        "attention_mask": torch.ones(rows, length + 1, dtype=torch.int64),
        "position_ids": torch.full((rows, 1), length),
        "use_cache": True,
        "return_dict": True,
    }
    with torch.no_grad():
        wanted = model(**given, past_key_values=other).logits
        assert difference(step(**given, past_key_values=sequences.cache).logits, wanted) <= CLOSE


def test_another_state_of_the_model_is_captured_anew(model: PreTrainedModel) -> None:
    model = copy.deepcopy(model)
    graphs, step = graphs_of(model)
    states = []
    for change in (None, "weight", "setting"):
        if change == "weight":
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
        if change == "setting":
            model.model.layers[0].self_attn.scaling *= 2
        sequences = Sequences(model, 1)
        assert difference(sequences.take(step), sequences.exact()) <= CLOSE
        states.append(graphs._state)
    assert not states[1].is_same(states[0])
    assert not states[2].is_same(states[1])


def test_other_code_is_another_state(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(model)
    norm = model.model.norm
    stock, doubled = type(norm).forward, lambda *given: 2 * stock(*given)
    states = [ModelState.of(model)]
    assert ModelState.of(model).is_same(states[0])
    for change in (
        lambda: monkeypatch.setattr(type(norm), "forward", doubled),
        lambda: vars(norm).update(forward=lambda x: 3 * stock(norm, x)),
        lambda: model.set_experts_implementation("batched_mm"),
    ):
        change()
        states.append(ModelState.of(model))
        assert not states[-1].is_same(states[-2])
    _, step = graphs_of(model)
    Sequences(model, 1).take(step)
    monkeypatch.undo()
    del norm.forward
    sequences = Sequences(model, 1)
    assert difference(sequences.take(step), sequences.exact()) <= CLOSE


def test_values_that_are_not_numbers_do_not_outlive_their_cache(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    first = Sequences(model, 1, prompt=40)
    first.take(step)
    for keys, values in graphs._memories[0].held:
        keys.fill_(torch.nan), values.fill_(torch.nan)
    del first
    gc.collect()
    second = Sequences(model, 1)
    assert difference(second.take(step), second.exact()) <= CLOSE
    assert len(graphs._memories) == 1


def test_a_cache_without_its_first_positions_is_taken_again(model: PreTrainedModel) -> None:
    _, step = graphs_of(model)
    found = []
    for call in (model, step):
        sequences = Sequences(model, 2)
        sequences.take(call)
        for layer in sequences.cache.layers:
            layer.keys, layer.values = layer.keys[1:], layer.values[1:]
        sequences.ids, sequences.mask = sequences.ids[1:], sequences.mask[1:]
        found.append(sequences.take(call))
    assert difference(*found) <= CLOSE


def test_a_step_within_inference_mode_may_precede_one_outside(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    with torch.inference_mode():
        inside = Sequences(model, 1)
        found = [inside.take(step).clone(), inside.take(step).clone()]
    del inside
    gc.collect()
    outside = Sequences(model, 1)
    assert all(difference(outside.take(step), wanted) <= CLOSE for wanted in found)
    assert len(graphs._steps) == 1


def test_what_cannot_be_captured_is_computed_by_the_model_and_told(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    _, step = graphs_of(model)
    sequences = Sequences(model, 1)
    with torch.no_grad():
        out = step(
            input_ids=sequences.ids[:, :1], position_ids=torch.tensor([[PROMPT]]), past_key_values=sequences.cache,
            use_cache=True, return_dict=True, output_hidden_states=True,
        )  # fmt: skip
    assert out.hidden_states
    assert "it is called with `output_hidden_states`" in told(caplog)
    model = copy.deepcopy(model)
    model.model.layers[1].register_forward_hook(lambda *_: None)
    sequences = Sequences(model, 1)
    _, step = graphs_of(model)
    assert difference(sequences.take(step), sequences.exact()) <= CLOSE
    assert "`model.layers.1` has a forward hook" in told(caplog)


def test_positions_of_one_row_are_those_of_all_sequences(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, step = graphs_of(model)
    found: list[list[Tensor]] = []
    for call in (step, model):
        sequences = Sequences(model, 3)
        found.append([
            sequences.take(
                lambda position_ids, rows=rows, call=call, **given: call(position_ids=position_ids[:rows], **given)
            )
            for rows in (1, 3, 1)
        ])  # fmt: skip
    assert all(difference(*pair) <= CLOSE for pair in zip(*found, strict=True))
    assert not told(caplog) and len(graphs._steps) == 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("attention_mask", torch.ones(2, 300, dtype=torch.int64), "its attention mask has the shape [2, 300]"),
        ("position_ids", torch.zeros(3, 2, 1, dtype=torch.int64), "its `position_ids` have the shape [3, 2, 1]"),
        ("input_ids", torch.ones(3, 1, dtype=torch.int64), "it has 3 sequences, and its cache 2"),
    ],
)
def test_inputs_of_another_shape_are_left_to_the_model(
    name: str, value: Tensor, reason: str, model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, _ = graphs_of(model)
    sequences = Sequences(model, 2)
    received = []

    class Model:
        training = False

        def modules(self) -> list[Any]:
            return []

        def __call__(self, **given: Any) -> Any:
            received.append(given)
            return model(**{**given, name: usual[name]})

    usual: dict[str, Any] = {}

    def changed(**given: Any) -> Any:
        usual.update(given)
        return graphs.step(Model(), **{**given, name: value})

    sequences.take(lambda **given: graphs.step(model, **given))
    assert difference(sequences.take(changed), sequences.exact()) <= CLOSE
    assert received[0][name] is value and reason in told(caplog)


def test_a_step_is_checked_by_its_number_where_another_one_has_begun(model: PreTrainedModel) -> None:
    checked = list[int]()

    class Nodes:
        begun = 0

        def check(self, _: object, number: int) -> None:
            checked.append(number)

    nodes: Any = Nodes()

    waits = list[Callable[[], None]]()
    for _ in range(2):
        nodes.begun += 1
        waits.append(cuda_graph._with_errors(lambda: None, nodes, model))
    for wait in waits:
        wait()
    assert checked == [1, 2]


def test_a_failed_capture_leaves_the_model_to_itself(model: PreTrainedModel, caplog: pytest.LogCaptureFixture) -> None:
    def fail(compute: Any, *_: Any) -> Any:
        compute()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graphs = DecodeGraphs(StepRecorder(fail, "cpu", call_at_once))
    sequences = Sequences(model, 2)
    for _ in range(3):
        found = sequences.take(lambda **inputs: graphs.step(model, **inputs))
        assert difference(found, sequences.exact()) <= CLOSE
    assert told(caplog).count("operation not permitted when stream is capturing") == 1


@pytest.mark.parametrize(
    ("error", "tries"), [(RuntimeError("not permitted"), [1, 1, 2]), (torch.OutOfMemoryError("no room"), [1, 2, 3])]
)
def test_a_failed_capture_is_tried_again_where_it_may_succeed(
    model: PreTrainedModel, error: RuntimeError, tries: list[int]
) -> None:
    tried, found, model = list[int](), list[int](), copy.deepcopy(model)

    def fail(*_: Any) -> Any:
        tried.append(1)
        raise error

    graphs = DecodeGraphs(StepRecorder(fail, "cpu", call_at_once))
    for state in range(3):
        model.lm_head.weight.data.mul_(2 if state == 2 else 1)
        sequences = Sequences(model, 1)
        for _ in range(2):
            assert difference(sequences.take(lambda **given: graphs.step(model, **given)), sequences.exact()) <= CLOSE
        found.append(len(tried))
    assert found == tries
    graphs.recorder = StepRecorder(record_eagerly, "cpu", call_at_once)
    model.model.norm.variance_epsilon *= 2
    sequences = Sequences(model, 1)
    assert difference(sequences.take(lambda **given: graphs.step(model, **given)), sequences.exact()) <= CLOSE
    assert len(graphs._steps) == 1


def test_the_states_of_a_refused_cache_are_compared_once(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compared = copy.deepcopy(model), list[int]()
    model.model.layers[1].register_forward_hook(lambda *_: None)
    of = ModelState.of
    monkeypatch.setattr(ModelState, "of", lambda model: (compared.append(1), of(model))[1])
    _, step = graphs_of(model)
    sequences = Sequences(model, 1)
    sequences.take(step), sequences.take(step)
    assert len(compared) == 1


def test_cleared_graphs_hold_no_memory_and_caches_go_on(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    sequences = Sequences(model, 2)
    sequences.take(step)
    graphs.clear()
    assert not graphs._memories and not graphs._steps and graphs._state is None
    assert difference(sequences.take(step), sequences.exact()) <= CLOSE
    assert len(graphs._memories) == len(graphs._steps) == 1


def test_keys_and_values_are_held_once(model: PreTrainedModel) -> None:
    _, step = graphs_of(model)
    sequences = Sequences(model, 1, prompt=1)
    growing(sequences.cache)
    sequences.take(model, 3)
    whole = [layer for layer in sequences.cache.layers if type(layer) is GrowingLayer]
    rooms = [weakref.ref(layer.keys.untyped_storage()) for layer in whole]
    sequences.take(step)
    assert whole and all(room() is None for room in rooms)
    for tokens in (3, 1):
        assert difference(sequences.take(step if tokens == 1 else model, tokens), sequences.exact()) <= CLOSE


def test_only_caches_of_keys_and_values_have_a_memory() -> None:
    assert "empty" in unfit(DynamicCache(config=stock_model("qwen3_moe").config))
    assert "NoneType" in unfit(None)
    shared = Sequences(stock_model("qwen3_moe"), 1).cache
    shared.layers.append(DynamicLayer())
    assert unfit(shared) == f"layer {len(shared.layers) - 1} of the cache has no keys and values of its own"


def test_copies_of_a_model_begin_without_graphs(model: PreTrainedModel) -> None:
    graphs, step = graphs_of(model)
    Sequences(model, 1).take(step)
    assert graphs._memories
    assert not copy.deepcopy(graphs)._memories


def test_the_memory_counts_its_bytes(model: PreTrainedModel) -> None:
    sequences = Sequences(model, 2)
    memory = StepMemory(sequences.cache, 2, 256)
    layer = sequences.cache.layers[0].keys
    assert memory.nbytes == 2 * len(sequences.cache.layers) * layer.numel() // layer.shape[2] * 256 * layer.itemsize


# Compiled models -------------------------------------------------------------------------------------------------
def test_generate_takes_its_steps_from_the_graphs(compiled_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = generated(compiled_model)
    replayed: list[int] = []

    def counting(compute: Any, device: torch.device, *_: Any) -> Any:
        output, replay = record_eagerly(compute, device)
        return output, lambda: (replayed.append(1), replay())[1]

    monkeypatch.setattr(compiled_model, "decode_graphs", DecodeGraphs(StepRecorder(counting, "cpu", call_at_once)))
    assert torch.equal(generated(compiled_model), wanted)
    assert len(replayed) == 23
    assert torch.equal(generated(compiled_model, disable_compile=True), wanted)
    assert torch.equal(generated(compiled_model, num_beams=2)[:, :9], wanted[:, :9])
    assert len(replayed) == 23
    graphs = compiled_model.decode_graphs
    assert compiled_model.eval() is compiled_model and graphs._memories
    assert compiled_model.train() is compiled_model and compiled_model.training and not graphs._memories
    compiled_model.eval()


def test_shared_experts_run_beside_routed_ones(compiled_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, orders, waiting = generated(compiled_model), list[LastMoment](), list[int]()
    moes = [layer.mlp for layer in compiled_model.model.layers if hasattr(layer.mlp, "shared_experts")]
    shared = type(moes[0].shared_experts)
    stock = shared.forward

    def order() -> LastMoment:
        orders.append(LastMoment())
        return orders[-1]

    monkeypatch.setattr(compiled_model, "decode_graphs", eager_graphs(order))

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        waiting.append(sum(each.waiting for each in orders))
        return stock(self, x)

    monkeypatch.setattr(shared, "forward", forward)
    assert torch.equal(generated(compiled_model), wanted)
    assert moes and orders[0].joined >= 23 * len(moes)
    assert waiting[-len(moes) :] == [1] * len(moes)


@pytest.mark.parametrize("chunk", [1, 4, 8])
def test_chunks_of_a_prompt_are_not_steps(
    chunk: int, compiled_model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = generated(compiled_model, rows=1)
    graphs = eager_graphs()
    monkeypatch.setattr(compiled_model, "decode_graphs", graphs)
    found = generated(compiled_model, rows=1, prefill_chunk_size=chunk)  # of 9 tokens: the last chunk has one
    assert torch.equal(found, wanted)
    assert not told(caplog) and len(graphs._steps) == 1


def test_an_adapter_is_part_of_the_state(compiled_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(
        copy.deepcopy(compiled_model),
        LoraConfig(r=4, target_modules=["q_proj", "o_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
    )
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    found = []
    for graphs in (None, eager_graphs()):
        tuned.base_model.model.decode_graphs = graphs
        found.append([generated(tuned)])
        with tuned.disable_adapter():
            found[-1].append(generated(tuned))
        found[-1].append(generated(tuned))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])
