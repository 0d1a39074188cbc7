"""Every kind of adapter and every option of LoRA in the installed PEFT: as on the stock model, or refused by name."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft_options import FIELDS, FIELDS_REFUSED, KINDS, KINDS_REFUSED, Q, rows_of_fields
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktc
from ktc.adapters.adapter import attach
from ktc.cli.app import main
from ktc.diagnostics import InputRefused
from ktc.foundation import versions
from ktc.model import twin
from ktc.model.manifest.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("one_thread")
SINCE_0_19 = versions.release(versions.installed("peft") or "0") >= (0, 19)
GONE_SINCE_0_19 = {"BONE"}  # an older name of MISS
CONFIGS: Mapping[str, Any] = {str(kind.value): made for kind, made in PEFT_TYPE_TO_CONFIG_MAPPING.items()}


def stock(out: Path) -> PreTrainedModel:
    made: Any = AutoModelForCausalLM
    source = read_manifest(out).model.folder
    return made.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval()


def logits(model: nn.Module) -> Tensor:
    ids = torch.tensor([[5, 17, 33, 9, 12, 44]])
    with torch.no_grad():
        return cast("Tensor", model.eval()(input_ids=ids).logits)[:, -6:]


def answer(model: Any) -> list[int]:
    ids = torch.tensor([[5, 17, 33, 9, 12, 44]])
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return found[0].tolist()


def saved(out: Path, config: Any, folder: Path) -> Path:
    """An adapter whose every tensor has an effect, as stock PEFT saves it of the stock model."""
    with torch.random.fork_rng():
        torch.manual_seed(1)  # of PEFT's own beginnings: one in hundreds sends a token to other experts
        model = get_peft_model(stock(out), config)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.requires_grad or ".lora_" in name:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
                parameter.add_(0.05 * noise)
    model.save_pretrained(folder)
    return folder


def outcome(out: Path, config: Any, folder: Path, *, generate: bool = False) -> str:
    """`equal`, or the code of the refusal, or the difference."""
    path = saved(out, config, folder)
    theirs = PeftModel.from_pretrained(stock(out), path)
    try:
        ours = attach(ktc.load(out, reference=True), path, alone=True)
    except InputRefused as refused:
        return refused.diagnostics[0].code
    wanted, found = logits(theirs), logits(ours)
    assert not torch.equal(wanted, logits(stock(out))), "an adapter without an effect shows nothing"
    if (found - wanted).abs().max() > 2e-6 * wanted.abs().max():
        return f"differs by {float((found - wanted).abs().max()):.1e}"
    return "equal" if not generate or answer(ours) == answer(theirs) else "generates other tokens"


@pytest.fixture(scope="module")
def out(compiled_twin: Callable[..., Path]) -> Path:
    return compiled_twin("tiny:qwen3_moe", "moe-experts-lora")


@pytest.fixture(scope="module")
def tied(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled model whose head is its embedding, and whose attention has biases."""
    config = twin.shrink(twin.default_config("qwen3_moe"))
    config.tie_word_embeddings = config.attention_bias = True
    folder = tmp_path_factory.mktemp("tied")
    twin.build(config, seed=3, dtype=torch.bfloat16).save_pretrained(folder / "model")
    return ktc.compile(folder / "model", "moe-lora", folder / "out_tied")


def test_every_kind_and_every_field_has_a_row() -> None:
    assert CONFIGS.keys() - GONE_SINCE_0_19 <= KINDS.keys()
    assert {each.name for each in fields(LoraConfig)} <= FIELDS.keys()


SAMPLE: tuple[dict[str, Any], ...] = (
    {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": {"embed_tokens": [17]}},
    {"modules_to_save": ["lm_head", "input_layernorm"], "use_dora": True},
)


@pytest.mark.parametrize("settings", SAMPLE, ids=["head", "saved"])
def test_valid_adapters_attach_as_on_the_stock_model(settings: dict[str, Any], out: Path, tmp_path: Path) -> None:
    assert outcome(out, LoraConfig(r=4, **{**Q, **settings}), tmp_path / "adapter") == "equal"


@pytest.mark.parametrize(("kind", "wanted"), [("LOHA", "equal"), ("PREFIX_TUNING", "A604")])
def test_other_kinds_attach_or_are_refused(kind: str, wanted: str, out: Path, tmp_path: Path) -> None:
    assert outcome(out, CONFIGS[kind](**cast("Any", KINDS[kind])), tmp_path / "adapter") == wanted


@pytest.mark.slow
def test_kinds_of_adapters(out: Path, tmp_path: Path) -> None:
    """The table of all kinds (`-s` prints it)."""
    found = {
        kind: outcome(out, CONFIGS[kind](**settings), tmp_path / kind, generate=True)
        for kind, settings in KINDS.items()
        if not isinstance(settings, str) and kind in CONFIGS
    }
    _print(found, KINDS)
    assert found == {kind: KINDS_REFUSED.get(kind, "equal") for kind in found}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["out", "tied"])
def test_fields_of_lora(model: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The table of all fields of `LoraConfig` (`-s` prints it)."""
    known = {each.name for each in fields(LoraConfig)}
    compiled = request.getfixturevalue(model)
    found = {
        label: outcome(compiled, LoraConfig(**settings), tmp_path / str(number), generate=True)
        for number, (label, settings) in enumerate(rows_of_fields())
        if settings.keys() <= known
    }
    _print(found, FIELDS)
    assert found == {label: FIELDS_REFUSED.get(label, "equal") for label in found}


def _print(found: Mapping[str, str], table: Mapping[str, Any]) -> None:
    reasons = {name: f"not tried: {reason}" for name, reason in table.items() if isinstance(reason, str)}
    lines = (f"{label:80.80} {result}" for label, result in {**found, **reasons}.items())
    print("", *lines, sep="\n")


TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LORA", {"target_modules": ["q_proj", "lm_head"]}),
    "embedding": ("LORA", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tokens": ("LORA", {"trainable_token_indices": [17, 33]}),
    "DoRA": ("LORA", {"use_dora": True}),
    "KaSA": ("LORA", {"kasa_config": {}}),
    **{kind: (kind, {}) for kind in ("ADALORA", "LOHA", "IA3", "BOFT", "VERA")},
}


@pytest.mark.parametrize("case", TRAINED)
def test_a_model_in_bf16_computes_an_adapter_as_its_training_did(case: str, out: Path, tmp_path: Path) -> None:
    kind, settings = TRAINED[case]
    if not SINCE_0_19 and case in ("KaSA", "VERA"):
        pytest.skip("peft 0.18 has no KaSA, and rounds VeRA's projections to bf16 when it loads them (A605)")
    saved(out, CONFIGS[kind](**{**cast("Any", KINDS[kind]), **settings}), tmp_path / "adapter")
    plain = logits(ktc.load(out))
    trained = attach(ktc.load(out), tmp_path / "adapter", alone=True, trainable=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = logits(trained)
    found = logits(attach(ktc.load(out), tmp_path / "adapter", alone=True))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted) and not torch.equal(found, plain)


WITH_KERNELS: dict[str, tuple[dict[str, Any], str]] = {
    "self_attn": ({"target_modules": ["gate"], "modules_to_save": ["self_attn"]}, "equal"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "equal"),
    "mlp": ({"modules_to_save": ["mlp"]}, "A604"),
    "experts": ({"modules_to_save": ["experts"]}, "A604"),
}


@pytest.mark.parametrize("case", WITH_KERNELS)
def test_rows_of_the_table_with_kernels(case: str, out: Path, tmp_path: Path) -> None:
    settings, wanted = WITH_KERNELS[case]
    if not SINCE_0_19 and case == "self_attn":
        pytest.skip("peft 0.18 adapts no router")
    folder = saved(out, LoraConfig(**{"r": 4, **Q, **settings}), tmp_path / "adapter")
    if wanted != "equal":
        with pytest.raises(InputRefused, match=wanted):
            attach(ktc.load(out), folder, alone=True)
        return
    found = logits(attach(ktc.load(out), folder, alone=True)).float()
    theirs, base = logits(PeftModel.from_pretrained(stock(out), folder)), logits(stock(out))
    assert (found - theirs).norm() < 0.2 * (theirs - base).norm()


@pytest.mark.parametrize("saved_module", ["mlp", "experts"])
def test_experts_that_trained_whole_are_refused_with_a_command_that_merges_them(
    saved_module: str, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(out, LoraConfig(r=4, **Q, modules_to_save=[saved_module]), tmp_path / "an adapter")
    model = ktc.load(out, reference=True)
    before = logits(model)
    with pytest.raises(InputRefused, match=rf"A604: .*trained `{saved_module}` whole.*experts") as refused:
        attach(model, folder, alone=True)
    assert torch.equal(logits(model), before)
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(refused.value.diagnostics[0].hint.split("`")[1])[1:], "-q"]) == 0
    made: Any = AutoModelForCausalLM
    merged = made.from_pretrained(tmp_path / "an adapter-merged", dtype=torch.float32, experts_implementation="eager")
    wanted = logits(PeftModel.from_pretrained(stock(out), folder))
    assert (logits(merged) - wanted).norm() < 0.1 * (wanted - before).norm()
