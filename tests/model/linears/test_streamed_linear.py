"""A streamed linear layer: the function of its weights, which only pass through the device."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from refresh_cycle import assert_cycle
from torch import nn

from ktc.diagnostics import InputRefused
from ktc.model.linears.streamed_linear import StreamedLinear

DEVICES = [
    "cpu",
    pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def pair(device: str, *, bias: bool) -> tuple[nn.Linear, StreamedLinear]:
    stock = nn.Linear(48, 33, bias=bias).requires_grad_(False)
    layer = StreamedLinear.from_linear(stock, torch.device(device), buffer=1 << 16)
    assert torch.equal(layer(torch.ones(2, 48)), stock(torch.ones(2, 48)))  # before it begins
    layer.begin()
    return stock, layer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradient_are_the_linear_layers(device: str, bias: bool) -> None:
    stock, layer = pair(device, bias=bias)
    x = torch.randn(3, 5, 48)
    theirs, ours = x.clone().requires_grad_(), x.to(device).requires_grad_()
    for _ in range(3):
        theirs.grad = ours.grad = None
        expected, found = stock(theirs), layer(ours)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(found.cpu(), expected)
        assert theirs.grad is not None and ours.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize("device", DEVICES)
def test_peft_adapts_it_on_its_device_and_saves_no_weights_of_it(device: str) -> None:
    stock, layer = pair(device, bias=False)
    norm = nn.LayerNorm(33, elementwise_affine=True, device=device).requires_grad_(False)
    model = get_peft_model(nn.Sequential(layer, norm), LoraConfig(r=4, target_modules=["0"], init_lora_weights=False))
    adapter = [p for p in model.parameters() if p.requires_grad]
    assert {str(p.device) for p in adapter} == {device}
    x = torch.randn(7, 48, device=device)
    model(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapter)
    assert not any(name.endswith("base_layer.weight") for name in model.state_dict())
    with model.disable_adapter():
        torch.testing.assert_close(model(x), norm(stock(x.cpu()).to(device)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_is_replaced_where_it_is_and_nothing_sent_ahead_is_used(device: str) -> None:
    stock, layer = pair(device, bias=True)
    x = torch.randn(3, 48, device=device)
    for _ in range(3):
        layer(x)  # from the third time on, the next pass is foreseen and sent
    assert layer.kept is not None
    other, at = torch.randn(33, 48), layer.kept.data_ptr
    assert_cycle(layer, lambda: layer.copy_from(stock.weight), lambda: layer(x), at)
    layer.restore("other")
    layer.copy_from(other)
    layer.process()
    torch.testing.assert_close(layer(x).cpu(), x.cpu() @ other.T + stock.bias)


def test_code_that_reads_its_weight_or_copies_it_is_refused() -> None:
    _, layer = pair("cpu", bias=False)
    assert layer.weight.shape == (33, 48)
    with pytest.raises(InputRefused, match="L448"):
        layer.weight @ torch.ones(48)
    with pytest.raises(InputRefused, match="L449"):
        copy.deepcopy(layer)
    with pytest.raises(InputRefused, match=r"L44[89]"):
        get_peft_model(nn.Sequential(layer, nn.LayerNorm(33)), LoraConfig(r=4, target_modules=["0"], use_dora=True))


def test_a_first_pass_in_inference_mode_leaves_the_ring_usable() -> None:
    _, layer = pair("cpu", bias=False)
    with torch.inference_mode():
        layer(torch.ones(2, 48))
    x = torch.ones(2, 48, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
