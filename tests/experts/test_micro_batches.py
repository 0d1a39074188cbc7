"""Several micro-batches in one pass over the experts' weights: as one by one, in outputs and in gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_layers import FORMS, ISAS, Layer, Load, error, random_layer, spec_of
from torch import Tensor

from ktc.experts.lora import ExpertsLora, Lora
from ktc.experts.module import FusedMoe, MicroBatch

SPEC = spec_of(ISAS[0])
LENGTHS = (7, 0, 1, 21, 16)


def micro_batches(layer: Layer, dtype: torch.dtype = torch.bfloat16) -> list[MicroBatch]:
    parts = (tensor.split(LENGTHS) for tensor in (layer.x.to(dtype), layer.index, layer.weights.float()))
    return [
        MicroBatch(x.clone().requires_grad_(), index, weights.clone().requires_grad_())
        for x, index, weights in zip(*parts, strict=True)
    ]


def factors(layer: Layer) -> ExpertsLora:
    generator = torch.Generator().manual_seed(3)

    def lora(inputs: int, outputs: int) -> Lora:
        a, b = (
            torch.randn(layer.num_experts, *shape, generator=generator).mul(0.1).requires_grad_()
            for shape in ((4, inputs), (outputs, 4))
        )
        return Lora(a, b, 0.5)

    return ExpertsLora(lora(layer.hidden, 2 * layer.intermediate), lora(layer.intermediate, layer.hidden))


def in_one_pass(module: FusedMoe, layer: Layer, lora: ExpertsLora | None) -> tuple[list[MicroBatch], list[Tensor]]:
    batches = micro_batches(layer)
    outs = module.forward_batches(batches, lora)
    torch.autograd.backward(outs, layer.grad.bfloat16().split(LENGTHS))
    return batches, list(outs)


def one_by_one(module: FusedMoe, layer: Layer, lora: ExpertsLora | None) -> tuple[list[MicroBatch], list[Tensor]]:
    batches, outs = micro_batches(layer), list[Tensor]()
    for batch, grad in zip(batches, layer.grad.bfloat16().split(LENGTHS), strict=True):
        outs.append(module(*batch.tensors, lora))
        outs[-1].backward(grad)
    return batches, outs


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "amx"])
def test_one_pass_gives_the_bits_of_separate_calls(load: Load, isa: str, activations: str) -> None:
    layer = random_layer(70, 37, 5, 2, sum(LENGTHS))
    module = load(layer, spec_of(isa), activations=activations)  # type: ignore[arg-type]
    (together, outs), (alone, expected) = (run(module, layer, None) for run in (in_one_pass, one_by_one))
    assert all(map(torch.equal, outs, expected))
    for ours, theirs in zip(together, alone, strict=True):
        assert torch.equal(ours.hidden.grad, theirs.hidden.grad)  # type: ignore[arg-type]
        assert torch.equal(ours.weights.grad, theirs.weights.grad)  # type: ignore[arg-type]


def test_gradients_of_lora_are_the_sums_of_separate_calls(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, sum(LENGTHS))
    module = load(layer, SPEC)
    ours, theirs = factors(layer), factors(layer)
    in_one_pass(module, layer, ours)
    one_by_one(module, layer, theirs)
    for once, summed in zip(ours.factors, theirs.factors, strict=True):
        assert once is not None
        assert summed is not None
        assert once.grad is not None
        assert summed.grad is not None
        # On AMX experts with few tokens are computed by other instructions, and what they round differs.
        assert error(once.grad, summed.grad.double()) < (5e-3 if SPEC.isa == "amx" else 1e-6)


def test_the_layer_is_one_node_of_the_graph(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(64, 48, 4, 2, sum(LENGTHS))
    module, calls = load(layer, SPEC), list[int]()
    stock = FusedMoe.forward
    monkeypatch.setattr(FusedMoe, "forward", lambda self, x, *rest: calls.append(x.shape[0]) or stock(self, x, *rest))
    module.forward_batches(micro_batches(layer))
    assert calls == [sum(LENGTHS)]


def test_the_reference_takes_micro_batches_too(load: Load) -> None:
    layer = random_layer(9, 7, 4, 2, sum(LENGTHS), form=FORMS[0])
    module = load(layer, None, dtype=torch.float64)
    batches = micro_batches(layer, torch.float64)
    for out, batch in zip(module.forward_batches(batches), batches, strict=True):
        torch.testing.assert_close(out, module(*batch.tensors))


def test_what_is_no_micro_batch_of_the_layer_is_refused(load: Load) -> None:
    layer = random_layer(64, 48, 4, 2, sum(LENGTHS))
    module = load(layer, SPEC)
    first, *_, last = micro_batches(layer)
    assert module.forward_batches([]) == ()
    with pytest.raises(ValueError, match="expected hidden states"):
        module.forward_batches([first, MicroBatch(last.hidden[:, :3], last.index, last.weights)])
    with pytest.raises(ValueError, match=r"share one dtype, found torch.bfloat16, torch.float32"):
        module.forward_batches([first, MicroBatch(last.hidden.float(), last.index, last.weights)])
