"""Model folders of the zoo: config.json, the code as an author keeps it, and seeded weights in bf16.

Weights are large enough that limits, clamps and capacities are met by ordinary text, and equal for a family and
its near-twin. A value depends on its tensor's name and shape alone.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from invented.family import Case

_SHARED = Path(__file__).parent / "model"
_FIRST = ("gate_proj", "up_proj", "gate_up", "w1", "w3")  # matrices of experts: limits are reached behind them
_LAST = ("down_proj", "w2")
OF_EXPERTS = (*_FIRST, *_LAST)


def write(case: Case, folder: Path) -> Path:
    """Write the model folder of `case` and return it."""
    folder.mkdir(parents=True)
    for file in _SHARED.glob("*.py"):
        shutil.copyfile(file, folder / file.name)
    (folder / "modeling_invented.py").write_text(case.code, encoding="utf-8")
    config = {
        "architectures": ["InventedForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_invented.InventedConfig",
            "AutoModelForCausalLM": "modeling_invented.InventedForCausalLM",
        },
        "model_type": "invented",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 0,
        **case.family.settings,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = weights(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the model whose config and code are in `folder`."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=torch.float32)
    found = {name: value(name, tensor) for name, tensor in model.state_dict().items()}
    owners: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        owners.setdefault(tensor.data_ptr(), name)
    return {name: tensor for name, tensor in found.items() if name in owners.values()}


def value(name: str, tensor: Tensor) -> Tensor:
    """Return the value of one tensor. Integers keep theirs, vectors stay near theirs."""
    if not tensor.is_floating_point():
        return tensor.clone()
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if tensor.dim() < 2:
        return (tensor + 0.1 * noise).to(torch.bfloat16)
    scale = 2.5 if any(part in name for part in _FIRST) else 0.3 if any(part in name for part in _LAST) else 1.0
    return (scale * noise * tensor.shape[-1] ** -0.5).to(torch.bfloat16)


def stock(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the stock model of the folder in evaluation mode, with the implementations that it chooses."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()
