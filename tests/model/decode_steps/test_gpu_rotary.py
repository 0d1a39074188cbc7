"""Rotary positions by one kernel: recognised in stock code, equal to it, for steps and prompts.

Without a GPU, Triton's interpreter runs the kernel on the CPU.
"""

from __future__ import annotations

import copy
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from kernel_layers import error
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ktc.model import twin
from ktc.model.decode_steps import gpu_rotary
from ktc.model.decode_steps.gpu_rotary import FusedRotary, fuse_rotary
from ktc.model.kernels.triton_support import lacking

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
KINDS = {
    "qwen3_moe": {"apply_rotary_pos_emb": "halves"},
    "gpt_oss": {"apply_rotary_pos_emb": "narrow"},
    "deepseek_v2": {"apply_rotary_emb": "pairs"},
    "deepseek_v3": {"apply_rotary_pos_emb_interleave": "interleaved", "apply_rotary_pos_emb": "halves"},
}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(bool(lacking(DEVICE)), reason="Triton does not run here"),
]


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    config = twin.shrink(twin.default_config(family))
    config.dtype = dtype
    return twin.build(config, 7, dtype, DEVICE.type).eval()


def stepped(model: Any, rows: int = 2) -> Tensor:
    ids = torch.randint(3, 90, (rows, 9), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :8], use_cache=True).past_key_values
        return model(input_ids=ids[:, 8:], past_key_values=cache).logits


@pytest.mark.parametrize("family", KINDS)
def test_the_rotations_of_families_are_recognised(family: str) -> None:
    attention = type(model_of(family).model.layers[0].self_attn)
    assert gpu_rotary._rotating(attention) == KINDS[family]


@pytest.mark.parametrize("family", KINDS)
def test_steps_are_those_of_stock_code(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    wanted, calls = stepped(model), list[str]()
    kernel = gpu_rotary._kernel
    monkeypatch.setattr(gpu_rotary, "_kernel", lambda kind: calls.append(kind) or kernel(kind))
    layers = len(model.model.layers)
    assert len(fuse_rotary(model, DEVICE.type)) == layers
    calls.clear()
    found = stepped(model)
    assert len(calls) == 2 * layers, "a prompt of eight tokens and a step"
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-5


@pytest.mark.parametrize("kind", gpu_rotary._KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits_are_rounded_as_stock_code_rounds_them(kind: Any, dtype: torch.dtype) -> None:
    given = [*gpu_rotary._random(kind, DEVICE, dtype)]
    for found, wanted in zip(gpu_rotary._kernel(kind)(*given), gpu_rotary._reference(kind, *given), strict=True):
        if dtype == torch.bfloat16 and DEVICE.type == "cpu":  # the interpreter cuts digits off
            assert error(found, wanted) <= 0.01
        else:
            assert gpu_rotary._same(found, wanted)


def test_angles_of_one_row_serve_all_sequences() -> None:
    query, key, cos, sin = gpu_rotary._random("halves", DEVICE, torch.float32)
    rotate = gpu_rotary._kernel("halves")
    found, wanted = (
        rotate(query, key, cos[:1], sin[:1]),
        rotate(query, key, cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1)),
    )
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


class Operators(TorchDispatchMode):
    """The names of PyTorch's operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", gpu_rotary._KINDS)
def test_angles_may_be_columns_and_are_not_copied(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktc.model.decode_steps import rotary_kernels

    query, key, *angles = gpu_rotary._random(kind, DEVICE, torch.float32)
    columns = [angle.mT.contiguous().mT for angle in angles]
    assert gpu_rotary._serves(kind, query, key, *columns)
    found, wanted = (gpu_rotary._kernel(kind)(query, key, *given) for given in (columns, angles))
    monkeypatch.setattr(rotary_kernels, "_rotate", MagicMock())  # the interpreter copies
    with Operators() as operators:
        gpu_rotary._kernel(kind)(query, key, *columns)
    views = {"aten.view_as_real.default", "aten.select.int"}
    assert [name for name in operators.names if name not in views] == ["aten.new_empty.default"] * 2
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_calls_that_the_kernel_does_not_compute_are_those_of_stock_code() -> None:
    query, key, cos, sin = gpu_rotary._random("halves", DEVICE, torch.float32)
    assert gpu_rotary._serves("halves", query, key, cos, sin)
    assert not gpu_rotary._serves("narrow", query, key, cos, sin)
    assert not gpu_rotary._serves("halves", query.clone().requires_grad_(), key, cos, sin)
    assert not gpu_rotary._serves("halves", query.double(), key.double(), cos.double(), sin.double())
    assert not gpu_rotary._serves("halves", query, key[..., :32], cos, sin)
    assert not gpu_rotary._serves("halves", query, key, cos.half(), sin.half())
    long = torch.empty(2, 6, 1 << 22, 64, dtype=query.dtype, device="meta")
    assert not gpu_rotary._serves("halves", long, long[:, :2], *(long[:, 0] for _ in range(2)))


def test_a_prompt_is_rotated_as_by_stock_code() -> None:
    given = [*gpu_rotary._random("pairs", DEVICE, torch.float32)]
    long = [tensor.repeat_interleave(9, 2 if tensor.dim() == 4 else 1) for tensor in given]
    assert gpu_rotary._serves("pairs", *long)
    for found, wanted in zip(gpu_rotary._kernel("pairs")(*long), gpu_rotary._reference("pairs", *long), strict=True):
        assert error(found, wanted) <= 1e-6


def test_other_code_and_wrong_kernels_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_moe")
    hooked = model.model.layers[0].self_attn
    hooked.register_forward_hook(lambda *_: None)
    assert fuse_rotary(model, "meta") == ()
    assert fuse_rotary(copy.deepcopy(model), DEVICE.type) == ("model.layers.1.self_attn",)
    assert not isinstance(hooked, FusedRotary)
    gpu_rotary._equals.cache_clear()
    monkeypatch.setattr(gpu_rotary, "_kernel", lambda _: lambda q, k, *_: (q, k))
    assert fuse_rotary(model, DEVICE.type) == ()
    gpu_rotary._equals.cache_clear()


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_next"])
def test_models_that_rotate_parts_of_heads_keep_their_code(family: str) -> None:
    """The kernel serves none of their calls."""
    assert fuse_rotary(model_of(family), DEVICE.type) == ()


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_once(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Compute in fp32 and round once."""
    cos, sin = cos.unsqueeze(1).float(), sin.unsqueeze(1).float()
    return tuple((x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (query, key))


class RoundedOnce(nn.Module):
    """A module whose first parameter is of another dtype than its queries."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        made = (nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False) for dtype in dtypes)
        self.weights = nn.ParameterList(made)

    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return apply_rotary_once(query, key, cos, sin)


class ByKeyword(RoundedOnce):
    def forward(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return apply_rotary_once(query=query, key=key, cos=cos, sin=sin)


@pytest.mark.parametrize("stock", [RoundedOnce, ByKeyword])
def test_the_kernel_serves_calls_of_the_dtypes_in_which_it_rounds_as_stock_code(stock: type[RoundedOnce]) -> None:
    model = nn.Sequential(stock(torch.float32, torch.float16)).to(DEVICE)
    assert fuse_rotary(model, DEVICE.type) == ("0",)
    given = [*gpu_rotary._random("halves", DEVICE, torch.float16)]
    for found, wanted in zip(model[0](*given), apply_rotary_once(*given), strict=True):
        assert torch.equal(found, wanted)


def test_packed_parameters_do_not_decide_whether_a_kernel_is_used() -> None:
    assert fuse_rotary(nn.Sequential(RoundedOnce(torch.uint8)).to(DEVICE), DEVICE.type) == ("0",)
    assert fuse_rotary(nn.Sequential(RoundedOnce(torch.float16)).to(DEVICE), DEVICE.type) == ()


def test_a_copy_computes_by_the_kernel_too() -> None:
    model = model_of("qwen3_moe")
    fuse_rotary(model, DEVICE.type)
    copied = copy.deepcopy(model)
    assert all(isinstance(cast("nn.Module", layer.self_attn), FusedRotary) for layer in copied.model.layers)
    assert torch.equal(stepped(copied), stepped(model))
