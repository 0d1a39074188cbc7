"""On a machine with a GPU: decoding steps as CUDA graphs are those of eager code, with experts on the CPU or not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_answers import PROMPTS, Served, config_of
from recorded_steps import record_eagerly
from row_pairs import Replayed
from torch import Tensor, nn
from transformers.cache_utils import Cache

import ktc
from ktc.inference.serving.request import Limits
from ktc.model.decode_steps.cuda_graph import DecodeGraphs, StepRecorder
from ktc.model.decode_steps.token_choice import TokenChoice

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PROGRAM = """
import "std/moe.ktr"
import "std/attention.ktr" as attn
rule latent  { match attn.mla expect >= 0 => mla_absorbed() }
rule experts { match moe.block expect >= 0 => EXPERTS }
rule all     { match module at "model", "lm_head" => place(cuda:0) }
plan { mode = infer  cuda_graph = decode }
"""
BEHIND_A_ROUTER = "rule others { match moe.opaque as m => cpu_moe() on m.experts }"


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("graphs")

    def loaded(family: str, experts: str = "cpu_moe()", plan: str = "plan {") -> Any:
        out = folder / f"g_{family}_{len(list(folder.iterdir()))}"
        rules = folder / f"{out.name}.ktr"
        rules.write_text(PROGRAM.replace("EXPERTS", experts).replace("plan {", plan))
        return ktc.load(ktc.compile(f"tiny:{family}", rules, out))

    return loaded


def generated(model: Any, rows: int, new: int, **options: Any) -> Tensor:
    ids = torch.randint(3, model.config.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(4)).cuda()
    mask = torch.ones_like(ids)
    mask[1:, :3] = 0
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return torch.stack(found.logits)


def compared(model: Any, rows: int, new: int = 40) -> float:
    """The distance of the first steps' logits; later ones may follow another token."""
    ours, eager = generated(model, rows, new), generated(model, rows, new, disable_compile=True)
    same = (ours.argmax(-1) == eager.argmax(-1)).all(-1).long().cumprod(0).bool()
    assert int(same.sum()) >= 4
    return float((ours[same] - eager[same]).norm() / eager[same].norm())


# Masks of chunks (llama4), identity experts beside routed ones that stock computes in a loop (longcat).
@pytest.mark.parametrize(
    "family", ["deepseek_v2", "qwen3_moe", "gpt_oss", "mixtral", "llama4_text", "longcat_flash", "aria_text"]
)
def test_a_replayed_step_is_the_eager_one(
    family: str, load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = load(family, plan=f"{BEHIND_A_ROUTER}\nplan {{" if family == "llama4_text" else "plan {")
    with caplog.at_level(logging.WARNING):
        assert all(compared(model, rows) <= 0.02 for rows in (1, 3))
    assert [record.getMessage() for record in caplog.records if "L451" in record.getMessage()] == []
    assert len(model.decode_graphs._steps) == 2


@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static", "static"])
def test_absorbed_attention_reads_the_caches_of_transformers(
    cache: str, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch = Cache.prefetch

    def after_the_copies(self: Cache, *given: Any) -> None:  # transformers 5.17 begins to read before they have ended
        torch.cuda.synchronize()
        prefetch(self, *given)

    monkeypatch.setattr(Cache, "prefetch", after_the_copies)
    model = load("deepseek_v2")
    wanted = generated(model, 3, 12, disable_compile=True)
    found = generated(model, 3, 12, cache_implementation=cache, disable_compile=True)
    assert torch.equal(found.argmax(-1)[:4], wanted.argmax(-1)[:4])
    assert float((found[:4] - wanted[:4]).norm() / wanted[:4].norm()) <= 0.02


def test_experts_that_stay_on_the_gpu_are_part_of_the_graph(
    load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    room = "rule many { match moe.opaque as m => place(cpu, prefill = cuda:0) on m.experts }"
    model = load("qwen3_moe", "cpu_moe()", f"{room}\nplan {{ cuda:0 = 4GiB")
    experts = model.model.layers[1].mlp.experts
    assert experts.offload.resident
    assert type(experts.backend(1, plain=True)).__name__ == "GpuResident"
    with caplog.at_level(logging.WARNING):
        assert compared(model, 1) <= 0.02
    assert not [record for record in caplog.records if "L451" in record.getMessage()]
    assert not any(step.nodes._calls for step in model.decode_graphs._steps.values())


def test_a_thousand_replayed_steps_choose_the_tokens_of_the_same_steps_computed_eagerly(
    load: Callable[..., Any],
) -> None:
    model = load("deepseek_v2")
    found = []
    for graphs in (DecodeGraphs(), DecodeGraphs(StepRecorder(record_eagerly))):
        model.decode_graphs = graphs
        found.append(generated(model, 1, 1000))
        assert len(graphs._steps) == 3  # of 256, 512 and 1024 positions
    assert torch.equal(*found)


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe", "gpt_oss"])
def test_a_running_batch_replays_graphs_while_rows_join_and_leave(
    family: str, load: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    pair = Replayed(load(family))
    with caplog.at_level(logging.WARNING):
        pair.take_turns(60)
        for length in (200, 270, 4, 5, 6):
            pair.join(length)
            pair.step()
        pair.require_same_rows()
        pair.require_near_eager()
    assert not [record for record in caplog.records if "L451" in record.getMessage()]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}])
def test_steps_that_run_ahead_choose_the_tokens_of_stock_codes_loop(
    options: dict[str, Any], rows: int, load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("deepseek_v2")
    ids = torch.randint(3, model.config.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(4)).cuda()

    def tokens(end: int | None) -> Tensor:
        torch.manual_seed(3)
        given = {"do_sample": False, "pad_token_id": 0, "eos_token_id": end} | options
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=280, **given)
        return torch.cat((found.flatten(), torch.randint(1 << 30, (1,), device="cuda")))  # the generator's next number

    ahead = tokens(None)
    end = int(ahead[12 + 200])
    ended = tokens(end)
    monkeypatch.setattr(TokenChoice, "of", classmethod(lambda *_: None))
    assert torch.equal(tokens(None), ahead) and torch.equal(tokens(end), ended)


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
def test_served_answers_are_the_same_where_a_step_begins_before_the_last_token_is_read(
    family: str, load: Callable[..., Any]
) -> None:
    model, found = load(family), list[list[list[int]]]()
    drawn, greedy = config_of(model, temperature=1.1, top_k=40), config_of(model)
    drawn.do_sample = True
    for ahead in (True, False):
        model.decode_graphs = DecodeGraphs(StepRecorder(ahead=ahead))
        with Served(model, Limits(batch=8, prefix_bytes=1 << 24)) as served:

            def ask(count: int, end: int | None, served: Served = served) -> list[list[int]]:
                def all_at_once() -> None:
                    for at, prompt in enumerate(PROMPTS[:count]):
                        config = copy.deepcopy((greedy, drawn)[at % 2])
                        config.eos_token_id = end
                        served.ask(f"{count} {end} {at}", prompt, 80, config, seed=at)

                served.engine.change(all_at_once)
                return [served.answers.wait(f"{count} {end} {at}")[0] for at in range(count)]

            [one], six = ask(1, None), ask(6, None)
            found.append([one, *six, *ask(1, one[30])])
            ended = ask(6, six[2][40])  # other rows beside: numbers may round otherwise
            assert all(six[2][40] not in tokens[:-1] for tokens in ended)
            assert found[-1][-1] == one[: one.index(one[30]) + 1]
    assert found[0] == found[1]


def test_an_adapter_and_its_absence_are_captured_each(load: Callable[..., Any]) -> None:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(load("qwen3_moe"), LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    with_it = generated(tuned, 1, 8)
    assert compared(tuned, 1, 8) <= 0.02
    with tuned.disable_adapter():
        assert compared(tuned, 1, 8) <= 0.02
        assert not torch.equal(generated(tuned, 1, 8), with_it)


def test_an_expert_that_does_not_exist_is_told_with_its_layer(load: Callable[..., Any]) -> None:
    model = load("qwen3_moe")
    generated(model, 1, 4)
    experts = model.model.layers[1].mlp.experts
    wrong = experts.forward
    experts.forward = lambda x, index, weights: wrong(x, index + 10_000, weights)
    with pytest.raises(IndexError) as error:
        generated(model, 1, 4)
    del experts.forward
    assert "expert" in str(error.value)
    generated(model, 1, 4)
