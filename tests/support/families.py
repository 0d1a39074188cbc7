"""Small configs of the families that tests compile, and the stages up to the plan over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from places import CONFIGS
from torch import Tensor, fx, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ktc.foundation.host import Host
from ktc.language import dsl
from ktc.model.graph.typed import input_names
from ktc.stages.capture import CapturedModel, ModelSource, capture, open_model
from ktc.stages.capture.export import flatten_call, main_output
from ktc.stages.match import Matches, match
from ktc.stages.plan import Plan, make_plan

COMMON: dict[str, object] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 512,
}  # fmt: skip
MLA: dict[str, object] = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12,
}  # fmt: skip
MOE: dict[str, object] = {
    "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
GROUPS: dict[str, object] = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
GQA: dict[str, object] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
FAMILIES: dict[str, dict[str, object]] = {
    "deepseek_v2": {
        **COMMON, **MLA, **MOE, **GROUPS, "q_lora_rank": None, "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {**COMMON, **MLA, **MOE, **GROUPS, "q_lora_rank": 24, "n_shared_experts": 1},
    "gpt_oss": {**COMMON, **GQA, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **COMMON, **GQA, "intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "llama": {**COMMON, **GQA, "intermediate_size": 96},
}  # fmt: skip
_CAPTURED: dict[tuple[str, torch.dtype, str], CapturedModel] = {}
CPU = Host(
    isas=("avx512_bf16", "avx512", "avx2", "scalar"), features=frozenset(), cores=2, threads=2, numa=1, memory=24 << 30,
    gpus=(), python_abi="cp311", compiler=None,
)  # fmt: skip


def config_of(family: str, dtype: torch.dtype = torch.bfloat16, **overrides: object) -> PreTrainedConfig:
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    config.dtype = dtype
    return config


def captured(family: str, dtype: torch.dtype = torch.bfloat16, **overrides: object) -> CapturedModel:
    """A capture is frozen and takes seconds: tests that ask for the same model share one."""
    key = family, dtype, repr(sorted(overrides.items()))
    if key not in _CAPTURED:
        _CAPTURED[key] = capture(ModelSource(family, None, config_of(family, dtype, **overrides), None))
    return _CAPTURED[key]


@cache
def full_size(name: str) -> CapturedModel:
    """A published model, `tests/configs/<name>`, at its depth and widths."""
    return capture(open_model(CONFIGS / name))


def rules(text: str, folder: Path, settings: dict[str, str] | None = None) -> dsl.RuleSet:
    """A rule program given as text; the std patterns are imported as `moe` and `attn`."""
    path = folder / "program.ktr"
    path.write_text('import "std/moe.ktr"\nimport "std/attention.ktr" as attn\n' + text, encoding="utf-8")
    return dsl.load(path, settings or {})


def planned(model: CapturedModel, program: dsl.RuleSet, host: Host = CPU) -> tuple[Matches, Plan]:
    matches = match(model, program, host)
    return matches, make_plan(model, (), matches, program, host)


@dataclass(frozen=True, slots=True)
class Seen:
    """A call of a block within a forward of its model, and the hidden states that it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Tensor

    def replay(self, graph: fx.GraphModule) -> Tensor:
        """The hidden states that a graph of the block returns for the same inputs."""
        names, tensors, _ = flatten_call(self.args, self.kwargs)
        given = dict(zip(names, tensors, strict=True))
        with torch.no_grad():
            return main_output(graph(*(given[name] for name in input_names(graph))))


def forward_seen(model: PreTrainedModel, fqns: Iterable[str], shape: tuple[int, int]) -> dict[str, Seen]:
    """The calls of the blocks `fqns` in one forward of `shape` (batch, length), with stock attention and experts."""
    seen: dict[str, Seen] = {}
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")

    def remember(fqn: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            seen[fqn] = Seen(args, kwargs, main_output(result))

        return hook

    for fqn in fqns:
        model.get_submodule(fqn).register_forward_hook(remember(fqn), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.arange(shape[0] * shape[1]).reshape(shape) % 100, use_cache=False)
    return seen
