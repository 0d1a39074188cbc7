"""Codes of experts on a GPU: decoded, and multiplied as they are, by Triton.

On a GPU, decoded weights have the bits of the CPU's kernels. Without one, Triton's interpreter runs the kernels on the
CPU (`conftest.py`); it cuts to bf16 where a GPU rounds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_layers import ISAS, error, quick_or_slow, spec_of
from lora_layers import adapt, run_adapted
from stored_experts import in_blocks, stored_experts
from torch import Tensor

from ktc.diagnostics import HostLacks
from ktc.foundation.formats import FORMATS
from ktc.model.experts.backends.backend import Offload
from ktc.model.experts.backends.resident_backend import GpuResident
from ktc.model.experts.gpu import coded_kernels
from ktc.model.experts.layouts.coded_matrices import CodedMatrices, are_coded
from ktc.model.experts.layouts.panel_codes import codes_of
from ktc.model.experts.layouts.panels import panels_of
from ktc.model.experts.products import coded_check, grouped_products
from ktc.model.experts.products.coded_check import check_codes, random_matrices
from ktc.model.experts.products.packed_layout import PackedLayout
from ktc.model.experts.streamed.expert_stream import expert_stream
from ktc.model.kernels.fused_moe_spec import FusedMoeSpec
from ktc.model.loading.load_as import check_gpu_products

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
EXACT = DEVICE.type == "cuda"
BOUND = 0.01
INT4 = spec_of(ISAS[0], codes=("int4", 32))
OTHERS = [spec_of(ISAS[0], codes=("int4", 128)), spec_of(ISAS[0], codes=("fp8", 128)), in_blocks("q8_0", "q4_0"),
          in_blocks("q4_1", "mxfp4"), in_blocks("uint4_g32", "uint4_g128"),
          in_blocks("q4_k", "q6_k"), in_blocks("q5_k", "nvfp4"),
          spec_of(ISAS[0], "bf16", "silu biased", codes=("int4", 32))]  # fmt: skip


def test_every_coded_format_has_codes_for_gpus() -> None:
    coded = {name for name, row in FORMATS.items() if codes_of(row, 128) is not None}
    assert coded == {name for name, row in FORMATS.items() if row.coded}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [INT4, *OTHERS], ids=lambda spec: "-".join(spec.formats))
def test_codes_in_the_bytes_of_the_cpus_kernels_are_decoded_and_multiplied(spec: FusedMoeSpec) -> None:
    module, _ = stored_experts(spec, 3)
    packed = module.weights.packed
    assert packed is not None and are_coded(*packed.panels)
    layout = expert_stream(packed, module.form, torch.device("cpu"))._layout
    stored = packed.packed.view(3, -1).to(DEVICE)
    for interleaved in (False, True):
        ordered = replace(layout, form=replace(layout.form, interleaved=interleaved))
        for part, matrix in zip(ordered.coded(stored)[:2], ordered.read(stored)[:2], strict=True):
            assert isinstance(part, CodedMatrices) and isinstance(matrix, Tensor)
            assert part.shape == matrix.shape
            decoded = coded_kernels.decoded(part)
            assert torch.equal(decoded, matrix) if EXACT else error(decoded.float(), matrix.float()) <= BOUND
            assert_products(part, matrix, torch.tensor([1, 1, 3], dtype=torch.int32, device=DEVICE))


def assert_products(coded: CodedMatrices, matrix: Tensor, ends: Tensor) -> None:
    rows = torch.randn(int(ends[-1]), coded.columns).bfloat16().to(DEVICE)
    parts = zip(rows.float().tensor_split(ends[:-1].long().cpu()), matrix.float(), strict=True)
    wanted = torch.cat([of_expert @ one.T for of_expert, one in parts])
    for products in (coded_kernels.few_rows, coded_kernels.some_rows):
        assert error(products(rows, coded, ends).float(), wanted) <= BOUND


FORMS = [("mxfp4", 0), ("q4_1", 0), ("q8_0", 0), ("int4", 32), ("int4", 128), ("fp8", 128), ("uint4_g32", 0),
         ("q4_k", 0), ("q5_k", 0), ("q6_k", 0), ("nvfp4", 0), ("int8", 0)]  # fmt: skip


@pytest.mark.parametrize("form", [quick_or_slow(form, form == FORMS[0]) for form in FORMS], ids=str)
def test_products_are_checked_before_the_first_use_of_a_format(form: tuple[str, int]) -> None:
    check_codes.__wrapped__(panels_of(*form), DEVICE)


def test_a_device_that_multiplies_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_kernels, "few_rows", lambda rows, matrices, ends: rows.new_zeros(len(rows), 59))
    monkeypatch.setattr(coded_kernels, "decoded", lambda matrices: random_matrices(matrices.panels, DEVICE)[1])
    with pytest.raises(HostLacks, match="products of one row of codes e2m1 are wrong on") as refused:
        check_codes.__wrapped__(panels_of("mxfp4"), DEVICE)
    assert refused.value.diagnostics[0].code == "H247"


def test_loading_a_model_checks_the_products_of_its_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = stored_experts(INT4, 3)
    module.offload = Offload((DEVICE,), min_tokens=1, resident=True)
    seen: list[object] = []
    monkeypatch.setattr(coded_check, "multiplies_codes", lambda device: True)
    monkeypatch.setattr(coded_check, "check_codes", lambda panels, device: seen.append((panels, device)))
    check_gpu_products(module)
    assert seen == [(panels_of("int4", 32), DEVICE)] * 2


def test_only_experts_with_rows_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    coded, _ = random_matrices(panels_of("mxfp4"), DEVICE)
    whole = coded_kernels.decoded(coded)
    monkeypatch.setattr(coded_kernels.torch, "empty", lambda shape, **options: torch.full(shape, torch.nan, **options))
    some = coded_kernels.decoded(coded, torch.tensor([0, 5], dtype=torch.int32, device=DEVICE))
    assert torch.equal(some[1], whole[1]) and bool(some[0].isnan().all())


def test_many_rows_of_an_expert_are_multiplied_with_decoded_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    coded, decoded = random_matrices(panels_of("mxfp4"), DEVICE)
    rows, ends = (
        torch.randn(6, coded.columns).bfloat16().to(DEVICE),
        torch.tensor([2, 6], dtype=torch.int32, device=DEVICE),
    )
    monkeypatch.setattr(grouped_products, "MOST_ROWS", 2)
    monkeypatch.setattr(coded_kernels, "times_rows", None)
    found = grouped_products.times_rows(rows, coded, ends)
    assert error(found.float(), grouped_products.times_rows(rows, decoded.bfloat16(), ends).float()) <= BOUND
    grad = grouped_products.times_columns(found, coded, ends)
    assert error(grad.float(), grouped_products.times_columns(found, decoded.bfloat16(), ends).float()) <= BOUND


def test_no_rows_have_no_products() -> None:
    module, _ = stored_experts(INT4, 3)
    assert module.weights.packed is not None
    layout = expert_stream(module.weights.packed, module.form, torch.device("cpu"))._layout
    down = layout.coded(module.weights.packed.packed.view(3, -1).to(DEVICE)).down
    assert isinstance(down, CodedMatrices)
    rows, ends = torch.empty(0, down.columns).bfloat16().to(DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert coded_kernels.times_rows(rows, down, ends).shape == (0, down.rows)


def test_experts_compute_with_codes_what_they_do_with_decoded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    module, layer = stored_experts(INT4, 3, tokens=3)
    adapted = adapt(layer, (3, 5))
    module.offload = Offload((torch.device("cpu"),), min_tokens=1)
    wanted = run_adapted(module, adapted)
    for name in ("products.packed_layout", "backends.backend", "products.resident_weights"):
        monkeypatch.setattr(f"ktc.model.experts.{name}.multiplies_codes", lambda device: True)
    monkeypatch.setattr(PackedLayout, "read", None)
    for resident in (True, False)[: 1 + EXACT]:
        module.offload = Offload((DEVICE,), min_tokens=1, resident=resident)
        assert all(error(*both) <= 4 * BOUND for both in zip(run_adapted(module, adapted), wanted, strict=True))
    module.offload = replace(module.offload, resident=True)
    with torch.no_grad():
        assert isinstance(module.backend(3, plain=True), GpuResident)
        x = layer.x.bfloat16()
        plain = module(x, layer.index, layer.weights.float())
        module.offload = replace(module.offload, resident=False, min_tokens=100)
        assert error(plain, module(x, layer.index, layer.weights.float())) <= 4 * BOUND
