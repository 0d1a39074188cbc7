"""Models that read images, at their real widths with two layers: text and images of three sizes beside stock.

    python benchmarks/image_shapes.py qwen3_vl_moe [--folder DIR]

A checkpoint with random weights is written, compiled with `moe-lora`, and loaded. One line of JSON: the largest
difference of logits in fp32, and that of the kernels in bf16 beside stock's own in bf16, both by stock in fp32. Answers
of four tokens about an image are compared in fp32, and the losses of three steps of LoRA in bf16 on texts and images.
Models are in memory one after the other: 12 GB.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from peft import get_peft_model
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForImageTextToText

import ktc
from census.checkpoints import whole_config
from ktc.model.hf.stock_model import build
from ktc.model.loading.peft_glue import read_lora_config

SIZES: Final = ((96, 64), (224, 224), (448, 320))
_PUBLISHED: Final[Mapping[str, Mapping[str, Mapping[str, Any]]]] = {
    "qwen3_vl_moe": {
        "text_config": {
            "hidden_size": 2048, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936,
            "num_hidden_layers": 2, "mlp_only_layers": [], "decoder_sparse_step": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                                "mrope_interleaved": True},
        },
        "vision_config": {"depth": 2, "out_hidden_size": 2048, "deepstack_visual_indexes": [0, 1]},
    },
    "qwen3_5_moe": {
        "text_config": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        "vision_config": {"depth": 2, "out_hidden_size": 2048},
    },
    "gemma4": {
        "text_config": {
            "hidden_size": 2816, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
            "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
            "sliding_window": 1024, "use_bidirectional_attention": "vision", "per_layer_config": {},
        },
        "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_key_value_heads": 16,
            "head_dim": 72, "num_hidden_layers": 2,
        },
    },
    "kimi_k25": {  # 24 of 384 experts and 16,384 of 163,840 tokens, for memory
        "text_config": {
            "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 24, "n_group": 1, "topk_group": 1,
            "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 16_384,
        },
        "vision_config": {"num_hidden_layers": 2},
        "": {"image_token_id": 16_000, "vision_start_token_id": 16_001, "vision_end_token_id": 16_002,
             "video_token_id": 16_003},
    },
}  # fmt: skip


def config_of(family: str) -> Any:
    """Return the config of a family at its published widths, with two layers of text and two of the tower."""
    settings: dict[str, Any] = whole_config(family).to_dict()
    for part, named in _PUBLISHED[family].items():
        (settings[part] if part else settings).update(named)
    return type(whole_config(family)).from_dict(settings)


def pixels_of(model: Any, picture: Image.Image) -> dict[str, Tensor]:
    """Return what the family's processor makes of one picture."""
    from transformers import Gemma4ImageProcessorPil, Qwen2VLImageProcessorPil

    vision = model.config.vision_config
    if model.config.model_type == "gemma4":
        made = dict(Gemma4ImageProcessorPil()(images=[picture], return_tensors="pt"))
        return {name: made[name] for name in ("pixel_values", "image_position_ids")}
    if model.config.model_type == "kimi_k25":  # whose processor requires torchvision
        side = 2 * vision.patch_size
        picture = picture.resize((-(-picture.width // side) * side, -(-picture.height // side) * side))
        values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 127.5 - 1
        rows, columns = (size // vision.patch_size for size in values.shape[1:])
        cut = values.reshape(3, rows, vision.patch_size, columns, vision.patch_size).permute(1, 3, 0, 2, 4)
        return {"pixel_values": cut.flatten(0, 1), "image_grid_thw": torch.tensor([[1, rows, columns]])}
    return dict(
        Qwen2VLImageProcessorPil(
            patch_size=vision.patch_size, merge_size=vision.spatial_merge_size, min_pixels=32 * 32,
            temporal_patch_size=vision.temporal_patch_size,
        )(images=[picture], return_tensors="pt")
    )  # fmt: skip


def _rows(features: Any) -> int:
    pooled = getattr(features, "pooler_output", None)
    features = pooled if pooled is not None else getattr(features, "last_hidden_state", features)
    return features.shape[:-1].numel() if isinstance(features, Tensor) else sum(map(_rows, features))


def batch_of(model: Any) -> dict[str, Tensor]:
    """Return three sequences, filled up on the left: text and a picture, text, and text with two pictures."""
    generator = torch.Generator().manual_seed(7)
    noise = np.random.default_rng(7)
    pictures = [Image.fromarray(noise.integers(0, 255, (high, wide, 3), dtype=np.uint8)) for wide, high in SIZES]
    images = [pixels_of(model, picture) for picture in pictures]
    reader = model if hasattr(model, "get_image_features") else model.base_model
    with torch.no_grad():
        counts = [_rows(reader.get_image_features(**_as(image, model.dtype))) for image in images]
    holder = model.config.image_token_id

    def words(count: int) -> Tensor:
        return torch.randint(10, 9000, (count,), generator=generator)

    def image(at: int) -> Tensor:
        return torch.full((counts[at],), holder)

    rows = [torch.cat([words(8), image(0), words(6)]), words(40),
            torch.cat([words(5), image(1), words(4), image(2), words(6)])]  # fmt: skip
    longest = max(map(len, rows))
    ids = torch.stack([pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    given = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == holder).int()}
    if model.config.model_type == "kimi_k25":
        del given["mm_token_type_ids"]
    return given | {name: torch.cat([image[name] for image in images]) for name in images[0]}


def _as(given: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in given.items()}


def logits_of(model: Any, given: Mapping[str, Tensor]) -> Tensor:
    """Return the logits of all tokens but padding, fp32."""
    with torch.no_grad():
        return model(**_as(given, model.dtype)).logits.float()[given["attention_mask"].bool()]


def answer_of(model: Any, given: Mapping[str, Tensor]) -> list[int]:
    """Return four tokens about the picture of the first sequence."""
    one = pixels_of(model, Image.fromarray(np.full((64, 96, 3), 99, dtype=np.uint8)))
    keep = given["attention_mask"][0].bool()
    ids = given["input_ids"][:1, keep]
    named = {name: value[:1, keep] for name, value in given.items() if value.shape == given["input_ids"].shape}
    named |= {"input_ids": ids, **_as(one, model.dtype)}
    return model.generate(**named, max_new_tokens=4, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()


def losses_of(model: Any, out: Path, given: Mapping[str, Tensor]) -> list[float]:
    """Return the losses of three steps of the adapter of `out` on the tokens of text."""
    lora = read_lora_config(out)
    lora.lora_dropout = 0.0
    torch.manual_seed(11)
    tuned: Any = get_peft_model(model, lora).train()
    ids = given["input_ids"]
    learned = given["attention_mask"].bool() & (ids != model.config.image_token_id)
    labels = torch.where(learned, ids, -100)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-3)
    losses = list[float]()
    for _ in range(3):
        loss = tuned(**_as(given, model.dtype), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def compared(family: str, folder: Path) -> dict[str, Any]:
    """Return the differences of a family."""
    began = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{family}: {what} after {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    torch.manual_seed(7)
    model: Any = build(config_of(family), torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(folder / "m")
    tell("written")
    given = batch_of(model)
    out = ktc.compile(folder / "m", "moe-lora", folder / "out", settings={"device": "cpu"})
    tell("compiled")
    in_bf16 = logits_of(model.eval(), given)
    losses_in_bf16 = losses_of(model, out, given)
    tell("stock in bf16")
    del model
    gc.collect()
    stock: Any = AutoModelForImageTextToText.from_pretrained(folder / "m", dtype=torch.float32).eval()
    wanted, answer = logits_of(stock, given), answer_of(stock, given)
    tell("stock in fp32")
    del stock
    gc.collect()
    reference: Any = ktc.load(out, reference=True).float().eval()
    exact, same = logits_of(reference, given), answer_of(reference, given) == answer
    tell("compiled in fp32")
    del reference
    gc.collect()
    kernels: Any = ktc.load(out).eval()
    by_kernels = logits_of(kernels, given)
    losses = losses_of(kernels, out, given)
    tell("trained by the kernels")
    return {
        "family": family, "parameters": parameters, "tokens": int(given["attention_mask"].sum()),
        "of_images": int((given["input_ids"] == config_of(family).image_token_id).sum()),
        "largest_logit": _largest(wanted), "fp32": _largest(exact - wanted), "same_answer": same,
        "kernels_bf16": _rms(by_kernels - wanted), "stock_bf16": _rms(in_bf16 - wanted), "of": _rms(wanted),
        "losses_kernels_bf16": losses, "losses_stock_bf16": losses_in_bf16,
    }  # fmt: skip


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare one family, and print its line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=tuple(_PUBLISHED))
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoint is written: about 8 GB")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        print(json.dumps(compared(options.family, Path(folder))))


if __name__ == "__main__":
    main()
