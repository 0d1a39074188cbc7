"""The experts as the operator `ktc::fused_moe`: what PyTorch asks of an operator, and models compiled with it."""

from __future__ import annotations

import copy
import mmap
from typing import Any

import pytest
import torch
from kernel_layers import ISAS, Layer, Load, random_layer, spec_of
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from ktc.model.experts.layouts.packed import PackedExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.lora import ExpertsLora, Lora

SPEC = spec_of(ISAS[0])


def factors(layer: Layer, rank: int = 3, *, first: bool = True, down: bool = True) -> ExpertsLora:
    generator = torch.Generator().manual_seed(5)

    def lora(inputs: int, outputs: int) -> Lora:
        a = torch.randn(layer.num_experts, rank, inputs, generator=generator).mul(0.1).requires_grad_()
        b = torch.randn(outputs, rank, layer.num_experts, generator=generator).mul(0.1).requires_grad_()
        return Lora(a, b.permute(2, 0, 1), 0.75)

    wide, narrow = 2 * layer.intermediate, layer.intermediate
    return ExpertsLora(lora(layer.hidden, wide) if first else None, lora(narrow, layer.hidden) if down else None)


def arguments(
    module: FusedMoe, layer: Layer, lora: ExpertsLora, *, keep: bool, dropout: float = 0.0
) -> tuple[Any, ...]:
    experts = module.weights.packed
    assert experts is not None
    x, weights = layer.x.bfloat16().requires_grad_(), layer.weights.float().requires_grad_()
    seed = torch.tensor(5) if dropout else None
    rest = (*lora.factors, seed, experts.key, 0.75, 0.5, dropout, dropout, False, keep)
    return experts.packed[:], x, layer.index, weights, *rest


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "recompute"])
@pytest.mark.parametrize("adapted", ["nothing", "both", "down", "dropped"])
def test_the_operator_is_what_pytorch_asks_of_one(load: Load, adapted: str, keep: bool) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    lora = factors(layer, first=adapted in ("both", "dropped"), down=adapted != "nothing")
    inputs = arguments(load(layer, SPEC), layer, lora, keep=keep, dropout=0.25 if adapted == "dropped" else 0.0)
    torch.library.opcheck(torch.ops.ktc.fused_moe.default, inputs)


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "recompute"])
def test_its_backward_is_too(load: Load, keep: bool) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    packed, x, index, weights, *rest = arguments(load(layer, SPEC), layer, factors(layer), keep=keep)
    rest = [each.detach() if isinstance(each, Tensor) else each for each in rest]
    x, weights = x.detach(), weights.detach()
    _, saved = torch.ops.ktc.fused_moe(packed, x, index, weights, *rest)
    inputs = (packed, layer.grad.bfloat16(), x, index, weights, saved, *rest)
    torch.library.opcheck(torch.ops.ktc.fused_moe_backward.default, inputs)


def test_hooks_that_copy_what_is_saved_see_no_weights(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    module, lora = load(layer, SPEC), factors(layer)
    experts = module.weights.packed
    assert experts is not None
    x, weights = layer.x.bfloat16().requires_grad_(), layer.weights.float().requires_grad_()
    seen: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(copied, Tensor.clone):
        out = module(x, layer.index, weights, lora)
    assert seen
    assert experts.packed.data_ptr() not in [tensor.data_ptr() for tensor in seen]
    leaves = [x, weights, *(each for each in lora.factors if each is not None)]
    expected = torch.autograd.grad(module(x, layer.index, weights, lora).sum(), leaves)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), expected))


@pytest.mark.parametrize("ranks", [(0, 0), (8, 0), (3, 40)])
def test_what_is_saved_grows_with_the_tokens_alone(load: Load, ranks: tuple[int, int]) -> None:
    experts = load(random_layer(70, 37, 5, 2, 1), SPEC).weights.packed
    assert experts is not None
    saved = experts._native.saved_bytes  # pyright: ignore[reportPrivateUsage]
    assert [saved(tokens, *ranks) for tokens in (0, 1, 7, 4097)] == [
        tokens * experts.saved_bytes(*ranks) for tokens in (0, 1, 7, 4097)
    ]


class Block(nn.Module):
    """A linear layer and experts, adapted or not, added to what comes in."""

    def __init__(self, experts: FusedMoe, lora: ExpertsLora | None) -> None:
        super().__init__()
        self.linear, self.experts, self.lora = nn.Linear(64, 64), experts, lora

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x + self.experts(self.linear(x), index, weights, self.lora)


class Blocks(nn.Module):
    """Three blocks on one routing."""

    def __init__(self, experts: FusedMoe, lora: ExpertsLora | None, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(copy.deepcopy(experts), lora) for _ in range(3))
        self.recompute = recompute

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, index, weights, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = layer(x, index, weights)
        return x


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("adapted", [False, True], ids=["base", "lora"])
def test_a_compiled_model_is_one_graph_and_computes_the_same(load: Load, adapted: bool, recompute: bool) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    lora = factors(layer) if adapted else None
    model = Blocks(load(layer, SPEC, dtype=torch.float32), lora, recompute=recompute)
    inputs = (layer.x.float().requires_grad_(), layer.index, layer.weights.float().requires_grad_())
    trained = [inputs[0], inputs[2], *(each for each in (lora.factors if lora else ()) if each is not None)]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(2):
        found, expected = compiled(*inputs), model(*inputs)
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(out.square().sum(), trained) for out in (found, expected))
        assert all(map(torch.equal, *gradients))
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), model(*inputs))
    assert counter.frame_count == 2  # with and without gradients


def test_other_numbers_of_tokens_are_compiled_once(load: Load) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    module = load(random_layer(64, 48, 4, 2, 1), SPEC)
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (5, 17, 130):
        layer = random_layer(64, 48, 4, 2, tokens)
        inputs = (layer.x.bfloat16().requires_grad_(), layer.index, layer.weights.float())
        assert torch.equal(compiled(*inputs), module(*inputs))
    assert counter.frame_count == 1


def test_an_expert_that_does_not_exist_is_refused_in_a_compiled_model_too(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    layer.index[3, 0] = 4
    compiled = torch.compile(load(layer, SPEC), backend="aot_eager", fullgraph=True)
    with pytest.raises(IndexError, match="names expert 4; this layer has experts 0 to 3"):
        compiled(layer.x.bfloat16().requires_grad_(), layer.index, layer.weights.float())


def test_a_compiled_model_reads_mapped_experts(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    stored, mapped = load(layer, SPEC), load(layer, SPEC)
    content = mmap.mmap(-1, len(stored.weights.packed_storage))
    content[:] = stored.weights.packed_storage
    mapped.weights.take_packed(content)
    inputs = (layer.x.bfloat16().requires_grad_(), layer.index, layer.weights.float())
    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), stored(*inputs))


def test_a_key_names_the_kernel_wherever_it_is_read(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, 9)
    experts = load(layer, SPEC).weights.packed
    assert experts is not None
    named = PackedExperts.named(experts.key)
    assert named is PackedExperts.named(str(experts.key))
    inputs = (layer.x.bfloat16(), layer.index, layer.weights.float())
    found, _ = named.with_bytes(experts.packed).forward(*inputs, save=False)
    assert torch.equal(found, experts.forward(*inputs, save=False)[0])
    assert SPEC.entry in experts.key
    assert experts.with_threads(3).key != experts.key
