"""Fused RMS norms compute what the stock modules compute; modules that compute anything else keep their code."""

from __future__ import annotations

import copy
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding_models import difference, stock_model
from torch import Tensor, nn

from ktc.model.decode_steps import gpu_norms
from ktc.model.decode_steps.gpu_norms import FusedNorm, fuse_norms
from ktc.model.kernels.triton_support import lacking

SIZE = 96
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


class Norm(nn.Module):
    """The norm of Llama and most others."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE).to(dtype))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class RoundedOnce(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.to(torch.float32) * wide).to(x.dtype)


class AroundOne(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (1 + self.weight) * wide.to(x.dtype)


class Centred(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OverTokens(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-2, keepdim=True) + self.eps)).to(x.dtype)


class HiddenEpsilon(Norm):
    def __init__(self) -> None:
        super().__init__()
        del self.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", [Norm, RoundedOnce])
def test_a_fused_norm_rounds_as_the_stock_one(kind: type[Norm], dtype: torch.dtype) -> None:
    stock = nn.Sequential(kind(dtype), kind(dtype))
    fused = copy.deepcopy(stock)
    assert fuse_norms(fused, "cpu") == ("0", "1")
    assert type(fused[0]) is type(fused[1]) and isinstance(fused[0], FusedNorm)
    x = torch.randn(3, 5, SIZE).to(dtype)
    torch.testing.assert_close(fused(x), stock(x))
    fused[0].eps = stock[0].eps = 0.5  # what a user sets later counts
    torch.testing.assert_close(fused[0](x), stock[0](x))
    assert fused[0](x.double()).dtype == stock[0](x.double()).dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused[0](x), stock[0](x))


def test_a_fused_norm_is_copied_and_pickled() -> None:
    model = nn.Sequential(Norm())
    fuse_norms(model, "cpu")
    x = torch.randn(2, SIZE).to(torch.bfloat16)
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other[0], FusedNorm)
        assert torch.equal(other(x), model(x))
        assert type(other[0]) is type(model[0])


@pytest.mark.parametrize("kind", [AroundOne, Centred, OverTokens, HiddenEpsilon])
def test_other_modules_keep_their_code(kind: type[Norm]) -> None:
    model = nn.Sequential(kind())
    assert fuse_norms(model, "cpu") == ()
    assert type(model[0]) is kind


def test_fp32_weights_beside_16_bit_states_keep_the_code_of_the_module() -> None:
    stock = nn.Sequential(RoundedOnce(torch.float32))
    stock[0].weight.data.fill_(0.3)
    fused = copy.deepcopy(stock)
    assert fuse_norms(fused, "cpu") == ("0",)  # in fp32 it rounds as others
    x = torch.randn(3, SIZE).half()
    assert torch.equal(fused(x), stock(x))


def test_modules_with_hooks_and_those_elsewhere_keep_their_code() -> None:
    model = nn.Sequential(Norm(), Norm())
    model[0].register_forward_hook(lambda *_: None)
    assert fuse_norms(model, "cpu") == ("1",)
    assert fuse_norms(nn.Sequential(Norm()), "cuda") == ()


@pytest.mark.parametrize("fault", ["Failed to find C compiler", "the kernel computes other values"])
def test_a_kernel_that_fails_leaves_the_kernels_of_pytorch_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def normed(x: Tensor, weight: Tensor, epsilon: float, *, once: bool) -> Tensor:
        if fault.startswith("Failed"):
            raise RuntimeError(f"{fault}. Please specify via CC environment variable")
        return x

    kernels: Any = SimpleNamespace(WIDEST=SIZE, normed=normed)
    monkeypatch.setattr(gpu_norms, "_has_triton", lambda device: True)
    monkeypatch.setattr(gpu_norms, "_kernels", lambda: kernels)
    stock = nn.Sequential(Norm(), Norm())
    fused, x = copy.deepcopy(stock), torch.randn(3, SIZE).bfloat16()
    with caplog.at_level(logging.WARNING):
        assert fuse_norms(fused, "cpu") == ("0", "1")
    assert len(caplog.messages) == 1 and fault in caplog.messages[0]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), stock(x))


def test_a_kernel_is_used_without_gradients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Tensor]()

    def normed(x: Tensor, weight: Tensor, epsilon: float, *, once: bool) -> Tensor:
        calls.append(x)
        return gpu_norms._normed(x, weight, epsilon, once=once)

    kernels: Any = SimpleNamespace(WIDEST=SIZE, normed=normed)
    monkeypatch.setattr(gpu_norms, "_has_triton", lambda device: True)
    monkeypatch.setattr(gpu_norms, "_kernels", lambda: kernels)
    model, x = nn.Sequential(Norm()), torch.randn(3, SIZE).bfloat16()
    fuse_norms(model, "cpu")
    calls.clear()
    model(x).sum().backward()
    assert not calls
    with torch.no_grad():
        model(x)
    assert len(calls) == 1


# gpt_oss rounds once, after the weight.
@pytest.mark.parametrize(("family", "norms"), [("deepseek_v2", 10), ("qwen3_moe", 9), ("gpt_oss", 5)])
def test_a_model_with_fused_norms_is_the_stock_one(family: str, norms: int) -> None:
    stock = stock_model(family, torch.bfloat16)
    fused = copy.deepcopy(stock)
    assert len(fuse_norms(fused, "cpu")) == norms
    ids = torch.randint(3, stock.config.vocab_size, (2, 9))
    with torch.no_grad():
        assert difference(fused(ids).logits, stock(ids).logits) <= 0.02


@pytest.mark.skipif(bool(lacking(DEVICE)), reason="Triton does not run here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 3, SIZE), (0, SIZE), (1, 1, 2 * SIZE)], ids=["rows", "none", "part"])
@pytest.mark.parametrize("kind", [Norm, RoundedOnce])
def test_the_kernel_rounds_as_the_stock_module(kind: type[Norm], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A part of a row is what a projection of latents and rotary keys has."""
    from ktc.model.decode_steps.norm_kernels import normed

    norm, once = kind(dtype).to(DEVICE), kind is RoundedOnce
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)[..., -SIZE:]
    with torch.no_grad():
        found, wanted = normed(x, norm.weight, norm.eps, once=once), norm(x)
    assert found.shape == wanted.shape and found.dtype == dtype and found.is_contiguous()
    if dtype == torch.float16:
        assert int((found != wanted).sum()) <= 0.01 * found.numel()
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
