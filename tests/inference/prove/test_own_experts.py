"""`ktc prove` on experts modules of the model's own code: their arguments, their tensors, swapped experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_twins import twin_of
from torch import nn

import ktc
from ktc.foundation.host import find_compiler
from ktc.inference.prove.probe import answers, make_probe
from ktc.inference.prove.report import Report
from ktc.inference.prove.run import Request, prove_model
from ktc.model import twin
from ktc.model.compare.experts import Experts, chosen, roles_of, routed_rows
from ktc.model.compare.quantised_baseline import ExpertsFormat, through_format
from ktc.model.experts.called_module import CalledExperts
from ktc.model.experts.layouts.own_layout import TensorLayout
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.references.quantised_reference import dequantise, quantise
from ktc.model.loading.realise import own_experts
from ktc.model.manifest.configs import OwnExpertsConfig
from ktc.model.packed_store import packed_file, packed_store
from ktc.model.targets.cpu_moe import CpuMoe, ExpertsConfig

pytestmark = pytest.mark.usefixtures("one_thread")
ROUTED = {"hidden_states": "hidden", "top_k_index": "index", "top_k_weights": "weights"}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dbrx": (
        "transformer.blocks.1.ffn.experts",
        {
            "form": "silu",
            "parts": {
                "gate": TensorLayout("mlp.w1", True),
                "up": TensorLayout("mlp.v1", True),
                "down": TensorLayout("mlp.w2", True, True),
            },
            "inputs": ROUTED,
            "called": "routed",
        },
    ),
    "llama4_text": (
        "model.layers.1.feed_forward.experts",
        {
            "form": "silu transposed",
            "parts": {
                "gate_up": TensorLayout("gate_up_proj", turned=True),
                "down": TensorLayout("down_proj", turned=True),
            },
            "inputs": {"hidden_states": "hidden"},
            "called": "by_expert",
        },
    ),
    "longcat_flash": (
        "model.layers.1.mlp.experts",
        {
            "form": "silu",
            "parts": {"gate_up": TensorLayout("gate_up_proj"), "down": TensorLayout("down_proj")},
            "inputs": ROUTED,
            "called": "identity",
        },
    ),
}


@cache
def small(family: str) -> nn.Module:
    return twin.build(twin.shrink(twin.default_config(family)), 0, torch.float32)


def recorded(family: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the stock experts and the arguments of their call in a run of the model."""
    model, calls = small(family), list[Any]()
    module = model.get_submodule(FAMILIES[family][0])
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(24)[None])
    handle.remove()
    return module, *calls[0]


def arguments(family: str, module: nn.Module) -> dict[str, Any]:
    about = FAMILIES[family][1]
    down = dict(module.named_parameters())[about["parts"]["down"].name]
    hidden = small(family).config.get_text_config().hidden_size
    count = 16
    return {**about, "num_experts": count, "hidden": hidden, "intermediate": down.numel() // count // hidden}


def experts_of(family: str) -> Experts:
    about = FAMILIES[family][1]
    top_k = 1 if about["called"] == "by_expert" else 4
    return Experts("experts", 16, top_k, tuple(about["inputs"].items()), about["called"])  # pyright: ignore[reportArgumentType]


def compiled(family: str, module: nn.Module) -> CalledExperts:
    """Return the module that takes the place of the stock experts, with their weights."""
    args, top_k = arguments(family, module), experts_of(family).top_k
    sizes = {name: args[name] for name in ("num_experts", "hidden", "intermediate", "form")}
    config = ExpertsConfig(**sizes, top_k=top_k, activations="keep", threads=1, numa="none")
    made = CpuMoe.realise(own_experts(module, OwnExpertsConfig(**args)), config, None)
    assert isinstance(made, CalledExperts)
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_both_sides_of_own_experts_answer_alone_and_a_swap_shows(family: str) -> None:
    module, args, kwargs = recorded(family)
    experts = experts_of(family)
    roles = roles_of(experts, module, args, kwargs)
    probe = make_probe(experts, routed_rows(experts, roles))
    wanted = answers(module, probe, torch.float32)
    ours = compiled(family, module)
    assert torch.allclose(answers(ours, probe, torch.float32), wanted, rtol=1e-4, atol=1e-6)
    assert bool((wanted.norm(dim=1) > 0).all())

    for part in ("gate", "up", "down"):
        one, other = ours.expert(1, part), ours.expert(2, part)
        ours.load_expert(1, part, other.clone())
        ours.load_expert(2, part, one.clone())
    found = answers(ours, probe, torch.float32)
    differ = {int(n) for n in probe.expert[(found - wanted).norm(dim=1) > 0.1 * wanted.norm(dim=1)]}
    assert differ == {1, 2}


def test_rows_sorted_by_expert_tell_the_choices_of_the_router() -> None:
    module, args, kwargs = recorded("llama4_text")
    experts = experts_of("llama4_text")
    roles = roles_of(experts, module, args, kwargs)
    found = chosen(experts, roles)
    assert found is not None
    assert found.shape == (24, 16)
    block = small("llama4_text").get_submodule("model.layers.1.feed_forward")
    assert ((found >= 0).sum(1) == block.top_k).all()
    assert len(routed_rows(experts, roles)) == 24 * block.top_k


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tensors_of_own_experts_go_through_a_format(family: str) -> None:
    """Compare with compiled experts whose weights went through the same reference."""
    module, args, kwargs = recorded(family)
    kept = {name: p.detach().clone() for name, p in module.named_parameters()}
    ours, parts = compiled(family, module), FAMILIES[family][1]["parts"]
    for expert in range(16):
        for part in ("gate", "up", "down"):
            matrix = dequantise(*quantise(ours.expert(expert, part).float(), "int4", 16), 16).float()
            ours.load_expert(expert, part, matrix)
    experts = experts_of(family)
    probe = make_probe(experts, routed_rows(experts, roles_of(experts, module, args, kwargs)))
    before = answers(module, probe, torch.float32)
    try:
        through_format(module, ExpertsFormat(dict.fromkeys(parts.values(), ("int4", 16)), 16, False, None))
        wanted = answers(module, probe, torch.float32)
    finally:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(kept[name])
    assert torch.allclose(answers(ours, probe, torch.float32), wanted, rtol=1e-4, atol=1e-6)
    assert float((before - wanted).norm() / before.norm()) > 0.02


def test_products_with_integers_reach_batched_code() -> None:
    from ktc.model.experts.references.quantised_reference import int8_product

    module, args, kwargs = recorded("llama4_text")
    experts = experts_of("llama4_text")
    rows = make_probe(experts, routed_rows(experts, roles_of(experts, module, args, kwargs)))
    try:
        through_format(module, ExpertsFormat({}, 16, True, None))
        found = answers(module, rows, torch.float32)
    finally:
        vars(module).pop("forward")
    wanted = torch.empty_like(found)
    for expert in range(16):
        own = rows.expert == expert
        gate, up = int8_product(rows.rows[own], module.gate_up_proj[expert].t()).chunk(2, -1)
        wanted[own] = int8_product(up * nn.functional.silu(gate), module.down_proj[expert].t()).detach()
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6)


# Whole models


def swap(out: Path, layer: int) -> None:
    """Pack the model and exchange the bytes of experts 1 and 2."""
    ktc.pack(out)
    names = [name for name, one in ktc.load(out).named_modules() if isinstance(one, FusedMoe)]
    path = out / "packed" / packed_store.file_name(next(name for name in names if f".{layer}." in name))
    header = packed_file.read_header(path)
    size = header.packed_bytes // header.num_experts
    content = bytearray(path.read_bytes())
    first, second, end = (packed_file.DATA + expert * size for expert in (1, 2, 3))
    content[first:end] = content[second:end] + content[first:second]
    path.write_bytes(content)


def red(report: Report) -> dict[int, set[int]]:
    rows = [(layer.index, row) for layer in report.layers for row in layer.rows if row.kind == "experts" and row.red]
    return {index: {worst.index for worst in row.worst} for index, row in rows}


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "format"), [("dbrx", "stored"), ("gemma4", "stored"), ("llama4", "stored"), ("llama4", "int4")]
)
def test_a_compiled_family_is_green_and_swapped_experts_are_red(tmp_path: Path, family: str, format: str) -> None:
    sizes = {} if format == "stored" else {"intermediate_size": 96}
    twin_of(family, tmp_path / "model", **sizes)
    out = ktc.compile(
        tmp_path / "model", "moe-lora", tmp_path / "own_out", settings={"device": "cpu", "format": format}
    )
    report = prove_model(Request(out, count=64))
    rows = [row for layer in report.layers for row in layer.rows]
    assert not report.red, [row for row in rows if row.red]
    assert sum(row.kind == "experts" for row in rows) == len(report.layers)
    assert any(row.agreement is not None for row in rows)
    swap(out, 1)
    assert red(prove_model(Request(out, count=64))) == {1: {1, 2}}
