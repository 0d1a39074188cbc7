"""Small models with towers for images, as folders: weights, a tokenizer of letters, and the files of a processor.

Images are made on the spot. `stock_inputs` makes the inputs of a prompt by transformers' image processor alone, with
the placeholders counted here.
"""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoImageProcessor, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from ktc.model.twin import build, default_config, shrink

END = "<|end|>"
_NAMED = ["<unk>", END, "<|system|>", "<|user|>", "<|assistant|>", "\n", *map(chr, range(32, 127))]
_TEMPLATE = (
    "{% for turn in messages %}<|{{ turn.role }}|>"
    "{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def picture(seed: int = 0, width: int = 96, height: int = 64) -> Image.Image:
    """Return an image of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(seed: int = 0, width: int = 96, height: int = 64) -> bytes:
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return file.getvalue()


def data_uri(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of letters whose placeholders have the ids of `config`."""
    size = config.get_text_config().vocab_size
    names = [*_NAMED, *(f"<|{number}|>" for number in range(len(_NAMED), size))]
    for name, number in (
        ("<|image_pad|>", config.image_token_id), ("<|video_pad|>", config.video_token_id),
        ("<|vision_start|>", config.vision_start_token_id), ("<|vision_end|>", config.vision_end_token_id),
    ):  # fmt: skip
        names[number] = name
    built = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    built.decoder = decoders.Fuse()
    built.add_special_tokens([name for name in names if len(name) > 1])
    made = PreTrainedTokenizerFast(tokenizer_object=built, eos_token=END, pad_token=END, unk_token="<unk>")
    made.chat_template = _TEMPLATE
    return made


def image_processor(config: Any) -> Any:
    vision = config.vision_config
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size, merge_size=vision.spatial_merge_size, max_pixels=128 * 128, min_pixels=32 * 32,
        temporal_patch_size=vision.temporal_patch_size,
    )  # fmt: skip


def image_checkpoint(family: str, folder: Path) -> Path:
    """Write a small model of Qwen's families with all of its files, as its makers publish them."""
    model: Any = build(shrink(default_config(family, whole=True)), seed=0)
    model.generation_config.eos_token_id = _NAMED.index(END)
    model.generation_config.pad_token_id = _NAMED.index(END)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer(model.config).save_pretrained(folder)
    image_processor(model.config).save_pretrained(folder)
    return folder


def _as_loaded(processor: Any) -> Any:
    """Return the processor that transformers makes of its files: with torchvision, where that is installed."""
    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        return AutoImageProcessor.from_pretrained(folder)


def stock_inputs(model: Any, words: Any, text: str, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """Return the inputs of a text with `<|image_pad|>` for each image, by the tokenizer `words`."""
    pixels: dict[str, torch.Tensor] = {}
    if images:
        pixels = dict(_as_loaded(image_processor(model.config))(images=list(images), return_tensors="pt"))
        merged = model.config.vision_config.spatial_merge_size**2
        for count in (pixels["image_grid_thw"].prod(1) // merged).tolist():
            text = text.replace("<|image_pad|>", "<|placeholder|>" * count, 1)
        text = text.replace("<|placeholder|>", "<|image_pad|>")
    ids = words(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    kinds = {"mm_token_type_ids": (ids == model.config.image_token_id).int()} if images else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds, **pixels}
