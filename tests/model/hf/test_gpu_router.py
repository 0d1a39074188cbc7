"""Routers on a GPU: the kernel beside PyTorch, and a stock router that runs it.

Without a GPU, Triton's interpreter runs the kernel on the CPU.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from kernel_layers import error
from routers import FORMS, logits_of, spec_of
from torch import Tensor

from ktc.diagnostics import HostLacks
from ktc.model.hf import gpu_router, router
from ktc.model.hf.gpu_router import GpuRouting, has_kernel
from ktc.model.hf.router import check_gpu_routing
from ktc.model.kernels.router_spec import Dtype, RouterForm

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not has_kernel(torch.device("cpu")), reason="Triton is not installed"),
]
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
BOUNDS: dict[Dtype, float] = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-6}


def drawn(form: RouterForm, hidden: Dtype, rows: int) -> tuple[Tensor, Tensor | None, torch.dtype]:
    logits, bias, given = logits_of(spec_of(form, hidden, "avx2"), rows)
    return logits.to(DEVICE), None if bias is None else bias.to(DEVICE), given.dtype


def stable_choice(form: RouterForm, logits: Tensor, bias: Tensor | None) -> Tensor:
    """The best experts, of equal ones the lower number first."""
    compared = router.compare(form, logits, bias)[1]
    return torch.sort(compared, dim=-1, descending=True, stable=True).indices[:, : form.top_k]


@pytest.mark.parametrize("name", FORMS)
def test_the_choice_and_the_weights_are_those_of_pytorch(name: str) -> None:
    form = FORMS[name]
    for rows in (1, 33):
        logits, bias, dtype = drawn(form, "fp32", rows)
        weights, chosen = GpuRouting(DEVICE.type)(form, logits, bias, dtype)
        assert torch.equal(chosen, stable_choice(form, logits, bias))
        expected = router.weigh(form, *router.compare(form, logits, bias), chosen, dtype)
        assert error(weights, expected) <= BOUNDS["fp32"]


@pytest.mark.parametrize("hidden", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "deepseek_v4", "ernie4_5_moe", "of the best group"])
def test_weights_of_16_bits_are_rounded_as_the_model_rounds_them(name: str, hidden: Dtype) -> None:
    form = FORMS[name]
    logits, bias, dtype = drawn(form, hidden, 17)
    weights, chosen = GpuRouting(DEVICE.type)(form, logits, bias, dtype)
    expected = router.weigh(form, *router.compare(form, logits, bias), chosen, dtype)
    assert weights.dtype == dtype and error(weights, expected) <= BOUNDS[hidden]


def test_a_nan_is_the_greatest_number_and_infinities_have_their_place() -> None:
    form = RouterForm(5, 3, "softmax", late=True)
    logits = torch.tensor([[0.0, torch.nan, -torch.inf, torch.inf, 2.0], [-torch.inf] * 5], device=DEVICE)
    _, chosen = GpuRouting(DEVICE.type)(form, logits, None, torch.float32)
    assert chosen.tolist() == [[1, 3, 4], [0, 1, 2]]


def test_no_rows_are_no_launch() -> None:
    logits, bias, dtype = drawn(FORMS["mixtral"], "fp32", 0)
    weights, chosen = GpuRouting(DEVICE.type)(FORMS["mixtral"], logits, bias, dtype)
    assert (weights.shape, chosen.shape) == ((0, 2), (0, 2))


def test_calls_with_gradients_are_those_of_pytorch() -> None:
    routing, logits = GpuRouting(DEVICE.type), torch.zeros(2, 8, device=DEVICE, requires_grad=True)
    assert not routing.serves(logits)
    with torch.no_grad():
        assert routing.serves(logits)
    assert routing.serves(logits.detach()) and not routing.serves(logits.detach().double())
    assert not GpuRouting("meta").serves(logits.detach())


def test_a_wrong_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_gpu_routing.__wrapped__
    for form in (FORMS["deepseek_v3"], FORMS["corrected and limited"]):
        check(form, DEVICE)
    right = GpuRouting.__call__

    def wrong(self: GpuRouting, form: RouterForm, *more: object) -> tuple[Tensor, Tensor]:
        return right(self, replace(form, scale=2.0), *copy.copy(more))  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(gpu_router.GpuRouting, "__call__", wrong)
    with pytest.raises(HostLacks, match="H249"):
        check(FORMS["mixtral"], DEVICE)
