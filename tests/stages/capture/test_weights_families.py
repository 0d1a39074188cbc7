"""Every family with routed experts: what transformers saved comes back through our rows, bit for bit.

In the stock module and, for each way to store experts, in the module that takes its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from plain_experts import PLAIN_EXPERTS
from transformers import AutoConfig, PreTrainedModel

from ktc.model import twin
from ktc.model.checkpoint import open_index, read_sources, write_sources
from ktc.model.experts.layouts.stock_layout import stock_names
from ktc.model.experts.module import FusedMoe
from ktc.model.hf.stock_model import build_on_meta
from ktc.model.kernels.form import parse_form
from ktc.model.loading.buffers import compute_buffers
from ktc.model.loading.realise import realise
from ktc.model.manifest.manifest import Rewrite
from ktc.model.packed_store import weight_store
from ktc.stages.capture.weights import map_weights

# One of each way to name or store weights; the rest runs with `make test-all`.
SHOWN = (
    "deepseek_v3",  # one tensor per projection and expert
    "mixtral",  # the same under names of its own
    "deepseek_v4",  # thirty renamings
    "kimi_linear",  # tensors that are joined, side by side
    "inkling2_text",  # gate and up alternate in the file, not in the model
    "gpt_oss",  # experts as they are computed with: transposed, interleaved, biases
    "aria_text",  # transposed experts
    "nemotron_h",  # experts without a gate
    "granitemoe",  # fused experts, other module names
    "jetmoe",  # experts of other names, which nothing rewrites
    "gemma4_text",  # a buffer that no constructor of its own makes
    "qwen3_next",  # two kinds of attention
)
# With towers: q, k and v in one tensor, heads in the order of complex numbers, or both.
WHOLE = ("kimi_k25", "mistral_large4", "step3p7", "unlimited_ocr")
REST = tuple(name for name in twin.moe_families() if name not in SHOWN)


def stock(family: str) -> PreTrainedModel:
    return twin.build(twin.shrink(twin.default_config(family, whole=family in WHOLE)), seed=7)


def filled(folder: Path, steps: tuple[Rewrite, ...] = ()) -> PreTrainedModel:
    """The model in `folder` as the loader makes it, through the text of `weights.json`."""
    model = build_on_meta(AutoConfig.from_pretrained(folder), torch.float32)
    index = open_index(folder)
    mapped = map_weights(model, index)
    assert mapped.warnings == ()
    sources = read_sources(write_sources(mapped.sources))
    assert sources == mapped.sources
    realise(model, steps, None)
    weight_store.fill(model, sources, index, {})
    compute_buffers(model, {})
    model.tie_weights()
    weight_store.check_filled(model)
    return model


@pytest.mark.parametrize("family", [*SHOWN, *WHOLE, *(pytest.param(name, marks=pytest.mark.full) for name in REST)])
def test_a_family_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    theirs = stock(family)
    theirs.save_pretrained(tmp_path)
    ours = filled(tmp_path)
    for kind in ("named_parameters", "named_buffers"):
        expected, found = dict(getattr(theirs, kind)()), dict(getattr(ours, kind)())
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("mixtral", "silu"),
        ("gpt_oss", "silu(alpha=1.702, limit=7.0, up_offset=1.0) biased transposed interleaved"),
        ("aria_text", "silu transposed"),
        ("nemotron_h", "relu2 ungated"),
        ("granitemoe", "silu"),
    ],
)
def test_experts_reach_the_module_that_replaces_them_whatever_their_form(
    family: str, form: str, tmp_path: Path
) -> None:
    theirs = stock(family)
    theirs.save_pretrained(tmp_path)
    names = stock_names(parse_form(form))
    experts = [fqn for fqn, module in theirs.named_modules() if set(names) <= module._parameters.keys()]
    assert experts
    steps = tuple(Rewrite(fqn, "fused_moe", None, "cpu", args_of(theirs, fqn, form), "r", "r.ktr") for fqn in experts)
    loaded, moved = filled(tmp_path, steps), stock(family)
    realise(moved, steps, None)
    for fqn in experts:
        original = theirs.get_submodule(fqn)
        for model in (loaded, moved):
            module = cast("FusedMoe", model.get_submodule(fqn))
            assert module.missing() == ()
            for name in names:
                assert torch.equal(getattr(module, name), getattr(original, name)), name


def args_of(model: PreTrainedModel, fqn: str, form: str) -> dict[str, object]:
    down = model.get_submodule(fqn).get_parameter("down_proj")
    experts, hidden, inner = down.shape
    if parse_form(form).transposed:
        hidden, inner = inner, hidden
    sizes = {"num_experts": experts, "hidden": hidden, "intermediate": inner, "top_k": 2}
    return {
        **sizes,
        "form": form,
        "activations": "keep",
        "threads": 1,
        "numa": "shard",
        **PLAIN_EXPERTS,
    }
