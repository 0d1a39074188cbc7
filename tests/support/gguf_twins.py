"""Small GGUF checkpoints, written as converters do: names and layouts are said here a second time, by hand.

A tensor of the file is a view of one or more parameters, so that what was rounded in the file can be put back: the
model that comes out holds exactly what the file says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ktc.model import twin

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gpt_oss": "gpt-oss", "mixtral": "llama",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
}  # fmt: skip
_ATTENTION = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "q_a_proj": "attn_q_a", "q_a_layernorm": "attn_q_a_norm", "q_b_proj": "attn_q_b",
    "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm", "kv_b_proj": "attn_kv_b",
}  # fmt: skip
_MLP = {
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "gate": "ffn_gate_inp",
    "router": "ffn_gate_inp", "shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A tensor of the file: its name, and its values as a view of the model's parameters."""

    name: str
    view: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Written:
    """A folder, and the model in fp32 that its file holds."""

    folder: Path
    model: PreTrainedModel


def pieces(model: PreTrainedModel, *, split_latent: bool = False) -> Iterator[Piece]:
    """Every tensor of the model's file."""
    config = model.config
    for name, tensor in model.state_dict().items():
        words = name.split(".")
        ending = f".{words[-1]}"
        if words[1] != "layers":
            top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[words[-2]]
            yield _plain(top + ending, tensor)
            continue
        block, inner = f"blk.{words[2]}.", words[3:]
        if inner[0] == "input_layernorm":
            yield _plain(f"{block}attn_norm{ending}", tensor)
        elif inner[0] == "post_attention_layernorm":
            called = "post_attention_norm" if config.model_type == "gpt_oss" else "ffn_norm"
            yield _plain(f"{block}{called}{ending}", tensor)
        elif inner[-1] == "sinks":
            yield _plain(f"{block}attn_sinks.weight", tensor)
        elif inner[-1] == "e_score_correction_bias":
            yield _plain(f"{block}exp_probs_b.bias", tensor)
        elif inner[1] == "kv_b_proj" and split_latent:
            heads, keys = config.num_attention_heads, config.qk_nope_head_dim
            by_head = tensor.view(heads, -1, tensor.shape[1])
            yield _plain(f"{block}attn_k_b{ending}", by_head[:, :keys].transpose(1, 2))
            yield _plain(f"{block}attn_v_b{ending}", by_head[:, keys:])
        elif config.model_type == "mixtral" and inner[1] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if inner[1] == "q_proj" else config.num_key_value_heads
            paired = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2)
            yield Piece(f"{block}{_ATTENTION[inner[1]]}{ending}", paired, tuple(tensor.shape))
        elif inner[0] == "self_attn":
            yield _plain(f"{block}{_ATTENTION[inner[1]]}{ending}", tensor)
        elif inner[1] == "experts":
            yield from _experts(block, inner[2], tensor, transposed=config.model_type == "gpt_oss")
        elif inner[1].startswith("shared_expert") and len(inner) > 3:
            yield _plain(f"{block}{_MLP[inner[2]]}_shexp{ending}", tensor)
        elif inner[1] == "shared_expert_gate":
            row = tensor if words[2] == "0" else tensor[0]  # either is written, by converters of different age
            yield _plain(f"{block}ffn_gate_inp_shexp{ending}", row)
        else:
            yield _plain(f"{block}{_MLP[inner[1]]}{ending}", tensor)


def _plain(name: str, tensor: Tensor) -> Piece:
    return Piece(name, tensor, tuple(tensor.shape))


def _experts(block: str, leaf: str, tensor: Tensor, *, transposed: bool) -> Iterator[Piece]:
    ending = ".bias" if leaf.endswith("_bias") else ".weight"
    rows = tensor.transpose(1, 2) if transposed and tensor.dim() == 3 else tensor
    if leaf.startswith("down"):
        yield _plain(f"{block}ffn_down_exps{ending}", rows)
        return
    gate, up = (rows[:, 0::2], rows[:, 1::2]) if transposed else rows.chunk(2, 1)
    yield _plain(f"{block}ffn_gate_exps{ending}", gate)
    yield _plain(f"{block}ffn_up_exps{ending}", up)


def model_of(family: str, **overrides: Any) -> tuple[PreTrainedModel, Path]:
    """The twin in fp32 with sizes that blocks of 32 divide, and the folder with its tokenizer."""
    from ktc.foundation import environment

    source = twin.write(family, environment.cache_dir() / "models")
    config = AutoConfig.from_pretrained(source)
    aligned = {"moe_intermediate_size": 64, "intermediate_size": 96, "shared_expert_intermediate_size": 64}
    for name, value in {**aligned, **overrides}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    model = twin.build(config, seed=0, dtype=torch.float32)
    model.config.dtype = torch.bfloat16
    return model, source


def write(
    family: str,
    folder: Path,
    *,
    experts: Type = Type.F16,
    down: tuple[Type, ...] = (),
    rest: Type = Type.F16,
    shards: int = 1,
    split_latent: bool = False,
    **overrides: Any,
) -> Written:
    """A checkpoint folder with one GGUF file or its shards. Norms, biases and routers are fp32.

    `experts` is the type of their matrices; those called `down` may have others, layer by layer.
    """
    model, source = model_of(family, **overrides)
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    found = list(pieces(model, split_latent=split_latent))
    limit = -(-len(found) // shards) if shards > 1 else 0
    writer = GGUFWriter(folder / "model.gguf", ARCHITECTURES[family], split_max_tensors=limit)
    _settings(writer, model)
    for piece in found:
        stack = down[int(piece.name.split(".")[1])] if down and "ffn_down_exps" in piece.name else experts
        store(writer, piece, _type_of(piece, stack, rest))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(folder, model)


def _settings(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(1 if "deepseek" in config.model_type else config.num_key_value_heads)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_token_list([f"word{number}" for number in range(50)])


def _type_of(piece: Piece, experts: Type, rest: Type) -> Type:
    if len(piece.shape) == 1 or "_norm" in piece.name or "ffn_gate_inp" in piece.name or piece.name.endswith(".bias"):
        return Type.F32
    chosen = experts if "_exps" in piece.name else rest
    block, _ = gguf.GGML_QUANT_SIZES[chosen]
    return chosen if piece.shape[-1] % block == 0 else Type.F16


def store(writer: GGUFWriter, piece: Piece, kind: Type) -> None:
    """Write a tensor as `kind`, and put what that makes of it back into the model."""
    values = piece.view.reshape(piece.shape).numpy()
    if kind in (Type.F32, Type.F16):
        stored = values.astype(np.float32 if kind == Type.F32 else np.float16)
        writer.add_tensor(piece.name, stored)
        kept = stored.astype(np.float32)
    else:
        stored = _random_blocks(piece, kind) if kind.name.endswith("_K") else gguf.quants.quantize(values, kind)
        writer.add_tensor(piece.name, stored, raw_dtype=kind)
        kept = gguf.quants.dequantize(stored, kind)
    piece.view.copy_(torch.from_numpy(kept).view(piece.view.shape))


def _random_blocks(piece: Piece, kind: Type) -> np.ndarray[Any, Any]:
    """Blocks of a type that the package does not quantise: codes of any bits, scales of a sensible size."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(len(piece.name))
    shape = (*piece.shape[:-1], piece.shape[-1] // weights, size)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    scale = np.array([0.0004], dtype=np.float16).view(np.uint8)
    for place in {"Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}.get(kind.name, (0, 2)):
        blocks[..., place : place + 2] = scale
    return blocks.reshape(*piece.shape[:-1], -1)
