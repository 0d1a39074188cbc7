"""Calls that a router should never make, by every backend: errors with the value and the layer, no read out of bounds.

`tests/stages/codegen/sanitizers` makes the same calls of the kernels under the address sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_layers import ISAS, Layer, Load, random_layer, spec_of
from recorded_steps import call_at_once
from torch import Tensor

from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.host.host_node import HostNodes
from ktc.model.experts.module import FusedMoe

SPEC = spec_of(ISAS[0])
HERE = torch.device("cpu")
HOSTILE = (-1, 4, 1 << 31, 1 << 40, -(1 << 63), (1 << 63) - 1)
BACKENDS = {
    "reference": None,
    "kernel": {},
    "recomputing": {"activations": "recompute"},
    "streamed": {"offload": Offload((HERE,), 1)},
    "streamed to two": {"offload": Offload((HERE, HERE), 1)},
    "resident": {"offload": Offload((HERE,), 1, resident=True)},
}


def module_of(load: Load, name: str, layer: Layer) -> FusedMoe:
    options = BACKENDS[name]
    module = load(layer, None) if options is None else load(layer, SPEC, **options)
    module.weights.fqn = "model.layers.3.mlp.experts"
    return module


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_that_do_not_exist(load: Load, backend: str, grad: bool) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module = module_of(load, backend, layer)
    x, weights = layer.x.bfloat16().requires_grad_(grad), layer.weights.float()
    expected = module(x, layer.index, weights)
    with torch.set_grad_enabled(grad):
        for tokens in (1, 9):
            for hostile in HOSTILE:
                index = layer.index[:tokens].clone()
                index[-1, -1] = hostile
                with pytest.raises(IndexError, match=f"names expert {hostile}; this layer has experts 0 to 3") as error:
                    module(x[:tokens], index, weights[:tokens])
                assert error.value.__notes__ == ["in `model.layers.3.mlp.experts`"]
    assert torch.equal(module(x, layer.index, weights), expected)


CALLS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], str]] = {
    "int32": (lambda x, i, w: (x, i.int(), w), "must be int64, found torch.int32"),
    "float": (lambda x, i, w: (x, i.float(), w), "must be int64, found torch.float32"),
    "bool": (lambda x, i, w: (x, i.bool(), w), "must be int64, found torch.bool"),
    "no dimension": (lambda x, i, w: (x, i[0, 0], w), "expected hidden states, indices and weights of shapes"),
    "one dimension": (lambda x, i, w: (x, i[:, 0], w[:, 0]), "expected hidden states"),
    "three dimensions": (lambda x, i, w: (x[None], i[None], w[None]), "expected hidden states"),
    "fewer tokens": (lambda x, i, w: (x, i[:5], w), "expected hidden states"),
    "fewer weights": (lambda x, i, w: (x, i, w[:, :1]), "expected hidden states"),
    "narrow": (lambda x, i, w: (x[:, :32], i, w), "expected hidden states"),
    "integers": (lambda x, i, w: (x.int(), i, w), "hidden states must be floating-point numbers, found torch.int32"),
    "complex": (lambda x, i, w: (x, i, w.to(torch.complex64)), "routing weights must be floating-point"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_another_kind(load: Load, backend: str, call: str) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module, (change, match) = module_of(load, backend, layer), CALLS[call]
    with torch.no_grad(), pytest.raises(ValueError, match=match) as error:
        module(*change(layer.x.bfloat16(), layer.index, layer.weights.float()))
    assert error.value.__notes__ == ["in `model.layers.3.mlp.experts`"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_odd_but_sound(load: Load, backend: str) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module = module_of(load, backend, layer)
    x, index, weights = layer.x.bfloat16(), layer.index, layer.weights.float()
    with torch.no_grad():
        expected = module(x, index, weights)
        strided = (x.t().contiguous().t(), index.t().contiguous().t(), weights.t().contiguous().t())
        assert torch.equal(module(*strided), expected)
        assert module(x[:0], index[:0], weights[:0]).shape == (0, 64)
        assert not module(x, index[:, :0], weights[:, :0]).any()
        for value in (float("nan"), float("inf")):
            found = module(x, index, weights.clone().index_fill_(0, torch.tensor([4]), value))
            assert not found[4].isfinite().any()
            assert torch.equal(found[:4], expected[:4]) and torch.equal(found[5:], expected[5:])


@pytest.mark.parametrize("hostile", HOSTILE)
def test_host_functions_of_a_graph(load: Load, hostile: int) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    module, nodes = load(layer, SPEC), HostNodes(call_at_once)
    index = layer.index.clone()
    index[-1, -1] = hostile
    with nodes.recorded(module.step_context), torch.no_grad():
        module(layer.x.bfloat16(), index, layer.weights.float())
    with pytest.raises(IndexError, match=f"names expert {hostile};"):
        nodes.check(lambda _: "layers.3")


def test_the_operator_alone_reads_nothing_beyond_a_tensor(load: Load) -> None:
    layer = random_layer(64, 96, 4, 2, 9)
    experts = load(layer, SPEC).weights.packed
    assert experts is not None
    x, index, weights = layer.x.bfloat16(), layer.index, layer.weights.float()
    trailing = (None, None, None, None, None, experts.key, 1.0, 1.0, 0.0, 0.0, False, True)
    out, saved = torch.ops.ktc.fused_moe(experts.packed, x, index, weights, *trailing)
    backward = torch.ops.ktc.fused_moe_backward
    assert torch.isfinite(backward(experts.packed, out, x, index, weights, saved, *trailing)[0]).all()
    for change in (
        {"x": x.float()}, {"x": x[:5]}, {"x": x[:, :32]}, {"x": x.t().contiguous().t()}, {"index": index.int()},
        {"index": index[:, :1]}, {"weights": weights[:5]}, {"weights": weights.double()},
        {"packed": experts.packed[:-4096]}, {"saved": saved[:-1]},
    ):  # fmt: skip
        given = {"packed": experts.packed, "x": x, "index": index, "weights": weights, "saved": saved} | change
        first = (given["packed"], given["x"], given["index"], given["weights"])
        with pytest.raises(ValueError, match=r"expected|fewer"):
            backward(first[0], out, *first[1:], given["saved"], *trailing)
        if "saved" not in change:
            with pytest.raises(ValueError, match="expected"):
                torch.ops.ktc.fused_moe(*first, *trailing)
