"""The loss's kernel computes what PyTorch does, and PyTorch computes it, with a warning, where the kernel does not.

Without a GPU, Triton's interpreter runs the kernel on the CPU.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from ktc.model.hf.gpu_router import has_kernel
from ktc.training.trainers import frozen_head

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not has_kernel(torch.device("cpu")), reason="Triton is not installed"),
]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
IGNORED = -100


def kernels() -> Any:
    from ktc.training.trainers import loss_kernels

    return loss_kernels


def computed(by: Any, logits: Tensor, labels: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    logits, losses = logits.clone().to(DEVICE), torch.full((len(logits),), 7.0, device=DEVICE)
    by(logits, labels.to(DEVICE), losses, IGNORED, **more)
    return losses.cpu(), logits.float().cpu()


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(rows, columns, generator=generator)
    labels = torch.randint(0, columns, (rows,), generator=generator)
    labels[1] = IGNORED
    return logits.to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [16, 50, 256, 300])
def test_the_kernel_computes_losses_and_gradients_as_pytorch(columns: int, dtype: torch.dtype) -> None:
    logits, labels = drawn(5, columns, dtype)
    tile = kernels().Tile(128, 4)
    found, wanted = (
        computed(kernels().losses_with_gradient, logits, labels, tile=tile),
        computed(frozen_head._by_pytorch, logits, labels),
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    rounding = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(found[1], wanted[1], rtol=rounding, atol=1e-7)
    assert found[0][1] == 0
    assert not found[1][1].any()


def test_columns_that_are_masked_have_no_gradient() -> None:
    logits, labels = drawn(3, 300)
    logits[:, :130], labels[:] = -torch.inf, 200  # the first tile of a row has no finite logit
    tile = kernels().Tile(128, 4)
    losses, gradient = computed(kernels().losses_with_gradient, logits, labels, tile=tile)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    assert not gradient[:, :130].any()


def test_logits_and_labels_that_are_no_numbers_of_columns_give_nan() -> None:
    logits, labels = drawn(4, 50)
    logits[0, 3], labels[2], labels[3] = torch.nan, 50, -1
    losses, gradient = computed(kernels().losses_with_gradient, logits, labels)
    assert losses.isnan().tolist() == [True, False, True, True]
    assert gradient.isnan().any(1).tolist() == [True, False, True, True]


def test_a_kernel_that_computes_otherwise_or_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frozen_head, "_CHECKED", (4, 50))
    assert not frozen_head._kernel_fault(DEVICE)

    def fails(*_: Any) -> None:
        raise RuntimeError("no such instruction\nat line 3")

    def halves(logits: Tensor, labels: Tensor, losses: Tensor, ignored: int) -> None:
        frozen_head._by_pytorch(logits, labels, losses, ignored)
        losses.mul_(0.5)

    for function, told in ((fails, "no such instruction"), (halves, "relative error of 0.5")):
        monkeypatch.setattr(kernels(), "losses_with_gradient", function)
        assert told in frozen_head._kernel_fault(DEVICE)
    monkeypatch.setattr(frozen_head, "has_compiler", lambda: True)
    monkeypatch.setattr(frozen_head, "lacking", lambda device: "")
    monkeypatch.setattr(frozen_head, "_kernel_fault", lambda device: "it is wrong")
    with caplog.at_level(logging.WARNING):
        assert not frozen_head._has_kernel(torch.device("cuda:7"))
    assert caplog.messages == ["the loss on cuda:7 is computed by PyTorch, step by step: it is wrong"]
