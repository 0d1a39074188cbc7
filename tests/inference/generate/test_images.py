"""`ktc generate --image`: answers about images are stock's, and what cannot be read is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import image_checkpoint, picture, png, stock_inputs
from transformers import AutoModelForImageTextToText, AutoTokenizer

import ktc
from ktc.cli import app as cli
from ktc.diagnostics import InputRefused
from ktc.inference.generate.images import render_with_images
from ktc.model.hf.processor import read_processor
from ktc.model.loading.images import open_processor, read_images

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
QUESTION = "<|user|>{}What is it?<|end|><|assistant|>"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_checkpoint("qwen3_vl_moe", tmp_path_factory.mktemp("images") / "m")


@pytest.fixture(scope="module")
def out(original: Path) -> Path:
    return ktc.compile(original, "moe-lora", original.parent / "out", settings={"device": "cpu"})


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = cli.main(["generate", *map(str, arguments)])
        printed, told = capfd.readouterr()
        return code, printed, told

    return call


def stock_answer(folder: Path, inputs: dict[str, torch.Tensor], count: int = 12) -> str:
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(**inputs, max_new_tokens=count, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(AutoTokenizer.from_pretrained(folder).decode(answer, skip_special_tokens=True))


@pytest.mark.slow
def test_answers_about_images_are_those_of_stock(original: Path, out: Path, run: Run, tmp_path: Path) -> None:
    model: Any = AutoModelForImageTextToText.from_pretrained(original, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(original)
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, file in enumerate(files):
        file.write_bytes(png(seed, 96 + 64 * seed))
    images = [picture(0), picture(1, 160)]
    answers: list[str] = []
    for shown in ([0], [1], [0, 1]):  # one prompt with two images has two answers
        text = QUESTION.format(IMAGE * len(shown))
        wanted = stock_answer(original, stock_inputs(model, words, text, [images[at] for at in shown]))
        options = [word for at in shown for word in ("--image", files[at])]
        code, printed, told = run(out, "What is it?", *options, "--reference", "--max-new-tokens", "12")
        assert code == 0, told
        assert printed.removesuffix("\n") == wanted
        answers.append(wanted)
    assert len(set(answers)) == 3
    code, printed, told = run(
        out, QUESTION.format(IMAGE), "--raw", "--image", files[0], "--json", "--reference", "--max-new-tokens", "12"
    )
    assert json.loads(printed)["text"] == answers[0]
    assert run(out, "What is it?", "--image", files[0], "--max-new-tokens", "3")[0] == 0  # by kernels, in bf16


def test_a_prompt_with_images_is_the_one_of_transformers_parts(original: Path, tmp_path: Path) -> None:
    config: Any = AutoModelForImageTextToText.from_pretrained(original)
    words: Any = AutoTokenizer.from_pretrained(original)
    (tmp_path / "a.png").write_bytes(png())
    processor = read_processor(original, "G732")
    prompt = render_with_images(processor, "What is it?", read_images([tmp_path / "a.png"]), system="Be brief.")
    wanted = stock_inputs(config, words, "<|system|>Be brief.<|end|>" + QUESTION.format(IMAGE), [picture()])
    assert list(prompt.input_ids) == wanted["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
        assert torch.equal(prompt.pixels[name], wanted[name])
    with pytest.raises(InputRefused, match=r"G733.*does not take the prompt"):
        render_with_images(processor, "no placeholder", [picture()], raw=True)


def test_images_are_refused_before_anything_is_loaded(compiled: Path, run: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "a.png", tmp_path / "b.png"
    good.write_bytes(png())
    bad.write_text("<svg/>")
    for arguments, code in (
        ((compiled, "Hi", "--image", good), "G731"),
        ((compiled, "Hi", "--image", bad, "--image", tmp_path / "none"), "G733"),
        ((compiled, "--chat", "--image", good), "G700"),
        ((compiled, "Hi", "--image", good, "--prefill-chunk", "8"), "G700"),
        (("tiny:qwen3_moe", "Hi", "--image", good, "--text-only"), "G731"),
    ):
        exit_code, _, told = run(*arguments)
        assert exit_code == 2
        assert code in told
    with pytest.raises(InputRefused) as refused:
        read_images([bad, tmp_path / "none"])
    assert [str(fault.span) for fault in refused.value.diagnostics] == [f"{bad}:1:1", f"{tmp_path / 'none'}:1:1"]


def test_a_folder_without_a_processor_is_refused(original: Path, tmp_path: Path) -> None:
    for file in original.iterdir():
        if "processor" not in file.name and file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputRefused, match="G732"):
        read_processor(tmp_path, "G732")


def test_a_model_of_text_names_the_reason(compiled: Path) -> None:
    with pytest.raises(InputRefused, match=r"G731.*reads text alone: its class is"):
        open_processor(compiled)
