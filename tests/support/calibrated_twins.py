"""Checkpoints as calibrated methods leave them: scales and zero points by compressed-tensors, and its own packing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

CODER: Any = PackedQuantizationCompressor
FILE = "model.safetensors"


def calibrated(source: Path, folder: Path, dtype: torch.dtype, group: int, symmetric: bool) -> tuple[Path, Path]:
    """Quantise experts and attention of `source`; return the checkpoint, and one of the weights that its codes mean."""
    asked = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)
    scheme = QuantizationScheme(targets=["Linear"], weights=asked)
    coded, plain = folder / "coded", folder / "plain"
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / FILE).items():
        weight = tensor.to(dtype)
        stored[name] = meant[name] = weight
        if weight.dim() == 2 and (".experts." in name or ".self_attn." in name):
            groups = weight.float().unflatten(1, (-1, group))
            found = cast("Any", calculate_qparams)(groups.amin(-1), groups.amax(-1), asked)
            scale, zero = found[0].to(dtype), found[1]
            packed = dict(CODER.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme))
            del stored[name]
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{part}": each.contiguous() for part, each in packed.items()}
            meant[name] = CODER.decompress(packed, scheme)["weight"].to(dtype).contiguous()
    ignore = ["lm_head", "re:.*mlp\\.gate$"]
    config: Any = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed", ignore=ignore
    ).to_dict()
    for target, tensors, changes in ((coded, stored, {"quantization_config": config}), (plain, meant, {})):
        target.mkdir(parents=True)
        shutil.copyfile(source / "generation_config.json", target / "generation_config.json")
        settings = json.loads((source / "config.json").read_text())
        kept = {**settings, "dtype": str(dtype).removeprefix("torch."), **changes}
        (target / "config.json").write_text(json.dumps(kept))
        save_file(tensors, target / FILE, metadata={"format": "pt"})
    return coded, plain
