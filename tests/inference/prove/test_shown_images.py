"""Images before the tokens of a comparison: by layers on real weights, and on the paths of training and serving."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from image_models import image_checkpoint, png
from torch import Tensor, nn
from transformers import PreTrainedConfig

import ktc
from ktc.diagnostics import InputRefused
from ktc.inference.consistency.request import Request as Compared
from ktc.inference.consistency.request import models
from ktc.inference.consistency.run import measure
from ktc.inference.prove.calls import record
from ktc.inference.prove.run import Request, prove_model
from ktc.model.checkpoint import read_sources, write_sources
from ktc.model.compare.shown import Shown, arguments, show
from ktc.model.hf.processor import read_processor

pytestmark = pytest.mark.usefixtures("one_thread")
SHOWN = Shown(torch.tensor([[3, 9, 9, 4]]), {"mm_token_type_ids": torch.tensor([[0, 1, 1, 0]]),
                                             "pixel_values": torch.ones(2, 5)}, (0, 9), "`a.png`")  # fmt: skip


def test_sequences_begin_with_the_question_and_have_no_other_mark() -> None:
    rows = SHOWN.before(torch.tensor([[5, 9], [0, 6]]))
    assert rows.tolist() == [[3, 9, 9, 4, 5, 1], [3, 9, 9, 4, 1, 6]]
    given = arguments(rows, SHOWN, torch.bfloat16)
    assert given["mm_token_type_ids"].tolist() == [[0, 1, 1, 0, 0, 0]] * 2
    assert (given["pixel_values"].shape, given["pixel_values"].dtype) == ((4, 5), torch.bfloat16)
    assert arguments(rows, None).keys() == {"input_ids", "attention_mask"}


class _Adds(nn.Module):
    """A model whose code adds features of images behind its first layer, or multiplies by them."""

    def __init__(self, multiplies: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self._multiplies = multiplies

    def forward(self, input_ids: Tensor, pixel_values: Tensor, use_cache: bool, **more: Tensor) -> Tensor:
        x, features = torch.ones(1, input_ids.shape[1], 4), pixel_values[:1, :4]
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 0:
                x = x * (features + 1) if self._multiplies else x + features
        return x


def test_features_that_are_added_between_layers_are_recorded_and_others_are_refused() -> None:
    model = _Adds(multiplies=False)
    ids = SHOWN.before(torch.tensor([[5, 6]]))
    recorded = record(model, list(model.layers), ids, SHOWN)  # pyright: ignore[reportArgumentType]
    assert recorded.added.keys() == {1} and len(recorded.calls) == 3
    assert torch.equal(recorded.before(1, torch.zeros(1, 6, 4)), torch.ones(1, 6, 4))
    assert torch.equal(recorded.before(2, torch.zeros(1, 6, 4)), torch.zeros(1, 6, 4))
    model = _Adds(multiplies=True)
    with pytest.raises(InputRefused, match="N602"):
        record(model, list(model.layers), ids, SHOWN)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = image_checkpoint("qwen3_vl_moe", tmp_path_factory.mktemp("images") / "m")
    for seed in (0, 1):
        (folder.parent / f"{seed}.png").write_bytes(png(seed, 96 + 64 * seed))
    return ktc.compile(folder, "moe-lora", folder.parent / "out", settings={"device": "cpu"})


@pytest.mark.slow
def test_a_proof_on_real_weights_sees_towers_and_their_features(out: Path) -> None:
    request = Request(out, images=(out.parent / "0.png", out.parent / "1.png"), count=64, carry=True)
    report = prove_model(request)
    assert not report.red and "that show `0.png`, `1.png`" in report.tokens
    inputs = [row for layer in report.layers for row in layer.rows if row.kind == "input"]
    assert [row.what for row in inputs] == ["embeddings and towers", "features of images"]
    assert not [row for layer in prove_model(replace(request, images=())).layers for row in layer.rows
                if row.kind == "input"]  # fmt: skip
    weights, manifest = out / "weights.json", out / "ktc.json"
    before = weights.read_bytes(), manifest.read_bytes()
    one, other = (f"model.visual.deepstack_merger_list.{number}.linear_fc1.weight" for number in (0, 1))
    rows = read_sources(before[0])
    (key,) = (row.source_key for row in rows if row.target == other)
    weights.write_text(write_sources([replace(row, source_key=key) if row.target == one else row for row in rows]))
    sealed = json.loads(before[1])
    sealed["files"]["weights.json"] = hashlib.sha256(weights.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(sealed))
    try:
        found = prove_model(request)
    finally:
        weights.write_bytes(before[0])
        manifest.write_bytes(before[1])
    assert [row.what for layer in found.layers for row in layer.rows if row.red] == ["features of images"]


@pytest.mark.slow
@pytest.mark.parametrize("against", ["trainer", "stock"])
def test_answers_about_images_are_trained_and_served_alike(out: Path, against: str) -> None:
    named = models([str(out)])
    images = (out.parent / "0.png", out.parent / "1.png")
    report = measure(Compared(named, named, against=against, images=images, sequences=2, length=24, prompt=6))  # pyright: ignore[reportArgumentType]
    (cell,) = report.cells
    shown = report.length - 24
    assert report.prompt == shown + 6 and cell.paths["calls"].tokens == 2 * 24
    assert cell.paths["calls"].exact == (against == "trainer")
    for path in cell.paths.values():
        assert path.mean is not None and path.mean < 0.05
    if against == "trainer":
        assert "rows have images" in report.trained[0].how


@pytest.mark.slow
def test_a_question_of_images_is_that_of_the_processor(out: Path) -> None:
    from image_models import picture

    config = PreTrainedConfig.from_pretrained(out)
    shown = show(out, (out.parent / "0.png",), (picture(0),), config, trusted=False)
    processor = read_processor(out, "G732")
    wanted = processor(
        text=["<|user|><|vision_start|><|image_pad|><|vision_end|><|end|><|assistant|>"], images=[picture(0)],
        return_tensors="pt", add_special_tokens=False,
    )  # fmt: skip
    assert torch.equal(shown.ids, wanted["input_ids"])
    assert torch.equal(shown.pixels["pixel_values"], wanted["pixel_values"])
