"""One kernel writes a token's keys and values where two copies would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from ktc.model.decode_steps import cache_kernels
from ktc.model.decode_steps.step_memory import writes_at_once

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (40, 24)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_are_written_at_the_position(width: int, value_width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.zeros(2, 3, 9, size, dtype=dtype, device=DEVICE) for size in (width, value_width))
    new_keys, new_values = (
        torch.randn(2, 1, 3, size, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        for size in (width, value_width)
    )
    assert writes_at_once(keys, values, new_keys, new_values, device=DEVICE.type)
    for position in (0, 8, 4):
        wanted = [memory.clone() for memory in (keys, values)]
        at = torch.tensor([position], device=DEVICE)
        for memory, new in zip(wanted, (new_keys, new_values), strict=True):
            memory.index_copy_(2, at, new)
        cache_kernels.write(keys, values, at, new_keys, new_values)
        assert torch.equal(keys, wanted[0]) and torch.equal(values, wanted[1])


def test_tensors_of_another_dtype_or_with_gaps_are_copied() -> None:
    keys = torch.zeros(1, 2, 4, 8, device=DEVICE)
    gaps = torch.zeros(1, 2, 1, 16, device=DEVICE)[..., ::2]
    assert writes_at_once(keys, keys, device=DEVICE.type)
    assert not writes_at_once(keys, keys.half(), device=DEVICE.type)
    assert not writes_at_once(keys, gaps, device=DEVICE.type)
    assert not writes_at_once(keys, keys, device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error would end CUDA for the process")
@pytest.mark.parametrize("position", [-1, 4])
def test_a_position_outside_of_the_cache_is_an_error(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = interpreter.InterpreterOptions(debug=True)  # it asks for its own, and not for those of the launch
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    keys, new = torch.zeros(1, 2, 4, 8), torch.ones(1, 2, 1, 8)
    with pytest.raises(Exception, match="outside of the cache"):
        cache_kernels.write(keys, keys.clone(), torch.tensor([position]), new, new)
