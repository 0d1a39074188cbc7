"""A loaded model that its user changes: it does what the stock model does after the same change, or says why not."""

from __future__ import annotations

import copy
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts

import ktc
from ktc.diagnostics import InputRefused
from ktc.model.manifest.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
Change = Callable[[Any], Any]


def stock(folder: Path) -> PreTrainedModel:
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def blocks(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "gate") and hasattr(module, "experts"))


def each_block(change: Callable[[Any], object]) -> Change:
    def changed(model: nn.Module) -> nn.Module:
        for block in blocks(model):
            change(block)
        return model

    return changed


def config(**values: object) -> Change:
    def changed(model: Any) -> Any:
        for name, value in values.items():
            assert hasattr(model.config, name)
            setattr(model.config, name, value)
        return model

    return changed


class Mean(nn.Module):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x * weights.sum(-1, keepdim=True)


def other_router(block: Any) -> None:
    block.gate = copy.deepcopy(block.gate)
    block.gate.weight.data.mul_(3)


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model.train()


def resized(model: Any) -> Any:
    torch.manual_seed(5)
    model.resize_token_embeddings(model.config.vocab_size + 7)
    return model


def other_layers(model: Any) -> Any:
    for layer in model.model.layers:
        old = layer.self_attn.o_proj
        layer.self_attn.o_proj = nn.Linear(old.in_features, old.out_features, bias=False)
        layer.self_attn.o_proj.weight.data = old.weight.data * -1
    return model


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def twice(model: Any) -> Any:
    model.set_attn_implementation("eager")
    model.set_experts_implementation("batched_mm")
    return model


# A change, and whether it changes the stock model's logits (None: by its rounding alone).
SAME: dict[str, tuple[Change, bool | None]] = {
    "config values that modules copied when they were made": (
        config(
            norm_topk_prob=True, num_experts_per_tok=1, hidden_act="gelu", routed_scaling_factor=9.0, topk_group=1,
            first_k_dense_replace=9, n_routed_experts=2,
        ),
        False,
    ),
    "fewer experts per token": (each_block(lambda block: setattr(block.gate, "top_k", 1)), True),
    "more experts per token": (each_block(lambda block: setattr(block.gate, "top_k", 5)), True),
    "another scaling factor": (each_block(lambda block: setattr(block.gate, "routed_scaling_factor", 2.5)), True),
    "another way to choose": (each_block(lambda block: setattr(block.gate, "topk_method", "greedy")), True),
    "another router": (each_block(other_router), True),
    "other experts": (each_block(lambda block: setattr(block, "experts", Mean())), True),
    "another forward of experts": (each_block(lambda block: setattr(block.experts, "forward", Mean().forward)), True),
    "another forward of the block": (each_block(lambda block: setattr(block, "forward", lambda x: -x)), True),
    "other linear layers": (other_layers, True),
    "a hook on experts": (each_block(lambda b: b.experts.register_forward_hook(lambda m, a, out: out * 0.5)), True),
    "a hook on the router": (
        each_block(lambda b: b.gate.register_forward_hook(lambda m, a, out: (out[0], out[1] * 0.5, out[2]))), True,
    ),
    "half": (lambda model: model.half(), None),
    "bfloat16": (lambda model: model.to(torch.bfloat16), None),
    "double": (lambda model: model.double(), None),
    "more tokens": (resized, False),
    "a copy": (copy.deepcopy, False),
    "a pickle": (pickled, False),
    "other implementations": (twice, False),
    "checkpointing": (checkpointed, False),
    "torch.compile": (lambda model: torch.compile(model, backend="eager"), False),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name == "torch.compile" else name for name in SAME]
)
def test_a_changed_model_does_what_the_stock_model_does(
    compiled: Path, checkpoint: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    change, has_effect = SAME[name]
    before = stock(checkpoint)
    plain, wanted = logits(before), logits(change(before))
    with caplog.at_level(logging.WARNING, "ktc"):
        found = logits(change(ktc.load(compiled, reference=True)))
    assert "L428" not in caplog.text
    effect = float((wanted[..., : plain.shape[-1]] - plain).norm() / plain.norm())
    assert has_effect is None or (effect > 0.03) == has_effect
    # other implementations of stock experts add in another order, and half precision adds in the same one
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


def relu(model: PreTrainedModel) -> None:
    for block in blocks(model):
        block.experts.act_fn = nn.ReLU()


def other_weights(model: PreTrainedModel) -> None:
    for block in blocks(model):
        block.experts.down_proj = nn.Parameter(torch.zeros(1))


def other_number(model: PreTrainedModel) -> None:
    for block in blocks(model):
        block.experts.has_gate = False


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (relu, "received `act_fn`, and the compiled code"),
        (other_weights, "received `down_proj`, and the compiled code"),
        (other_number, "has_gate` is now False, and the compiled code has True"),
    ],
)
def test_a_change_that_compiled_experts_do_not_read_is_said_once(
    compiled: Path, change: Callable[[PreTrainedModel], None], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = ktc.load(compiled, reference=True)
    plain = logits(model)
    change(model)
    for _ in range(2):
        assert torch.equal(logits(model), plain)
    (record,) = caplog.records
    assert "L428" in record.message
    assert says in record.message
    assert "`model.layers.1.mlp.experts" in record.message
    assert "help: " in record.message


def test_a_copy_is_watched_by_itself(compiled: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = ktc.load(compiled, reference=True)
    copied = copy.deepcopy(model)
    relu(copied)
    logits(model)
    assert not caplog.records
    logits(copied)
    assert "L428" in caplog.text


def test_code_that_was_replaced_is_noticed_at_the_load_and_after_it(
    compiled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = ktc.load(compiled, reference=True)
    monkeypatch.setattr(DeepseekV2Experts, "forward", Mean.forward)
    logits(model)
    logits(model)
    assert [record.message.count("modeling_deepseek_v2.DeepseekV2Experts.forward") for record in caplog.records] == [1]
    caplog.clear()
    ktc.load(compiled, reference=True)
    assert "the code of `modeling_deepseek_v2.DeepseekV2Experts` is not the code that was compiled" in caplog.text


def test_a_replaced_forward_of_linear_layers_takes_effect(
    compiled: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = ktc.load(compiled, reference=True), stock(checkpoint)
    forward = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 1.25)
    wanted = logits(theirs)
    assert (logits(ours) - wanted).norm() <= 1e-6 * wanted.norm()
    assert not caplog.records


def test_a_config_for_other_experts_is_refused_and_one_for_another_router_is_followed(
    compiled: Path, checkpoint: Path
) -> None:
    options = {"trust_remote_code": True, "reference": True}
    changed = AutoConfig.from_pretrained(compiled)
    changed.hidden_act = "gelu"
    with pytest.raises(InputRefused) as refused:
        AutoModelForCausalLM.from_pretrained(compiled, config=changed, **options)
    assert refused.value.diagnostics[0].code == "L427"
    assert "`model.layers.1.mlp.experts.act_fn` is not the `activations.SiLU" in refused.value.diagnostics[0].message

    changed = AutoConfig.from_pretrained(compiled)
    changed.num_experts_per_tok, changed.routed_scaling_factor = 1, 2.0
    ours = AutoModelForCausalLM.from_pretrained(compiled, config=changed, **options)
    options = {"dtype": torch.float32, "experts_implementation": "eager"}
    wanted = logits(AutoModelForCausalLM.from_pretrained(checkpoint, config=changed, **options))
    assert (logits(ours) - wanted).norm() <= 1e-6 * wanted.norm()


def test_weights_of_experts_are_not_loaded_from_a_state_dict(compiled: Path, checkpoint: Path) -> None:
    model = ktc.load(compiled, reference=True)
    for strict in (True, False):
        with pytest.raises(InputRefused, match=r"L436: `model\.layers\.1\.mlp\.experts\."):
            model.load_state_dict(stock(checkpoint).state_dict(), strict=strict)
    model.load_state_dict(model.state_dict())


def test_a_model_on_meta_tells_shapes(compiled: Path) -> None:
    model = ktc.load(compiled, reference=True).to("meta")
    assert model(input_ids=IDS.to("meta")).logits.shape[:2] == IDS.shape


def test_the_manifest_holds_the_assumptions_and_damaged_ones_are_refused(compiled: Path, tmp_path: Path) -> None:
    assumed = read_manifest(compiled).assumptions
    (row,) = assumed.sites
    assert row.sites == ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")
    experts, activation = row.modules
    assert (experts.class_name, activation.class_name) == (
        "modeling_deepseek_v2.DeepseekV2Experts", "activations.SiLUActivation",
    )  # fmt: skip
    assert experts.attributes["num_experts"] == "16"
    content = json.loads((compiled / "ktc.json").read_text())
    content["assumptions"]["sites"][0]["modules"][0]["attributes"]["has_gate"] = True
    (tmp_path / "ktc.json").write_text(json.dumps(content))
    with pytest.raises(InputRefused, match="L402"):
        read_manifest(tmp_path)
