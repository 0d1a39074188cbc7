"""Calls with more rows than a step: crowded experts over the bus, the others on the CPU, kept ones where they are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from kernel_layers import ISAS, Load, error, quick_or_slow, random_layer, spec_of
from stored_experts import in_blocks, stored_experts
from torch import Tensor

from ktc.model.experts.backends.backend import Kept, Offload
from ktc.model.experts.backends.divided_backend import Divided
from ktc.model.experts.kept.kept_division import Division, even_over_bus, over_bus
from ktc.model.experts.kept.kept_experts import KeptExperts
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.streamed.stream_ring import ring_of
from ktc.model.experts.streamed.stream_sizes import ring_bytes
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BUFFER = 1 << 20
ANY = Division(1, 8.0)
QUICK = [spec_of(ISAS[0]), in_blocks("q4_0", "q8_0")]
FORMATS = [*QUICK, spec_of(ISAS[0], "bf16", "silu biased", codes=("int4", 32)), in_blocks("q4_k", "q6_k")]


def divided_by(module: FusedMoe, places: int, share: float, division: Division = ANY) -> KeptExperts:
    assert module.weights.packed is not None
    store = KeptExperts([(module.weights.packed, module.form)], DEVICE, places, share=share, fixed=True)
    module.kept = store.layers[0]
    module.offload = Offload((DEVICE,), 1024, BUFFER, kept=Kept(places, share, fixed=True, division=division))
    return store


def computed(module: FusedMoe, *inputs: Tensor) -> tuple[Tensor, int]:
    """What a call computes, and the bytes that crossed the bus for it."""
    ring, sent = ring_of(DEVICE, ring_bytes(BUFFER, module.packed_bytes // module.num_experts)), 0
    sent -= ring.figures().sent
    with torch.no_grad():
        result = module(*(tensor.to(DEVICE) for tensor in inputs)).cpu()
    return result, sent + ring.figures().sent


def ends_last(rows: list[int], sent: tuple[int, ...], share: float, division: Division) -> float:
    rest = sum(division.cost(count) for expert, count in enumerate(rows) if count and expert not in sent)
    return max(len(sent) / share, rest / (1 - share))


@pytest.mark.parametrize("share", [0.1, 0.37, 0.8])
def test_no_other_experts_let_bus_and_cpu_end_earlier(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    for crowded in (1.0, 6.0, 1000.0):
        division = Division(1, crowded)
        for _ in range(20):
            rows = torch.randint(0, 40, (7,), generator=generator).tolist()
            sent = over_bus(rows, (), share, division)
            chosen = [expert for expert, count in enumerate(rows) if count]
            others = (
                ends_last(rows, some, share, division)
                for number in range(len(chosen) + 1)
                for some in itertools.combinations(chosen, number)
            )
            assert ends_last(rows, sent, share, division) <= min(others) * 1.001


def test_crowded_experts_go_over_the_bus_and_kept_ones_nowhere() -> None:
    rows = [3, 90, 0, 40, 40, 2]
    assert over_bus(rows, (), 0.5, Division(1, 10.0)) == (1, 3, 4)
    assert over_bus(rows, {1}, 0.5, Division(1, 10.0)) == (3, 4)
    assert over_bus(rows, (), 0.0, ANY) == () and over_bus(rows, (), 1.0, ANY) == (0, 1, 3, 4, 5)


def test_the_planner_divides_even_choices_as_a_call_does() -> None:
    for count, share in itertools.product((1, 8, 30, 400), (0.2, 0.5, 0.9)):
        sent = over_bus([count] * 64, (), share, ANY)
        assert abs(len(sent) - even_over_bus(64, count, share, ANY)) <= 1


@pytest.mark.parametrize(
    "spec", [quick_or_slow(spec, spec in QUICK) for spec in FORMATS], ids=lambda spec: "-".join(spec.formats)
)
@pytest.mark.parametrize(("places", "share"), [(0, 0.0), (0, 0.4), (0, 1.0), (2, 0.4), (6, 0.4)])
def test_three_engines_compute_what_the_cpu_computes(spec: FusedMoeSpec, places: int, share: float) -> None:
    module, layer = stored_experts(spec, 6, tokens=40)
    x, index, weights = layer.x.bfloat16(), layer.index.clone(), layer.weights.float()
    index[:30, 0], index[:30, 1] = 4, 5  # two crowded experts
    with torch.no_grad():
        wanted = module(x, index, weights)
    divided_by(module, places, share)
    found, sent = computed(module, x, index, weights)
    assert error(found.float(), wanted.float()) <= 0.01
    one, far = module.packed_bytes // 6, len(index.unique()) - places
    assert sent == {0.0: 0, 1.0: far * one}.get(share, sent)
    assert 0 < sent < far * one or share != 0.4 or not far


@pytest.mark.parametrize("form", ["silu(alpha=1.702, limit=1.25, up_offset=1.0) biased transposed interleaved",
                                  "relu2 ungated"])  # fmt: skip
def test_every_form_and_number_of_choices_is_divided(load: Load, form: str) -> None:
    layer = random_layer(70, 37, 5, 2, 30, form=form)
    module = load(layer, spec_of(ISAS[0], form=form))
    generator = torch.Generator().manual_seed(3)
    index = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in range(30)])
    x, weights = layer.x.bfloat16(), torch.rand(30, 3, generator=generator)
    with torch.no_grad():
        wanted = module(x, index, weights)
    divided_by(module, 2, 0.5)
    assert error(computed(module, x, index, weights)[0].float(), wanted.float()) <= 0.01


def test_the_bits_are_the_same_in_every_run_and_with_any_number_of_threads(load: Load) -> None:
    layer = random_layer(70, 37, 8, 2, 60)
    results = list[Tensor]()
    for threads in (1, 3, 3):
        module = load(layer, spec_of(ISAS[0]))
        assert module.weights.packed is not None
        module.weights.packed = module.weights.packed.with_threads(threads)
        divided_by(module, 2, 0.4)
        results.append(computed(module, layer.x.bfloat16(), layer.index, layer.weights.float())[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_divided_calls_send_nothing_ahead_and_whole_ones_are_foreseen_after_them(load: Load) -> None:
    layers = [random_layer(70, 37, 5, 2, 40, seed=seed) for seed in range(2)]
    modules = [load(layer, spec_of(ISAS[0])) for layer in layers]
    inputs = [(layer.x.bfloat16(), layer.index, layer.weights.float()) for layer in layers]
    for module in modules:
        divided_by(module, 0, 0.5)
    ring = ring_of(DEVICE, ring_bytes(BUFFER, modules[0].packed_bytes // 5))

    def call(least: int) -> int:
        for module in modules:
            assert module.offload is not None
            module.offload = replace(module.offload, min_tokens=least)
        return sum(computed(module, *given)[1] for module, given in zip(modules, inputs, strict=True))

    whole = [call(1) for _ in range(3)]
    assert whole[2] > 0
    ahead = ring.figures().sent
    divided = [call(1024) for _ in range(3)]
    assert divided[1] == divided[2] < sum(module.packed_bytes for module in modules)
    assert ring.figures().sent - ahead == sum(divided)
    dropped = ring.figures().dropped
    for _ in range(2):
        call(1)
    assert ring.figures().dropped == dropped


def test_a_number_that_is_no_experts_is_refused(load: Load) -> None:
    layer = random_layer(70, 37, 5, 2, 20)
    module = load(layer, spec_of(ISAS[0]))
    divided_by(module, 2, 0.5)
    for wrong in (5, -1):
        with pytest.raises(IndexError):
            computed(module, layer.x.bfloat16(), torch.full_like(layer.index, wrong), layer.weights.float())


def test_calls_of_few_rows_whole_ones_and_those_with_gradients_are_not_divided(load: Load) -> None:
    module = load(random_layer(70, 37, 5, 2, 20), spec_of(ISAS[0]))
    divided_by(module, 2, 0.5, Division(17, 8.0))
    kinds = {tokens: type(module.backend(tokens, plain=True)) for tokens in (16, 17, 1023, 1024)}
    assert [tokens for tokens, kind in kinds.items() if kind is Divided] == [17, 1023]
    assert type(module.backend(100)) is not Divided
