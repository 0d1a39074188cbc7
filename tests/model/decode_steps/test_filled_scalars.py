"""Scalars within a capture are filled on their device, and are what `torch.tensor` makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ktc.model.decode_steps.filled_scalars import FilledScalars


@pytest.mark.parametrize("number", [0.0, -3, True])
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16}])
def test_a_scalar_for_a_device_is_filled_and_has_its_dtype(
    number: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[torch.Tensor]()
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *args, **kwargs: made.append(full(*args, **kwargs)) or made[-1])
    with FilledScalars():
        filled = torch.tensor(number, device="meta", **options)
    assert made[0] is filled
    assert (filled.dtype, filled.shape) == (torch.tensor(number, **options).dtype, ())


def test_other_tensors_are_made_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "full", lambda *_, **__: pytest.fail("it was filled"))
    with FilledScalars():
        assert torch.tensor(2.0).item() == 2.0
        assert torch.tensor([1, 2], device="meta").shape == (2,)
        assert torch.tensor(1.0, device="meta", requires_grad=True).requires_grad
