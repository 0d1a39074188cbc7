"""INT4 in groups is that of compressed-tensors bit for bit, and training sees the weights that inference reads."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from ktc.model.checkpoint.int4 import Int4, ScaleMode, fake_quantised, packed, quantised, unpacked

SHAPES = ((64, 256), (33, 96), (5, 32))
GROUPS = (32, -1)


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows of very different sizes, with a group of zeros and one of tiny values."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.empty(rows, 1).uniform_(-3, 1, generator=generator)
    weight = torch.randn(rows, columns, generator=generator) * sizes
    weight[0, :32], weight[1, :32] = 0, 1e-6
    return weight.to(dtype)


def decompressed(found: Int4) -> Tensor:
    """The weight as compressed-tensors restores it."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": found.group}
    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights, "format": "pack-quantized"})
    shape = torch.tensor(found.codes.shape)
    stored = {"weight_packed": packed(found.codes), "weight_scale": found.scales, "weight_shape": shape}
    compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    return cast("Tensor", compressor.decompress(stored, scheme)["weight"])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", GROUPS)
def test_the_weight_is_what_compressed_tensors_restores(shape: tuple[int, int], group: int) -> None:
    found = quantised(drawn(*shape), group)
    assert torch.equal(decompressed(found), found.weight(torch.bfloat16))
    assert int(found.codes.abs().max()) <= 7


@pytest.mark.parametrize("columns", [32, 8, 7, 33, 1])
def test_packing_is_that_of_compressed_tensors(columns: int) -> None:
    codes = torch.randint(-8, 8, (5, columns), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    words = packed(codes)
    assert torch.equal(words, pack_to_int32(codes, 4))
    assert torch.equal(unpacked(words, columns), codes)
    assert torch.equal(unpack_from_int32(words, 4, torch.Size(codes.shape)), codes)


def test_the_order_of_nibbles() -> None:
    codes = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]], dtype=torch.int8)
    assert int(packed(codes)[0, 0]) & 0xFFFFFFFF == 0xFEA98710


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantising_again_changes_nothing(dtype: torch.dtype) -> None:
    found = quantised(drawn(64, 256, dtype), 32)
    again = quantised(found.weight(dtype), 32)
    assert torch.equal(again.scales, found.scales)
    assert torch.equal(again.codes, found.codes)


def test_every_bf16_maximum_survives() -> None:
    greatest = torch.arange(128, 256).float().view(-1, 1).to(torch.bfloat16)
    found = quantised(torch.cat([greatest, -greatest / 3], 1), -1)
    assert torch.equal(quantised(found.weight(torch.bfloat16), -1).scales, found.scales)


def test_masters_in_fp32_are_what_their_bf16_is() -> None:
    master = drawn(8, 64, torch.float32)
    assert torch.equal(fake_quantised(master, 32), fake_quantised(master.to(torch.bfloat16), 32).float())


@pytest.mark.parametrize("mode", ["scale_first", "slime"])
def test_the_gradient_passes_unchanged(mode: ScaleMode) -> None:
    weight, upstream = drawn(6, 64).requires_grad_(), drawn(6, 64, seed=2)
    fake_quantised(weight, 32, mode).backward(upstream)
    assert torch.equal(cast("Tensor", weight.grad), upstream)


def test_slime_multiplies_in_fp32() -> None:
    weight = drawn(64, 256)
    values = weight.float().view(64, -1, 32)
    scales = (values.abs().amax(-1, keepdim=True) / 7).clamp(min=1e-5)
    expected = (torch.round(values / scales).clamp(-7, 7) * scales).view(64, 256).to(torch.bfloat16)
    found = fake_quantised(weight, 32, "slime")
    assert torch.equal(found, expected)
    assert not torch.equal(found, fake_quantised(weight, 32))


@pytest.mark.parametrize(("columns", "group"), [(33, 32), (31, 32), (64, 48)])
def test_groups_that_do_not_divide_are_refused(columns: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} do not divide {columns}"):
        quantised(torch.zeros(2, columns), group)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.zeros(2, 64)
    weight[1, 40] = value
    with pytest.raises(ValueError, match="not finite"):
        quantised(weight, 32)
