"""`FusedLinear` under PEFT: every kind of adapter gives what it gives on a stock layer, and decoding takes the kernel.

The kernel is a stand-in here, which counts its calls: tests/model/linears/test_kernel.py tests what it computes.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CPU, planned, rules
from families import captured as capture_family
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from ktc.diagnostics import InputRefused
from ktc.foundation.host import Gpu
from ktc.model.kernels.kernel_library import Kernel, KernelLibrary
from ktc.model.linears.gemv import Gemv
from ktc.model.linears.lora_linear import FusedLinear
from ktc.stages.capture import CapturedModel
from ktc.stages.rewrite import recipe, rewrite

CALLS: list[int] = []


class StandIn(Gemv):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, context: Any = None) -> Tensor:
        CALLS.append(x.numel() // weight.shape[1])
        return functional.linear(x, weight, bias)


class Two(nn.Module):
    """Two layers, the second with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 40, bias=False)
        self.o_proj = nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(torch.tanh(self.q_proj(x)))


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    CALLS.clear()


def pair() -> tuple[Two, Two]:
    """A stock model in bf16, and the same of `FusedLinear`s that decode by the stand-in."""
    torch.manual_seed(5)
    stock = Two().bfloat16().eval()
    ours = copy.deepcopy(stock)
    decode = StandIn(Kernel(KernelLibrary(Path("none"), "", ()), "Linear_bf16_scalar", "bf16"), 1)
    ours.q_proj, ours.o_proj = (FusedLinear.from_linear(each, decode) for each in (ours.q_proj, ours.o_proj))
    return stock, ours


def rows(number: int) -> Tensor:
    return torch.randn(number, 24, generator=torch.Generator().manual_seed(number)).bfloat16()


def config(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"], **settings})


def adapted(model: nn.Module, seed: int = 9, **settings: Any) -> PeftModel:
    torch.manual_seed(seed)
    found = get_peft_model(model, config(**settings))
    assert isinstance(found, PeftModel)
    return filled(found)


def filled(model: PeftModel, seed: int = 11) -> PeftModel:
    """B is zeros at first, and would hide what an adapter does."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def both(**settings: Any) -> tuple[PeftModel, PeftModel]:
    stock, ours = pair()
    return adapted(stock, **settings), adapted(ours, **settings)


def assert_the_same(stock: nn.Module, ours: nn.Module, numbers: tuple[int, ...] = (1, 8, 9)) -> None:
    with torch.no_grad():
        for number in numbers:
            assert torch.equal(ours(rows(number)), stock(rows(number))), number


KINDS = (
    {"r": 4, "lora_alpha": 16},
    {"r": 7, "lora_alpha": 3},
    {"use_rslora": True},
    {"lora_dropout": 0.2},
    {"use_dora": True},
    {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 1}},
    {"lora_bias": True, "target_modules": ["o_proj"]},
    {"bias": "lora_only"},
    {"init_lora_weights": "pissa"},
)


@pytest.mark.parametrize("settings", KINDS, ids=lambda settings: "-".join(settings))
def test_an_adapter_of_any_kind_is_that_of_a_stock_layer(settings: dict[str, Any]) -> None:
    if settings.get("init_lora_weights") == "pissa":
        stock, ours = (model.float() for model in pair())
        assert_the_same(*(adapted(model, **settings).eval().bfloat16() for model in (stock, ours)), numbers=(9,))
        return
    stock, ours = both(**settings)
    assert_the_same(stock.eval(), ours.eval())
    gradients: list[dict[str, Tensor]] = []
    for model in (stock, ours):
        torch.manual_seed(3)
        model.train()(rows(5)).float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_decoding_takes_the_kernel_with_an_adapter_and_training_never() -> None:
    _, ours = both()
    ours.eval()(rows(3))
    assert not CALLS
    with torch.no_grad():
        ours.train()(rows(3))  # as reentrant checkpointing does
        ours.eval()(rows(9))
        assert not CALLS
        ours(rows(3))
    assert CALLS == [3, 3]


def test_several_adapters_and_one_of_them_active() -> None:
    models = both()
    for model in models:
        torch.manual_seed(1)
        model.add_adapter("second", config(r=2, use_rslora=True))
        filled(model)
    for change in (
        lambda m: m.set_adapter("second"),
        lambda m: m.set_adapter("default"),
        lambda m: m.base_model.add_weighted_adapter(["default", "second"], [0.7, 0.4], "mixed", "svd"),
        lambda m: m.set_adapter("mixed"),
        lambda m: m.delete_adapter("second"),
    ):
        for model in models:
            torch.manual_seed(2)
            change(model)
        assert_the_same(*models)
    with models[0].disable_adapter(), models[1].disable_adapter():
        assert_the_same(*models)
        assert_the_same(pair()[0], models[1])


def test_the_kernel_sees_what_is_merged_into_the_weights() -> None:
    for settings in ({}, {"use_dora": True}):
        stock, ours = both(**settings)
        for change in ("merge_adapter", "unmerge_adapter"):
            getattr(stock, change)()
            getattr(ours, change)()
            CALLS.clear()
            assert_the_same(stock, ours)
            assert CALLS
        merged = ours.merge_and_unload()
        assert isinstance(merged.q_proj, FusedLinear)
        assert_the_same(stock.merge_and_unload(), merged)


def test_adapters_are_saved_as_those_of_stock_layers(tmp_path: Path) -> None:
    stock, ours = both()
    for name, model in (("stock", stock), ("ours", ours)):
        model.save_pretrained(str(tmp_path / name))
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("stock", "ours")]
    assert files[0] == files[1]
    bare, again = pair()
    tuned = PeftModel.from_pretrained(bare, str(tmp_path / "ours"))
    assert_the_same(tuned, PeftModel.from_pretrained(again, str(tmp_path / "stock")))


# The rule -------------------------------------------------------------------------------------------------------------
@cache
def captured(family: str, dtype: torch.dtype = torch.bfloat16) -> CapturedModel:
    return capture_family(family, dtype)


ATTENTION = 'rule decode { match linear at "**.self_attn.*" => kt_linear(%s) }\n'
ADAPTERS = 'rule adapters { match linear at "**.q_proj" => lora_linear(rank = 4) }\n'


def test_an_adapter_and_a_kernel_on_one_layer_are_one_module(tmp_path: Path) -> None:
    model = captured("qwen3_moe")
    _, plan = planned(model, rules(ATTENTION % "gemv, prefill = torch" + ADAPTERS, tmp_path))
    assert [(spec.dtype, spec.isa) for spec in plan.kernels] == [("bf16", "avx512_bf16")]
    assert plan.lora is not None
    assert len(plan.lora.targets) == 3
    blocks = rewrite(model, plan)
    rows = recipe(blocks, plan.host)
    assert len(rows) == len({row.fqn for row in rows}) == 12
    assert {(row.module, row.kernel) for row in rows} == {("kt_linear", "Linear_bf16_avx512_bf16")}
    nodes = [n for n in blocks[0].graph.graph.nodes if n.meta.get("op") == "kt_linear"]
    assert {n.meta["rule"] for n in nodes} == {"decode", "decode, adapters"}


def test_torch_is_a_kernel_too_and_needs_no_library(tmp_path: Path) -> None:
    _, plan = planned(captured("qwen3_moe"), rules(ATTENTION % "torch", tmp_path))
    assert plan.kernels == ()
    assert any("is run by PyTorch" in reason.text for reason in plan.reasons)


def test_the_kernel_is_refused_where_it_cannot_run(tmp_path: Path) -> None:
    place = 'rule place { match module at "model" => place(cuda:0) }\n'
    host = replace(CPU, gpus=(Gpu("a GPU", 24 << 30),))
    with pytest.raises(InputRefused, match=r"M077.*is on cuda:0"):
        planned(captured("qwen3_moe"), rules(ATTENTION % "gemv" + place, tmp_path), host)
    with pytest.raises(InputRefused, match=r"M077.*float64"):
        planned(captured("qwen3_moe", torch.float64), rules(ATTENTION % "gemv", tmp_path))


def test_a_replaced_forward_of_linear_layers_runs_instead_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Zeros:
        """Serves every call, with zeros."""

        def serves(self, *_: object) -> bool:
            return True

        def __call__(self, x: Tensor, *_: object) -> Tensor:
            return torch.zeros_like(x)

    layer = FusedLinear.from_linear(nn.Linear(3, 3), Zeros()).eval()  # type: ignore[arg-type]
    x = torch.ones(1, 3)
    assert torch.equal(layer(x), torch.zeros(1, 3))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x * 2)
    assert torch.equal(layer(x), x * 2)
