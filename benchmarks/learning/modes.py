"""`make learn-int4`: one model tuned and served in bf16 and in INT4, in every way that a user may choose.

The pre-trained model of `make learn`, in bf16 and with experts of 64 (INT4 has groups of 32), is tuned to the bard's
style with LoRA on attention and experts: on bf16 experts, on INT4 experts, and with base and adapter rounded together.
Each is then served in each way. Held-out people show the loss of the reference answers, the tokens of them that rank
first, and the answers that are equal; `ktc consistency` shows how far serving is from its trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from learning import modes_page
from learning.commands import ktc
from learning.data import write_data
from learning.experiment import SETTINGS, pretrained
from learning.world import make_world

EXPERT_WIDTH: Final = 64
RANK: Final = 8
LEARNING_RATE: Final = 5e-3
ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Training:
    """A program with its settings, and the name of what it trains."""

    name: str
    rules: str
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arm:
    """Which training serves how: `beside` keeps its adapter beside experts of a format, `merged` rounds the sum."""

    label: str
    trained: str
    served: str
    merged: bool = False
    again: bool = False  # merged and rounded, although it was trained beside rounded weights


@dataclass(frozen=True, slots=True)
class Row:
    """Results on held-out people. `loss` is per token of the reference answers, others are percentages.

    `drift` is the mean difference of log-probabilities between the trainer and decoding, `calls` that of a forward of
    the trainer's batches.
    """

    label: str
    trained: str
    served: str
    loss: float
    token_accuracy: float
    equal: float
    calls: float
    drift: float


TRAININGS: Final = (
    Training("bf16", "moe-experts-lora", ("format=bf16",)),
    Training("int4", "moe-qat", ("weights=base",)),
    Training("merged", "moe-qat", ("weights=merged",)),
)
ARMS: Final = (
    Arm("bf16, served as trained", "bf16", "bf16"),
    Arm("PTQ: bf16, served beside INT4", "bf16", "int4"),
    Arm("PTQ: bf16, merged and rounded", "bf16", "merged", merged=True),
    Arm("QAT beside INT4, served as trained", "int4", "int4"),
    Arm("QAT beside INT4, merged and rounded again", "int4", "merged", merged=True, again=True),
    Arm("QAT merged, served as trained", "merged", "merged", merged=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make learn-int4", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "learning-int4")
    parser.add_argument("--quick", action="store_true", help="few steps, for a test")
    parser.add_argument("--docs", action="store_true", help="renew docs/details/quantisation.md and its picture")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder: Path = options.output.resolve()
    os.environ.setdefault("KTC_CACHE_DIR", str(folder / "cache"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    rows = run(folder, *((40, 10) if options.quick else (520, 160)), seed=options.seed)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    (folder / "modes.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    modes_page.write(rows, folder, date, options.seed)
    if options.docs:
        modes_page.renew(rows, ROOT / "docs" / "details", date, options.seed)


def run(folder: Path, pretrain_steps: int, steps: int, *, seed: int) -> tuple[Row, ...]:
    """Train and serve every arm; the products are in `folder`."""
    world = make_world(seed)
    data, held_out = write_data(world, folder / "data")["style"]
    pretrained(world, folder / "model-fp32", pretrain_steps, EXPERT_WIDTH)
    model = in_bf16(folder)
    _write_text(model, held_out)
    outs = {each.name: _compiled(model, each.rules, each.settings, folder / f"out_{each.name}") for each in TRAININGS}
    adapters = {name: _trained(out, data, folder / f"adapter-{name}", steps, seed) for name, out in outs.items()}
    merged: dict[str, Path] = {}
    for arm in ARMS:
        if arm.merged:
            merged[arm.trained] = _merged(arm, outs[arm.trained], adapters[arm.trained], folder)
    return tuple(_measured(arm, outs, adapters, merged, held_out) for arm in ARMS)


def in_bf16(folder: Path) -> Path:
    """Save the pre-trained model in bf16, the dtype in which models are published."""
    model, wanted = AutoModelForCausalLM.from_pretrained(folder / "model-fp32"), folder / "model"
    model.to(torch.bfloat16).save_pretrained(wanted)
    AutoTokenizer.from_pretrained(folder / "model-fp32").save_pretrained(wanted)
    return wanted


def _compiled(model: Path, rules: str, settings: Sequence[str], out: Path) -> Path:
    ktc("compile", model, rules, *(word for each in settings for word in ("--set", each)), "-o", out, "--force")
    return out


def _trained(out: Path, data: Path, adapter: Path, steps: int, seed: int) -> Path:
    ktc(
        "train", out, "--data", data, "--output", adapter, "--force", *SETTINGS, "--learning-rate", LEARNING_RATE,
        "--rank", RANK, "--alpha", 4 * RANK, "--max-steps", steps, "--seed", seed,
    )  # fmt: skip
    return adapter


def _merged(arm: Arm, out: Path, adapter: Path, folder: Path) -> Path:
    """Merge, round to INT4, and compile the checkpoint."""
    checkpoint = folder / f"merged-{arm.trained}"
    again = ("--requantize-merged",) if arm.again else ()
    ktc("merge", out, adapter, "--int4", *again, "-o", checkpoint)
    return _compiled(checkpoint, "moe-experts-lora", (), folder / f"out_merged_{arm.trained}")


def _measured(
    arm: Arm, outs: dict[str, Path], adapters: dict[str, Path], merged: dict[str, Path], held_out: Path
) -> Row:
    trained, adapter = outs[arm.trained], adapters[arm.trained]
    served = merged[arm.trained] if arm.merged else outs[arm.served]
    attached = None if arm.merged else adapter
    text = held_out.with_suffix(".txt")
    gap = ktc(
        "consistency", trained, "--adapter", adapter, "--serve", f"served={served}",
        *(("--merged",) if arm.merged else ()), "--text", text, "--sequences", 16, "--stack", "off",
    )["consistency"]["cells"][0]["paths"]  # fmt: skip
    loss, ranked = _of_references(served, attached, held_out)
    equal = _equal(served, attached, held_out)
    return Row(arm.label, arm.trained, arm.served, loss, ranked, equal, gap["calls"]["mean"], gap["decode"]["mean"])


def _of_references(out: Path, adapter: Path | None, held_out: Path) -> tuple[float, float]:
    """Return the loss per token of the reference answers, and the percentage of their tokens that rank first."""
    from ktc.inference.evaluate.data import read_items
    from ktc.inference.evaluate.likelihood import continuations, likelihoods
    from ktc.inference.generate.language_model import open_language_model
    from ktc.inference.generate.prompts import render

    opened = open_language_model(out, adapter=adapter)
    pairs: list[Any] = []
    for item in read_items(held_out):
        prompt = render(opened, item.asked, system="", raw=item.raw, place=item.place)
        pairs += continuations(opened.tokenizer, prompt, [item.reference])
    found = likelihoods(opened, pairs, 32)
    tokens = sum(each.tokens for each in found)
    return -sum(each.log for each in found) / tokens, 100 * sum(each.hits for each in found) / tokens


def _equal(out: Path, adapter: Path | None, held_out: Path) -> float:
    """Return the percentage of held-out answers that equal the reference."""
    said = out.parent / f"said-{out.name}.jsonl"
    attached = () if adapter is None else ("--adapter", adapter)
    ktc("eval", out, *attached, "--data", held_out, "--max-new-tokens", 48, "--batch-size", 32, "--output", said)
    answers = [json.loads(line) for line in said.read_text(encoding="utf-8").splitlines()]
    column = "prediction" if adapter is None else "tuned"
    return 100 * sum(answer[column] == answer["reference"] for answer in answers) / len(answers)


def _write_text(model: Path, held_out: Path) -> None:
    """Write the held-out conversations as one text, whose tokens are compared where they are trained and served."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rows = [json.loads(line)["messages"] for line in held_out.read_text(encoding="utf-8").splitlines()]
    text = "".join(tokenizer.apply_chat_template(row, tokenize=False) for row in rows)
    held_out.with_suffix(".txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
