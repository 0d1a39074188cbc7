"""The kernel of routers beside PyTorch, and a stock router that runs it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from families import config_of
from kernel_layers import error, quick_or_slow
from routers import QUICK, SPECS, logits_of, routers
from torch import Tensor, nn

from ktc.model import twin
from ktc.model.hf import router
from ktc.model.hf.router import (
    DTYPES,
    RouterLayout,
    Routing,
    fused_router,
    kernel_backward,
    kernel_forward,
    stock_results,
)
from ktc.model.kernels.kernel_library import Kernel
from ktc.model.kernels.router_spec import RouterForm, RouterSpec

pytestmark = pytest.mark.usefixtures("one_thread")
EACH = [quick_or_slow(name, name in QUICK, id=name) for name in SPECS]
# Relative: the roundings of a few operations.
BOUNDS = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5}


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Callable[[str], Kernel]:
    names = tuple(SPECS) if request.node.get_closest_marker("slow") else QUICK
    return lambda name: routers(names).kernel(SPECS[name].entry)


def routed(kernel: Kernel, spec: RouterSpec, tensors: tuple[Tensor, Tensor | None, Tensor], threads: int = 1) -> Any:
    """The weights, the choice, and the gradient of the logits."""
    logits, bias, given = tensors
    native = kernel.native(), kernel.engine(threads)
    weights, indices = kernel_forward(native, spec.form, logits, bias, given.dtype)
    return weights, indices, kernel_backward(native, logits, bias, indices, given)


def in_float64(spec: RouterSpec, tensors: tuple[Tensor, Tensor | None, Tensor], chosen: Tensor) -> tuple[Tensor, ...]:
    """The exact weights of a choice, and the exact gradient of the logits."""
    logits, bias, given = tensors
    form = replace(spec.form, logits="", scores="", compared="", weights="")
    leaf = logits.double().requires_grad_()
    scores, compared = router.compare(form, leaf, None if bias is None else bias.double())
    weights = router.weigh(form, scores, compared, chosen, torch.float64)
    return (weights.detach(), *torch.autograd.grad(weights, leaf, given.double()))


@pytest.mark.parametrize("name", EACH)
def test_weights_and_gradients_are_those_of_fp64(kernel: Callable[[str], Kernel], name: str) -> None:
    spec = SPECS[name]
    bound = max(BOUNDS[dtype] for dtype in spec.form.dtypes(spec.hidden).values())
    for rows in (0, 1, 7, 130):
        tensors = logits_of(spec, rows)
        weights, chosen, gradient = routed(kernel(name), spec, tensors)
        assert chosen.shape == weights.shape == (rows, spec.form.top_k)
        assert all(len(set(row)) == spec.form.top_k for row in chosen.tolist())
        if spec.form.takes_limited and spec.dtype != "fp32":
            continue  # equal values of 16 bits: another group is as good
        expected, wanted = in_float64(spec, tensors, chosen)
        assert rows == 0 or error(weights, expected) <= bound
        assert rows == 0 or float((gradient.double() - wanted).norm()) <= bound * max(1, float(wanted.norm()))


@pytest.mark.parametrize("name", EACH)
def test_the_choice_is_that_of_pytorch(kernel: Callable[[str], Kernel], name: str) -> None:
    spec = SPECS[name]
    if spec.form.dtypes(spec.hidden)["compared"] != "fp32":
        pytest.skip("values of 16 bits are equal too often")
    logits, bias, given = logits_of(spec, 64)
    weights, chosen, _ = routed(kernel(name), spec, (logits, bias, given))
    scores, compared = router.compare(spec.form, logits, bias)
    indices = compared.sort(dim=-1, descending=True, stable=True).indices[:, : spec.form.top_k]
    assert torch.equal(chosen, indices)
    expected = router.weigh(spec.form, scores, compared, indices, given.dtype)
    torch.testing.assert_close(weights, expected, rtol=1e-2 if spec.hidden != "fp32" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EACH)
def test_threads_and_other_rows_change_no_bit(kernel: Callable[[str], Kernel], name: str) -> None:
    spec = SPECS[name]
    tensors = logits_of(spec, 333)
    alone = routed(kernel(name), spec, tensors)
    for threads in (2, 5):
        assert all(map(torch.equal, routed(kernel(name), spec, tensors, threads), alone))
    one = routed(kernel(name), spec, (tensors[0][7:8], tensors[1], tensors[2][7:8]))
    assert all(torch.equal(found[0], whole[7]) for found, whole in zip(one, alone, strict=True))


@pytest.mark.parametrize("name", EACH)
def test_of_equal_scores_the_lowest_numbers_are_chosen(kernel: Callable[[str], Kernel], name: str) -> None:
    spec = SPECS[name]
    _, bias, given = logits_of(spec, 2)
    logits = torch.zeros(2, spec.form.num_experts, dtype=DTYPES[spec.dtype])
    bias = None if bias is None else torch.zeros_like(bias)
    weights, chosen, _ = routed(kernel(name), spec, (logits, bias, given))
    assert chosen.tolist() == [list(range(spec.form.top_k))] * 2
    values = 1 + spec.form.takes_limited  # a score outside of the best groups is a lower one
    assert all(len(row.unique()) <= values for row in weights)
    assert bool((weights.diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("name", EACH)
def test_values_that_are_no_numbers_are_those_of_pytorch(kernel: Callable[[str], Kernel], name: str) -> None:
    spec = SPECS[name]
    logits, bias, given = logits_of(spec, 4)
    logits[0, 3], logits[1, 2], logits[2], logits[3] = torch.nan, torch.inf, torch.nan, -torch.inf
    weights, chosen, _ = routed(kernel(name), spec, (logits, bias, given))
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < spec.form.num_experts
    expected, _ = router.route(spec.form, logits, bias, given.dtype)
    assert torch.equal(weights.isnan().sum(-1), expected.isnan().sum(-1))
    if spec.form.scoring != "softmax" or spec.form.late:
        assert chosen[0, 0] == 3, "a NaN is greater than any number"


def test_a_kernel_takes_its_arguments_by_name(kernel: Callable[[str], Kernel]) -> None:
    found = kernel(QUICK[0])
    native, engine = found.native(), found.engine(1)
    nothing = {"logits": 0, "bias": 0, "weights": 0, "indices": 0, "rows": 0}
    native.forward(engine, dict(reversed(nothing.items())))
    with pytest.raises(TypeError, match="no argument 'row'"):
        native.forward(engine, nothing | {"row": 2})
    with pytest.raises(TypeError, match="argument `rows` is missing"):
        native.forward(engine, {name: 0 for name in nothing if name != "rows"})
    with pytest.raises(TypeError):
        native.forward(engine, nothing | {"rows": "2"})
    later = native.forward_call(engine, nothing)
    later.rethrow()


# A stock router ------------------------------------------------------------------------------------------------------
FORM = RouterForm(8, 2, "softmax", total="plus", scores="fp32", weights="hidden")
LAYOUT = RouterLayout("", "weight", "", "", passed=False, hidden="fp32")


@pytest.fixture(scope="module")
def stock() -> nn.Module:
    model = twin.build(config_of("qwen3_moe", torch.float32, num_hidden_layers=1, norm_topk_prob=True), 5)
    return model.model.layers[0].mlp.gate


def fused(stock: nn.Module, form: RouterForm = FORM) -> nn.Module:
    module = copy.deepcopy(stock)
    layout = replace(LAYOUT, results=stock_results(module, form, LAYOUT))
    return fused_router(module, Routing(form, layout, None, 1))


def test_a_router_returns_the_stock_results_in_their_order(stock: nn.Module) -> None:
    assert stock_results(stock, FORM, LAYOUT) == ("logits", "weights", "indices")
    x = torch.randn(2, 5, 64)
    for found, expected in zip(fused(stock)(x), stock(x), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_router_without_memory_is_tried_on_the_cpu(stock: nn.Module) -> None:
    """As in a large model, whose modules are made on meta before any is filled."""
    router._stock_results.cache_clear()
    with torch.device("meta"):
        assert stock_results(copy.deepcopy(stock).to("meta"), FORM, LAYOUT) == ("logits", "weights", "indices")


def test_a_routing_that_is_not_the_stock_one_is_refused(stock: nn.Module) -> None:
    for wrong in (replace(FORM, total="none"), replace(FORM, scale=2.0), replace(FORM, scoring="sigmoid")):
        with pytest.raises(ValueError, match="other values"):
            stock_results(stock, wrong, LAYOUT)
    with pytest.raises(ValueError, match="chosen experts"):
        stock_results(stock, replace(FORM, top_k=3), LAYOUT)
    with pytest.raises(ValueError, match="does not run alone"):
        stock_results(stock, FORM, replace(LAYOUT, passed=True))
    with pytest.raises(ValueError, match="of 9 experts"):
        fused_router(copy.deepcopy(stock), Routing(replace(FORM, num_experts=9), LAYOUT, None, 1))


def test_hooks_copies_and_pickles_are_those_of_the_stock_module(stock: nn.Module) -> None:
    module, seen = fused(stock), list[Any]()
    module.register_forward_hook(lambda _, args, results: seen.append((args, results)))
    x = torch.randn(3, 64)
    results = module(x)
    assert seen[0][0][0] is x
    assert seen[0][1] is results
    assert module.state_dict().keys() == stock.state_dict().keys()
    for other in (copy.deepcopy(fused(stock)), pickle.loads(pickle.dumps(fused(stock)))):
        assert type(other).__qualname__ == type(stock).__qualname__
        assert torch.equal(other(x)[1], results[1])


def test_stock_code_computes_under_autocast(stock: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "route", lambda *_: pytest.fail("not the stock code"))
    x = torch.randn(3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        for found, expected in zip(fused(stock)(x), stock(x), strict=True):
            assert torch.equal(found, expected)


def test_gradients_reach_the_gate_and_the_hidden_states(stock: nn.Module) -> None:
    found, expected = fused(stock), copy.deepcopy(stock)
    x = torch.randn(6, 64)
    given = torch.randn(6, 2)
    gradients = []
    for module in (found, expected):
        leaf = x.clone().requires_grad_()
        weights = module(leaf)[1]
        gradients.append(torch.autograd.grad(weights, (leaf, *module.parameters()), given))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
