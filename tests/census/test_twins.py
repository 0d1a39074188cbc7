"""The comparison of whole twins promises: equal models are equal, and one that differs anywhere is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from census.twins import compare_twins
from census.types import TwinProof
from ktc.model import twin

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]
ADAPTER = {
    "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": NAMES,
    "target_parameters": None, "rank_pattern": {}, "alpha_pattern": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return twin.build(twin.shrink(twin.default_config("llama")), 5, torch.float32, "cpu")


def compared(stock: PreTrainedModel, change: Callable[[Any], None], **adapter: Any) -> TwinProof:
    other = copy.deepcopy(stock)
    change(other)
    return compare_twins("moe-lora", stock, other, {**ADAPTER, **adapter})


def test_a_model_equals_its_copy(stock: PreTrainedModel) -> None:
    proof = compared(stock, lambda _: None)
    assert proof.equal and not proof.wrong
    assert (proof.logits, proof.tokens, proof.worst_gradient) == (0.0, True, 0.0)
    assert len(proof.gradients) == 2 * len(NAMES)


def _scale_a_weight(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data[0] *= 1.01


def _runs(module: Any, forward: Callable[..., Any]) -> None:
    """Give `module` another forward, which its copies have too; `forward` gets the old one, the module, the call."""
    stock = type(module)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(stock.forward, self, *args, **kwargs)

    module.__class__ = type(stock.__name__, (stock,), {"forward": changed})


def _ignore_padding(model: Any) -> None:
    _runs(model.model, lambda inner, self, *args, **kwargs: inner(self, *args, **{**kwargs, "attention_mask": None}))


def _scale_single_tokens(model: Any) -> None:
    _runs(model.model.layers[1].mlp, lambda inner, self, x: inner(self, x) * (1.0 if x.shape[1] > 1 else 1.01))


class _NoGradient(nn.Module):
    """A linear layer that computes the same and whose input has no gradient."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.inner(x.detach()))


def _cut_a_gradient(model: Any) -> None:
    model.model.layers[1].mlp.gate_proj = _NoGradient(model.model.layers[1].mlp.gate_proj)


def _halve_while_training(model: Any) -> None:
    _runs(model.model.layers[1].mlp, lambda inner, self, x: inner(self, x) * (0.5 if self.training else 1.0))


@pytest.mark.parametrize(
    ("change", "logits", "gradients"),
    [
        (_scale_a_weight, True, True),
        (_ignore_padding, True, True),
        (_scale_single_tokens, True, False),
        (_cut_a_gradient, False, True),
        (_halve_while_training, False, True),
    ],
)
def test_a_model_that_differs_is_wrong(
    stock: PreTrainedModel, change: Callable[[Any], None], logits: bool, gradients: bool
) -> None:
    proof = compared(stock, change)
    assert proof.wrong and not proof.equal
    assert not proof.difference
    assert (cast("float", proof.logits) > 1e-4, cast("float", proof.worst_gradient) > 1e-4) == (logits, gradients)


def test_a_model_that_raises_alone_is_wrong(stock: PreTrainedModel) -> None:
    def raises(model: Any) -> None:
        def forward(*_: Any) -> None:
            raise ValueError("no such branch")

        _runs(model.model.layers[0].mlp, forward)

    proof = compared(stock, raises)
    assert proof.wrong and "logits with a cache: it raises ValueError: no such branch" in proof.difference


def test_what_stock_itself_refuses_is_a_note(stock: PreTrainedModel) -> None:
    proof = compared(stock, lambda _: None, target_modules=["nothing"])
    assert proof.equal and proof.worst_gradient is None
    assert proof.notes[0].startswith("stock refuses LoRA gradients: ")


def test_weights_that_stock_has_no_name_for_are_left_out(stock: PreTrainedModel) -> None:
    proof = compared(stock, lambda _: None, target_parameters=["model.layers.0.mlp.experts.gate_up_proj"])
    assert proof.equal and len(proof.gradients) == 2 * len(NAMES)
    assert proof.notes == ("the adapter of 1 weights of experts in a list has no stock counterpart",)
