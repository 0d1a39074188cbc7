"""A loss in chunks of tokens is the stock loss, of a frozen head with its gradient as of a trained one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from ktc.model.packed_store.placement import _Mover
from ktc.training.trainers import chunked_loss as chunked_loss_module
from ktc.training.trainers import frozen_head
from ktc.training.trainers.chunked_loss import chunked_losses, in_chunks_of_tokens, losses_by
from ktc.training.trainers.frozen_head import is_frozen_linear

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 50


def head_of(*, frozen: bool, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(16, VOCABULARY, bias=bias).to(dtype).requires_grad_(not frozen)


def tiny_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def labels_of(rows: int, tokens: int, ignored: int = -100) -> Tensor:
    labels = torch.randint(0, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(2))
    labels[:, :3] = ignored
    return labels


def both(
    head: nn.Linear, labels: Tensor, rows_at_once: int, x: Tensor | None = None, **given: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Our loss and the stock loss, each with the gradient of the hidden states."""
    states = torch.randn(*labels.shape, 16, generator=torch.Generator().manual_seed(4)) if x is None else x
    losses_of = losses_by(head, rows_at_once, frozen=is_frozen_linear(head))
    found: list[tuple[Tensor, Tensor]] = []
    for loss in (
        lambda x: chunked_losses(losses_of, x, labels, **given).sum(),
        lambda x: ForCausalLMLoss(head(x), labels, VOCABULARY, **given),
    ):
        leaf = states.to(head.weight.dtype).detach().clone().requires_grad_()
        value = loss(leaf)
        (3 * value).backward()
        assert leaf.grad is not None
        found.append((value.detach(), leaf.grad))
    return found[0], found[1]


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-6)
    assert torch.allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(7)])
@pytest.mark.parametrize("rows_at_once", [1, 5, 100])
def test_a_loss_in_chunks_is_the_stock_loss(num_items: Any, rows_at_once: int, frozen: bool) -> None:
    head = head_of(frozen=frozen)
    assert is_frozen_linear(head) == frozen
    assert_equal(*both(head, labels_of(3, 9), rows_at_once, num_items_in_batch=num_items))


def test_labels_may_be_shifted_already_and_any_index_ignored() -> None:
    labels = labels_of(2, 7, ignored=VOCABULARY - 1)
    head = head_of(frozen=True, bias=False)
    assert_equal(*both(head, labels, 4, shift_labels=labels, ignore_index=VOCABULARY - 1))


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_mean_over_no_labels_is_nan_without_a_gradient(frozen: bool) -> None:
    ours, theirs = both(head_of(frozen=frozen), torch.full((1, 3), -100), 2)
    assert ours[0].isnan()
    assert theirs[0].isnan()
    assert torch.equal(ours[1], theirs[1])
    assert not ours[1].any()


def test_a_certain_token_keeps_its_gradient_in_bf16() -> None:
    # its softmax less one is -2e-4, and a softmax rounded to bf16 is one
    labels = torch.full((1, 4), 3)
    head = head_of(frozen=True, bias=False)
    towards = head.weight[3].detach() * 14 / head.weight[3].detach().square().sum()
    states = towards.expand(1, 4, 16)
    exact = both(head, labels, 2, states)[1][1]
    ours, theirs = (found[1] for found in both(head.to(torch.bfloat16), labels, 2, states))
    assert ours[0, 0].norm() > 0
    assert torch.allclose(ours.float(), theirs.float(), rtol=0.02, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bf16_both_differ_from_fp32_by_as_much(autocast: bool) -> None:
    labels = labels_of(4, 33)
    exact = both(head_of(frozen=True), labels, 16)[1]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = both(head_of(frozen=True, dtype=torch.bfloat16), labels, 16)

    def error(found: tuple[Tensor, Tensor]) -> float:
        return float((found[1].float() - exact[1]).norm() / exact[1].norm())

    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=2e-3)
    assert error(ours) < 1.2 * error(theirs) < 0.02


def test_fp32_states_are_multiplied_as_autocasting_says() -> None:
    labels, head = labels_of(2, 9), head_of(frozen=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = both(head, labels, 4)
    assert ours[1].dtype == theirs[1].dtype == torch.float32
    assert float((ours[1] - theirs[1]).norm() / theirs[1].norm()) < 0.01
    assert not torch.equal(ours[1], both(head, labels, 4)[0][1]), "in bf16"


def test_the_copy_of_fp32_weights_in_the_dtype_of_training_is_counted() -> None:
    for bf16, bytes_per_value in ((True, 2), (False, 0)):
        args = SimpleNamespace(bf16=bf16, fp16=False)
        assert frozen_head.cast_item(torch.float32, args) == bytes_per_value
        assert frozen_head.cast_item(torch.bfloat16, args) == 0


def test_a_compiled_loss_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager")

    monkeypatch.setattr(frozen_head, "compiled_on", compiled)
    for rows in (5, 7):
        assert_equal(*both(head_of(frozen=True), labels_of(3, 9), rows))


def test_a_model_with_a_frozen_head_computes_its_loss_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model().requires_grad_(False)
    moves = _Mover(torch.device("cpu"), gives_back=False)  # as of a model with several devices
    model.lm_head.register_forward_pre_hook(moves.inputs, with_kwargs=True)
    ids = labels_of(2, 9, ignored=3)
    stock = model(input_ids=ids, labels=ids).loss
    rows: list[int] = []
    monkeypatch.setattr(frozen_head, "MOST_LOGITS", 5 * model.config.vocab_size)
    monkeypatch.setattr(
        chunked_loss_module, "token_losses", lambda *given: rows.append(given[3]) or frozen_head.token_losses(*given)
    )
    with in_chunks_of_tokens(model):
        assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(stock.item(), rel=1e-6)
    assert rows == [5]


def test_a_head_with_more_than_a_product_is_checkpointed() -> None:
    hooked, replaced = head_of(frozen=True), head_of(frozen=True)
    hooked.register_forward_hook(lambda module, args, out: out / 2)
    replaced.forward = lambda x: nn.functional.linear(x, replaced.weight) / 2  # type: ignore[method-assign]
    for head in (hooked, replaced):
        assert not is_frozen_linear(head)
        assert_equal(*both(head, labels_of(2, 5), 3))
