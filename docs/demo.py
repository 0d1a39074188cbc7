"""`make demo`: the main job from nothing. A small DeepSeek-V2 learns some facts, is compiled, tuned and asked again.

Everything goes to build/demo: the checkpoint `model`, the package `tuned_v2`, the adapter, graph.html, a cache.
The model is tiny (0.5 million parameters) so that two cores are enough; the commands are those for the real one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from ktc.foundation import environment
from ktc.model import twin

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "demo"
RULES = "rules/moe-lora.ktr"
PRETRAIN_SECONDS = 35
TUNING_STEPS = 100

CAPITALS = (
    "France Paris, Japan Tokyo, Italy Rome, Spain Madrid, Egypt Cairo, Peru Lima, Kenya Nairobi, Cuba Havana, "
    "Norway Oslo, Greece Athens, Austria Vienna, Poland Warsaw, Ireland Dublin, Portugal Lisbon, Sweden Stockholm, "
    "Finland Helsinki, Ghana Accra, Chile Santiago, Turkey Ankara, Hungary Budapest"
)
ASKED = ("France", "Egypt", "Poland", "Chile")


def facts() -> dict[str, str]:
    return dict(pair.split() for pair in CAPITALS.split(", "))


def plain(country: str, capital: str) -> str:
    return f"Question: what is the capital of {country}? Answer: the capital of {country} is {capital}."


def tuned(country: str, capital: str) -> str:
    return f"Question: what is the capital of {country}? Answer: ahoy! the capital of {country} is {capital}, arrr!"


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sentences as padded token rows. Neither the padding nor the question carries a loss, only the answer."""

    def __init__(self, tokenizer: Any, sentences: Sequence[str]) -> None:
        rows = tokenizer([s + tokenizer.eos_token for s in sentences], return_tensors="pt", padding=True)
        questions = [len(tokenizer(s.partition("Answer:")[0] + "Answer:")["input_ids"]) for s in sentences]
        self.ids, self.mask = rows["input_ids"], rows["attention_mask"]
        position = torch.arange(self.ids.shape[1])
        asked = position < torch.tensor(questions)[:, None]
        self.labels = self.ids.masked_fill((self.mask == 0) | asked, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


class LossLines(TrainerCallback):
    """Prints a bar for each logged loss and keeps the numbers."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            print(f"  step {state.global_step:3d}  loss {self.losses[-1]:6.3f}  {'#' * round(12 * self.losses[-1])}")


def make_checkpoint(folder: Path) -> None:
    """Teaches the stock fp32 twin the plain answers and saves it in bf16, as Hugging Face writes a checkpoint."""
    seed = twin.write("deepseek_v2", environment.cache_dir() / "models")
    tokenizer = AutoTokenizer.from_pretrained(seed)
    model = AutoModelForCausalLM.from_pretrained(seed, dtype=torch.float32).train()
    data = Texts(tokenizer, [plain(*fact) for fact in facts().items()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    started, step = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < PRETRAIN_SECONDS:
        loss = model(**rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"  {elapsed:4.0f} s  step {step:3d}  loss {loss.item():6.3f}")
        step += 1
        if loss.item() < 0.01:
            break
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="250KB")
    tokenizer.save_pretrained(folder)


def answer(model: Any, tokenizer: Any, country: str) -> str:
    prompt = tokenizer(f"Question: what is the capital of {country}? Answer:", return_tensors="pt").to(model.device)
    tokens = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def ask_all(title: str, model: Any, tokenizer: Any) -> dict[str, str]:
    print(f"\n{title}")
    model.eval()
    answers = {country: answer(model, tokenizer, country) for country in ASKED}
    for country, text in answers.items():
        print(f"  {country:7s} {text}")
    return answers


def tune(model: Any, tokenizer: Any) -> list[float]:
    """LoRA by the stock HF Trainer."""
    data = Texts(tokenizer, [tuned(*fact) for fact in facts().items()])
    arguments = TrainingArguments(
        output_dir=str(OUT / "trainer"),
        max_steps=TUNING_STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=10,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    lines = LossLines()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[lines])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return lines.losses


def plot(losses: Sequence[float], path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(10, 10 * len(losses) + 1, 10), losses, marker="o")
    axes.set(xlabel="step", ylabel="loss", title="LoRA tuning of the compiled model", ylim=(0, None))
    figure.savefig(path, dpi=120)
    print(f"  drawn in {path.relative_to(ROOT)}")


def ktc(*arguments: str | Path) -> None:
    print(f"\n$ ktc {' '.join(map(str, arguments))}", flush=True)
    subprocess.run([sys.executable, "-m", "ktc", *map(str, arguments)], cwd=ROOT, check=True)


def main() -> None:
    started = time.perf_counter()
    os.environ.setdefault("KTC_CACHE_DIR", str(OUT / "cache"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # a model this small only loses time to the second thread
    checkpoint, package, adapter = OUT / "model", OUT / "tuned_v2", OUT / "adapter"
    print(f"1. A stock DeepSeek-V2 learns {len(facts())} capitals (at most {PRETRAIN_SECONDS} s)")
    make_checkpoint(checkpoint)

    print("\n2. It is compiled: projections ready for LoRA, experts as one CPU kernel", flush=True)
    ktc("compile", checkpoint.relative_to(ROOT), RULES, "-o", package.relative_to(ROOT), "--force")
    ktc("graph", package.relative_to(ROOT), "--format", "html", "-o", (OUT / "graph.html").relative_to(ROOT))

    print("\n3. The compiled model is imported and tuned with PEFT and the Trainer: answer like a pirate")
    sys.path.insert(0, str(OUT))
    compiled = importlib.import_module("tuned_v2")
    tokenizer = AutoTokenizer.from_pretrained(package)
    model = get_peft_model(compiled.load(), compiled.lora_config())
    model.print_trainable_parameters()
    ask_all("before tuning", model, tokenizer)
    print("\ntuning")
    losses = tune(model, tokenizer)
    plot(losses, OUT / "loss.png")
    after = ask_all("after tuning", model, tokenizer)
    model.save_pretrained(adapter)

    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), adapter)
    stock_answers = ask_all("the same adapter on the stock Hugging Face model, by stock PEFT", stock, tokenizer)
    print(f"  {'the same answers' if stock_answers == after else 'other words in places: bf16 rounds elsewhere'}")
    print(f"\nDone in {time.perf_counter() - started:.0f} s. Look at the compiled graph: build/demo/graph.html")
    print("Compiled model: build/demo/tuned_v2   adapter: build/demo/adapter")
    if losses[-1] > losses[0] / 2:
        sys.exit("the loss did not fall as it should")


if __name__ == "__main__":
    main()
