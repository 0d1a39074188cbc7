"""`ktc train` with images: losses are those of stock PEFT and TRL, and what is not read is refused with its row."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import data_uri, image_checkpoint, image_processor, picture, png, stock_inputs, tokenizer
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForImageTextToText, AutoTokenizer

import ktc
from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.hf.processor import read_processor
from ktc.training.tune import prepare as prepare_module
from ktc.training.tune.examples import read_training_data
from ktc.training.tune.image_rows import ImageCollator
from ktc.training.tune.settings import TrainSettings
from ktc.training.tune.tokenised import tokenise
from ktc.training.tune.types import RunPaths

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def config() -> Any:
    return twin.shrink(twin.default_config("qwen3_vl_moe", whole=True))


@pytest.fixture(scope="module")
def processor(config: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("processor")
    config.save_pretrained(folder)
    tokenizer(config).save_pretrained(folder)
    image_processor(config).save_pretrained(folder)
    return read_processor(folder, "T549")


def written(folder: Path, *rows: Any) -> Path:
    """Write rows and two images beside them."""
    folder.mkdir(exist_ok=True)
    for seed in (0, 1):
        (folder / f"{seed}.png").write_bytes(png(seed, 96 + 64 * seed))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def asked(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


WORDS = {"type": "text", "text": "What?"}
FIRST, SECOND = ({"type": "image", "path": f"{seed}.png"} for seed in (0, 1))
IN_DATA = {"type": "image_url", "image_url": {"url": data_uri(png(0))}}
ROWS = (
    [asked(FIRST, WORDS), said("A cat."), asked({"type": "text", "text": "More."}, SECOND), said("A dog.")],
    [{"role": "user", "content": "Hello"}, said("Hi.")],
    [asked(IN_DATA, WORDS), said("A cat.")],
)


def tokens(path: Path, processor: Any, **more: Any) -> Any:
    data = replace(read_training_data((str(path),)), processor=processor)
    return tokenise(data, processor.tokenizer, limit=more.pop("limit", 512), **more)


def test_answers_are_learned_and_nothing_of_images(processor: Any, config: Any, tmp_path: Path) -> None:
    made = tokens(written(tmp_path, *ROWS), processor)
    text = f"<|user|>{IMAGE}What?<|end|><|assistant|>A cat.<|end|><|user|>More.{IMAGE}<|end|><|assistant|>A dog.<|end|>"

    class Model:
        pass

    Model.config = config  # pyright: ignore[reportAttributeAccessIssue]
    wanted = stock_inputs(Model, processor.tokenizer, text, [picture(0), picture(1, 160)])
    assert made.input_ids[0] == wanted["input_ids"][0].tolist()
    for ids, labels, answers in zip(
        made.input_ids, made.labels, ("A cat.<|end|>A dog.<|end|>", "Hi.<|end|>", "A cat.<|end|>"), strict=True
    ):
        assert processor.tokenizer.decode([label for label in labels if label >= 0]) == answers
        assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    everything = tokens(written(tmp_path, *ROWS), processor, train_on_prompt=True)
    assert config.image_token_id not in everything.labels[0]


def test_the_first_rows_have_the_images_of_those_rows(processor: Any, tmp_path: Path) -> None:
    """Settings are tried on them before the model is loaded."""
    first = tokens(written(tmp_path, *ROWS), processor).first_rows(2)
    assert [len(row["image_files"]) for row in first.dataset()] == [2, 0]


class WithoutKinds:
    """A processor of a family that does not say which tokens are images'."""

    def __init__(self, processor: Any, **named: Any) -> None:
        self._processor, self._named = processor, named

    def __call__(self, **given: Any) -> dict[str, Any]:
        made = dict(self._processor(**given))
        del made["mm_token_type_ids"]
        return made

    def __getattr__(self, name: str) -> Any:
        return self._named[name] if name in self._named else getattr(self._processor, name)


def test_no_token_of_an_image_is_learned_where_the_processor_does_not_mark_them(processor: Any, tmp_path: Path) -> None:
    path = written(tmp_path, *ROWS)
    wanted = tokens(path, processor, train_on_prompt=True)
    assert tokens(path, WithoutKinds(processor), train_on_prompt=True).labels == wanted.labels
    nameless = WithoutKinds(processor, image_token_id=None, image_token=None)
    assert tokens(path, nameless).labels == tokens(path, processor).labels
    with pytest.raises(InputRefused) as refused:
        tokens(path, nameless, train_on_prompt=True)
    assert [fault.code for fault in refused.value.diagnostics] == ["T549", "T549"]
    assert "learn the answers alone" in refused.value.diagnostics[0].hint


def test_a_micro_batch_mixes_texts_and_images(processor: Any, tmp_path: Path) -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    made = tokens(written(tmp_path, *ROWS), processor)
    collate = ImageCollator(DataCollatorForLanguageModeling(pad_token_id=1), processor)
    batch = collate(list(made.dataset()))
    texts = [f"<|user|>{IMAGE}What?<|end|>" for _ in range(2)]
    stock = processor(text=texts, images=[picture(0), picture(1, 160)], return_tensors="pt", padding=True)
    assert torch.equal(batch["image_grid_thw"], stock["image_grid_thw"][[0, 1, 0]])
    assert batch["pixel_values"].shape[0] == batch["image_grid_thw"].prod(1).sum()
    assert batch["mm_token_type_ids"].shape == batch["input_ids"].shape == batch["labels"].shape
    assert torch.equal(batch["mm_token_type_ids"] == 1, batch["input_ids"] == processor.image_token_id)
    assert "pixel_values" not in collate([made.dataset()[1]])


def test_micro_batches_are_those_of_trl(processor: Any, tmp_path: Path) -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, DataCollatorForVisionLanguageModeling

    answers = ("A cat.", "Two dogs.")
    rows = ([asked(part, WORDS), said(answer)] for part, answer in zip((FIRST, SECOND), answers, strict=True))
    made = tokens(written(tmp_path, *rows), processor)
    batch = ImageCollator(DataCollatorForLanguageModeling(pad_token_id=1), processor)(list(made.dataset()))
    question = [{"role": "user", "content": "What?"}]
    stock: Any = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    wanted = stock([
        {"prompt": question, "completion": [said(answer)], "images": [image]}
        for image, answer in zip((picture(0), picture(1, 160)), answers, strict=True)
    ])  # fmt: skip
    assert batch.keys() == wanted.keys()
    assert all(torch.equal(batch[name], wanted[name]) for name in wanted)


REFUSED = {
    "SVG": ([asked({"type": "image", "path": "a.svg"}, WORDS), said("x")], "T549.*a.svg.*such as SVG"),
    "no file": ([asked({"type": "image", "path": "none.png"}, WORDS), said("x")], "T549.*none.png"),
    "an address": ([asked({"type": "image", "url": "http://x/a.png"}), said("x")], "T515.*nothing is fetched"),
    "of the assistant": ([asked(WORDS), {"role": "assistant", "content": [FIRST]}], "T515.*only the user's"),
    "a video": ([asked({"type": "video", "path": "a.mp4"}), said("x")], "T515.*neither a text nor an image"),
    "a placeholder": ([asked(FIRST, {"type": "text", "text": "<|image_pad|>"}), said("x")], "T549.*does not take"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_row_that_is_not_read_is_refused_with_its_place(name: str, processor: Any, tmp_path: Path) -> None:
    row, words = REFUSED[name]
    path = written(tmp_path, ROWS[1], row)
    (tmp_path / "a.svg").write_text("<svg/>")
    with pytest.raises(InputRefused, match=words) as refused:
        tokens(path, processor)
    assert [str(fault.span) for fault in refused.value.diagnostics] == [f"{path}:2:1"]


def test_rows_with_images_are_never_cut(processor: Any, tmp_path: Path) -> None:
    with pytest.raises(InputRefused, match="T517"):
        tokens(written(tmp_path, *ROWS), processor, limit=20, truncate=True)


@pytest.mark.slow
def test_losses_are_those_of_stock_peft_and_trl(tmp_path: Path) -> None:
    from trl import SFTConfig, SFTTrainer

    folder = image_checkpoint("qwen3_vl_moe", tmp_path / "m")
    out = ktc.compile(folder, "moe-lora", tmp_path / "out", settings={"device": "cpu"})
    rows = [[asked(part, WORDS), said(answer)] for part, answer in ((FIRST, "A cat."), (SECOND, "Two dogs."))] * 2
    options: dict[str, Any] = {"max_steps": 4, "batch": 2, "accumulation": 1, "logging_steps": 1}
    result = ktc.train(
        out, written(tmp_path / "data", *rows), output=tmp_path / "run", precision="fp32", learning_rate=1e-2,
        warmup=0, rank=4, **options,
    )  # fmt: skip
    state = json.loads(next((tmp_path / "run").glob("checkpoint-*/trainer_state.json")).read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert not result.interrupted and (tmp_path / "run" / "adapter_model.safetensors").is_file()
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    adapter = LoraConfig.from_pretrained(tmp_path / "run")
    adapter.inference_mode = False
    from datasets import Dataset

    data = Dataset.from_list([
        {"prompt": [{"role": "user", "content": "What?"}], "completion": [said(answer)], "images": [image]}
        for image, answer in ((picture(0), "A cat."), (picture(1, 160), "Two dogs."))
    ])  # fmt: skip
    torch.manual_seed(0)
    trainer = SFTTrainer(
        get_peft_model(model, adapter),
        SFTConfig(
            str(tmp_path / "stock"), max_steps=1, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            bf16=False, use_cpu=True, learning_rate=1e-2, max_length=None, save_strategy="no",
            router_aux_loss_coef=0.0,
        ),
        train_dataset=data, processing_class=read_processor(folder, "T549"),
    )  # fmt: skip
    trainer.train()
    stock = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(stock[0], abs=1e-4)
    assert losses[-1] < losses[0]
    assert AutoTokenizer.from_pretrained(out).chat_template


def test_a_row_gets_the_special_tokens_of_its_template_alone(processor: Any, tmp_path: Path) -> None:
    """TRL asks tokenizers for no others: a template writes them itself."""
    adding = copy.copy(processor)
    adding.tokenizer = copy.deepcopy(processor.tokenizer)
    user = adding.tokenizer.convert_tokens_to_ids("<|user|>")
    adding.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", user)]
    )
    assert adding.tokenizer("<|user|>What?")["input_ids"][:2] == [user, user]
    path = written(tmp_path, [asked(FIRST, WORDS), said("A cat.")])
    (ids,) = tokens(path, adding).input_ids
    assert (ids[0], list(ids).count(user)) == (user, 1)


def test_rows_with_images_are_not_packed(processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [asked(FIRST, WORDS), said("A cat.")])
    monkeypatch.setattr(prepare_module, "_limit", lambda *_: 512)
    monkeypatch.setattr(prepare_module, "read_tokenizer", lambda *_: processor.tokenizer)
    with pytest.raises(InputRefused) as refusal:
        prepare_module.prepare(RunPaths(tmp_path, tmp_path / "run"), TrainSettings(data=(str(path),), packing=True))
    assert [diagnostic.code for diagnostic in refusal.value.diagnostics] == ["T549"]


@pytest.mark.parametrize("change", ["deleted", "another size"])
def test_an_image_that_changes_during_the_training_is_named(processor: Any, tmp_path: Path, change: str) -> None:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    made = tokens(written(tmp_path, [asked(FIRST, WORDS), said("A cat.")]), processor)
    collate = ImageCollator(DataCollatorForLanguageModeling(pad_token_id=1), processor)
    collate(list(made.dataset()))
    (tmp_path / "0.png").unlink() if change == "deleted" else (tmp_path / "0.png").write_bytes(png(0, 224))
    with pytest.raises(InputRefused) as refusal:
        collate(list(made.dataset()))
    (problem,) = refusal.value.diagnostics
    assert (problem.code, "0.png" in problem.message) == ("T549", True)
