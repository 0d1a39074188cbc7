"""Dropout of what LoRA on experts reads: the generator, its masks, and products and gradients against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_layers import EXACT, FORMS, ISAS, Load, error, isas_with, random_layer, spec_of
from lora_layers import Adapted, adapt, assert_close, run_adapted, trained, with_gradients
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.isa import Isa
from ktc.model.experts.backends.streamed_backend import Streamed
from ktc.model.experts.host.host_node import HostNodes
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.reference import fused_moe_reference
from ktc.model.experts.trained import lora_dropout
from ktc.model.experts.trained.lora import ExpertsLora
from ktc.model.experts.trained.lora_dropout import AdaptedProduct, Drop, kept_only, philox
from ktc.model.experts.trained.weight_training import WeightTraining

# Hidden, intermediate, experts, experts per token, tokens, and how many experts get any.
SHAPES = {
    "panels": (64, 96, 8, 2, 40, 8),
    "odd sizes": (70, 37, 5, 2, 29, 5),
    "below a panel": (17, 9, 6, 3, 50, 6),
    "one token": (130, 50, 16, 4, 1, 16),
    "empty experts": (96, 64, 32, 2, 7, 3),
    "crowded": (160, 200, 3, 2, 150, 2),
}
P = 0.3
# The known answers of Random123 for counters and keys of zeros, of ones, and of digits of pi.
ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def masks(
    p: float, tokens: int, columns: int, *, seed: int = 5, expert: int = 0, product: AdaptedProduct = "gate_up"
) -> Tensor:
    """What is kept of `tokens` rows of one expert: ones and zeros."""
    of_product = Drop(torch.tensor(seed), p, p).of_product(product, torch.device("cpu"))
    assert of_product is not None
    rows = torch.arange(tokens)
    return kept_only(torch.ones(tokens, columns), of_product.bits(rows, torch.full_like(rows, expert), columns))


@pytest.mark.parametrize(("counter", "key", "answer"), ANSWERS.values(), ids=ANSWERS.keys())
def test_the_generator_has_the_published_numbers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    found = philox((torch.tensor(key[0]), torch.tensor(key[1])), (c0, c1, c2, c3))
    assert tuple(int(word) for word in found) == answer


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_a_mask_keeps_its_share_within_four_sigma(p: float) -> None:
    kept = masks(p, 400, 256)
    for share, count in ((kept.mean(), 400 * 256), (kept[:, :8].mean(), 400 * 8), (kept[7].mean(), 256)):
        assert abs(float(share) - (1 - p)) <= 4 * (p * (1 - p) / count) ** 0.5


def test_masks_of_other_calls_pairs_and_products_are_independent() -> None:
    first, count = masks(0.5, 64, 512), 64 * 512
    others = (
        masks(0.5, 64, 512, seed=6), masks(0.5, 64, 512, seed=5 + 2**32), masks(0.5, 64, 512, expert=1),
        masks(0.5, 64, 512, product="down"), first.roll(1, 0), first.roll(1, 1), first.roll(8, 1),
    )  # fmt: skip
    for other in others:
        assert abs(float((first == other).float().mean()) - 0.5) <= 4 * (0.25 / count) ** 0.5


def test_the_kept_are_scaled_so_that_the_mean_stays_and_all_may_be_dropped() -> None:
    assert lora_dropout.kept_scale(0.5) == 2.0
    assert lora_dropout.kept_scale(0.1) == pytest.approx(1 / 0.9, rel=2e-5)
    assert lora_dropout.kept_scale(1.0) == 0.0
    assert not masks(1.0, 4, 33).any()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("isa", ISAS)
def test_outputs_and_gradients_are_those_of_the_reference(load: Load, isa: Isa, shape: tuple[int, ...]) -> None:
    adapted = adapt(random_layer(*shape[:5], seed=2, experts_used=shape[5]), 8, dropout=P)
    assert_close(run_adapted(load(adapted.layer, spec_of(isa)), adapted), adapted.reference())


@pytest.mark.parametrize(("isa", "form"), isas_with(*FORMS[1:]))
def test_experts_of_any_form_are_those_of_the_reference(load: Load, isa: Isa, form: str) -> None:
    # no low-rank value is rounded: a gate may lie on the other side of a limit or of zero, where the gradient jumps
    adapted = adapt(random_layer(70, 37, 5, 2, 29, form=form), 5, selecting=True, dropout=0.5)
    assert_close(run_adapted(load(adapted.layer, spec_of(isa, form=form)), adapted), adapted.reference())


@pytest.mark.parametrize("ranks", [(8, 0), (0, 8), (3, 40)])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("form", EXACT[:2])
def test_the_scalar_oracle_is_exact_in_float64(load: Load, form: str, ranks: tuple[int, int], activations: str) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29, form=form), ranks, dropout=P)
    module = load(adapted.layer, spec_of("scalar", "fp64", form), activations=activations)
    for ours, theirs in zip(run_adapted(module, adapted, torch.float64), adapted.reference(), strict=True):
        assert error(ours, theirs) <= 1e-14


def test_each_product_has_its_own_probability(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29), 8, dropout=P)
    assert adapted.lora.down is not None
    for down in (0.0, 0.75, 1.0):
        lora = replace(adapted.lora, down=replace(adapted.lora.down, dropout=down))
        other = replace(adapted, lora=lora)
        module = load(other.layer, spec_of("scalar", "fp64"))
        for ours, theirs in zip(run_adapted(module, other, torch.float64), other.reference(), strict=True):
            assert error(ours, theirs) <= 1e-14 if theirs.any() else not ours.any()


@pytest.mark.parametrize("isa", ISAS)
def test_every_way_to_run_gives_the_same_bits(load: Load, isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_threads", lambda: 8)
    adapted = adapt(random_layer(200, 150, 6, 3, 45), (8, 33), dropout=P)
    alone = run_adapted(load(adapted.layer, spec_of(isa)), adapted)
    for options in ({"threads": 2}, {"threads": 5}, {"activations": "recompute"}):
        found = run_adapted(load(adapted.layer, spec_of(isa), **options), adapted)
        assert all(map(torch.equal, found, alone)), options


def test_a_checkpointed_call_draws_the_same_masks(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29), 8, dropout=P)
    module, layer = load(adapted.layer, spec_of(ISAS[0])), adapted.layer
    plain = run_adapted(module, adapted)
    x, weights, lora = trained(adapted, torch.bfloat16, torch.float32)
    torch.manual_seed(11)
    out = torch.utils.checkpoint.checkpoint(module, x, layer.index, weights, lora, use_reentrant=False)
    torch.rand(3)  # what is drawn between forward and backward changes nothing
    again = with_gradients(out, layer.grad, (x, weights, *lora.factors))  # type: ignore[arg-type]
    assert all(map(torch.equal, again, plain))


def test_calls_draw_masks_of_their_own_and_none_without_dropout(load: Load) -> None:
    adapted = adapt(random_layer(64, 48, 4, 2, 9), 8, dropout=P)
    module, inputs = load(adapted.layer, spec_of(ISAS[0])), (adapted.layer.x.bfloat16(), adapted.layer.index)
    weights = adapted.layer.weights.float()
    first, second = (module(*inputs, weights, adapted.lora) for _ in range(2))
    assert not torch.equal(first, second)
    before = torch.get_rng_state()
    module(*inputs, weights, adapt(adapted.layer, 8).lora)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_reference_backend_drops_the_same(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29), 8, dropout=P)
    module = load(adapted.layer, None, dtype=torch.float64)
    for ours, theirs in zip(run_adapted(module, adapted, torch.float64), adapted.reference(), strict=True):
        assert error(ours, theirs) <= 1e-14


def streamed(module: FusedMoe, devices: int = 1, buffer: int = 1 << 16) -> Callable[..., Tensor]:
    packed, form = module.weights.packed, module.form
    assert packed is not None
    backend = Streamed(packed, form, (torch.device("cpu"),) * devices, buffer)

    def run(x: Tensor, index: Tensor, weights: Tensor, lora: ExpertsLora) -> Tensor:
        return backend.run(x, index, weights, lora.drawn())

    return run


def run_streamed(module: FusedMoe, adapted: Adapted, dtype: torch.dtype, devices: int = 1) -> tuple[Tensor, ...]:
    masters = torch.float64 if dtype == torch.float64 else torch.float32
    x, weights, lora = trained(adapted, dtype, masters)
    torch.manual_seed(11)
    out = streamed(module, devices)(x, adapted.layer.index, weights, lora)
    return with_gradients(out, adapted.layer.grad, (x, weights, *lora.factors))


@pytest.mark.parametrize("form", EXACT)
@pytest.mark.parametrize("devices", [1, 2])
def test_sent_to_a_device_in_chunks_the_same_is_dropped(load: Load, form: str, devices: int) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 41, experts_used=4, form=form), (3, 5), dropout=P)
    module = load(adapted.layer, spec_of("scalar", "fp64", form))
    found = run_streamed(module, adapted, torch.float64, devices)
    for ours, theirs in zip(found, adapted.reference(), strict=True):
        assert error(ours, theirs) <= 1e-12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(256, 96, 8, 2, 64), (2048, 1408, 16, 6, 512)], ids=["small", "a layer"])
def test_a_gpu_drops_what_the_reference_drops(load: Load, shape: tuple[int, int, int, int, int]) -> None:
    adapted = adapt(random_layer(*shape), 8, dropout=P)
    layer, module = adapted.layer, load(adapted.layer, spec_of(ISAS[0]))
    packed, device = module.weights.packed, torch.device("cuda", 0)
    assert packed is not None
    x, weights, lora = trained(adapted, torch.bfloat16, torch.float32)
    on_gpu = x.detach().to(device).requires_grad_()
    torch.manual_seed(11)
    out = Streamed(packed, module.form, (device,)).run(on_gpu, layer.index.to(device), weights, lora.drawn())
    grads = torch.autograd.grad(out, (on_gpu, weights, *lora.factors), layer.grad.to(device, out.dtype))  # type: ignore[arg-type]
    found = tuple(tensor.cpu() for tensor in (out.detach(), *grads))
    assert_close(found, adapted.reference(), 2)


def test_no_seed_is_read_where_nothing_is_dropped() -> None:
    adapted = adapt(random_layer(64, 48, 4, 2, 9), 8)
    assert adapted.lora.drawn() is adapted.lora
    x, weights, lora = trained(adapted, torch.float64, torch.float64)
    stock = [*adapted.layer.stock.values()]
    out = fused_moe_reference(x, adapted.layer.index, weights, stock, adapted.layer.form, lora=lora)
    assert torch.equal(out, adapted.reference()[0])


def test_adapters_beside_weights_that_train_drop_the_same(load: Load) -> None:
    adapted = adapt(random_layer(70, 37, 5, 2, 29), 8, dropout=P)
    training = WeightTraining(masters=torch.float64)
    module = load(adapted.layer, spec_of("scalar", "fp64"), training=training)
    for ours, theirs in zip(run_adapted(module, adapted, torch.float64), adapted.reference(), strict=True):
        assert error(ours, theirs) <= 1e-14


def test_a_graph_that_would_keep_a_seed_is_refused(load: Load) -> None:
    adapted = adapt(random_layer(64, 48, 4, 2, 9), 8, dropout=P)
    module, nodes = load(adapted.layer, spec_of(ISAS[0])), HostNodes(lambda call: call())
    inputs = adapted.layer.x.bfloat16(), adapted.layer.index, adapted.layer.weights.float()
    with (
        nodes.recorded(module.step_context),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="drop inputs, as in training"),
    ):
        module(*inputs, adapted.lora)


def test_a_compiled_call_is_repeatable_for_a_seed(load: Load) -> None:
    adapted = adapt(random_layer(64, 48, 4, 2, 9), 8, dropout=P)
    module = load(adapted.layer, spec_of(ISAS[0]))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    first, second = (run_adapted(compiled, adapted) for _ in range(2))  # type: ignore[arg-type]
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, run_adapted(module, adapted)))
