"""`fused` on the routers of a whole model: compiled, loaded, equal to stock, recorded, and trained under an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

import ktc
from ktc.model import twin
from ktc.model.hf import router
from ktc.model.hf.router import FusedRouter
from ktc.model.loading.peft_glue import read_lora_config

ROUTE = 'import "std/moe.ktr"\nrule route { match moe.block as m => fused on m.router }\n'
ADAPTED = 'import "std/moe.ktr"\nrule route { match moe.block as m => cpu_moe() => fused on m.router\n'
ADAPTED += "  => lora_linear(rank = 4) on m.router.gate }\n"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of kernels of routers."""
    made = list[str]()
    for name in ("kernel_forward", "kernel_backward"):
        original = getattr(router, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            made.append(name)
            return original(*args)

        monkeypatch.setattr(router, name, counted)
    return made


def routers_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FusedRouter)]


def compiled(model: str | Path, program: str, folder: Path) -> Path:
    (folder / "route.ktr").write_text(program)
    return ktc.compile(model, folder / "route.ktr", folder / "routed_twin")


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mixtral", "minimax_m2", "gpt_oss"))]
)
def test_a_model_is_equal_to_stock_with_its_recorded_router_logits(
    family: str, tmp_path: Path, calls: list[str]
) -> None:
    config = twin.shrink(twin.default_config(family))
    config.dtype = torch.float32
    stock = twin.build(config, 5).eval()
    stock.save_pretrained(tmp_path / "stock")
    model = ktc.load(compiled(tmp_path / "stock", ROUTE, tmp_path)).eval()
    ids = torch.randint(3, config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    assert routers_of(model)
    calls.clear()  # those of the trial
    results = []
    for each in (model, stock):
        leaf = each.get_input_embeddings()(ids).detach().requires_grad_()
        found = each(inputs_embeds=leaf, labels=ids, output_router_logits=True, use_cache=False)
        found.loss.backward()
        results.append((found.loss, found.logits, *found.router_logits, leaf.grad))
    assert calls.count("kernel_forward") == calls.count("kernel_backward") == len(routers_of(model))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert torch.equal(*(each.generate(ids[:1], max_new_tokens=5, do_sample=False) for each in (model, stock)))


@pytest.mark.slow
def test_an_adapter_on_the_gate_trains_through_the_kernel(tmp_path: Path, calls: list[str]) -> None:
    out = compiled("tiny:afmoe", ADAPTED, tmp_path)
    model = get_peft_model(ktc.load(out), read_lora_config(out))
    factors = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert factors
    assert all(".router.gate.lora_" in name for name in factors)
    for tensor in factors.values():
        tensor.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    ids = torch.randint(3, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))
    calls.clear()  # those of the trial
    model(input_ids=ids, labels=ids).loss.backward()
    assert "kernel_backward" in calls
    assert all(tensor.grad is not None and bool(tensor.grad.any()) for tensor in factors.values())


def test_a_setting_of_a_router_that_changes_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = ktc.load(compiled("tiny:qwen3_moe", ROUTE, tmp_path)).eval()
    routers_of(model)[0].top_k = 1
    with torch.no_grad():
        model(input_ids=torch.full((1, 3), 5))
    assert "L428" in caplog.text
    assert "top_k" in caplog.text
