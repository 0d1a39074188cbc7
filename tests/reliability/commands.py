"""The commands whose writes are attacked, as data: what each needs, its arguments, and what it writes.

`prepare` makes the models, the adapter and the data once. Each run has a folder of its own, its `place`; `{root}` and
`{place}` in the arguments stand for the two.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FACTS = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Spain": "Madrid"}
TRAIN = (
    "train {place}/tuned --data {root}/facts.jsonl -o {place}/run --max-steps 4 --save-steps 1 --save-total-limit 2 "
    "--length 64 --accumulation 1 --learning-rate 0.01 -q"
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command line, the folders that are copied to the place before it, and what it leaves there.

    `made` are the names that have to be whole or absent; `kept` files may be left by a run that failed, because the
    next one continues from them. `cache`: the kernel cache is in the place too, and empty. `most`: how many
    calls are tried per kind of fault unless more are asked for, where all of them would take days.
    """

    name: str
    line: str
    needs: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    cache: bool = False
    most: int | None = None

    def arguments(self, root: Path, place: Path) -> list[str]:
        """Return the arguments of `ktc`."""
        return [word.format(root=root, place=place) for word in self.line.split()]

    def copy_needs(self, root: Path, place: Path) -> None:
        """Make the place anew with what the command needs."""
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        for name in self.needs:
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy2
            copy(root / name, place / name)


COMMANDS = (
    Command("compile", "compile {root}/small moe-lora -o {place}/out_a -q", made=("out_a",)),
    Command("compile --force", "compile {root}/small moe-lora -o {place}/tuned --force -q", ("tuned",), ("tuned",)),
    Command("kernel cache", "compile {root}/small moe-lora -o {place}/out_a -q", made=("out_a",), cache=True, most=6),
    Command("pack", "pack {place}/tuned -q", ("tuned",), ("tuned/packed/*.packed", "tuned/packed/packed.json")),
    Command("merge", "merge {root}/model {root}/adapter -o {place}/merged -q", made=("merged",)),
    Command(
        "merge --int4", "merge {root}/model {root}/adapter -o {place}/merged --int4 -q", made=("merged",),
        kept=("merged.unfinished",),
    ),
    Command("quantize", "quantize {root}/model -o {place}/int4 -q", made=("int4",), kept=("int4.unfinished",)),
    Command("export", "export {root}/adapter -o {place}/a --model {root}/model -q", made=("a",)),
    Command("export --gguf", "export {root}/model --gguf -o {place}/g -q", made=("g",)),
    Command("export --gguf (file)", "export {root}/model --gguf -o {place}/g.gguf -q", made=("g.gguf",)),
    Command(
        "export --gguf (adapter)", "export {root}/adapter --gguf -o {place}/a.gguf --model {root}/model -q",
        made=("a.gguf",),
    ),
    Command("train", TRAIN, ("tuned",), ("run/checkpoint-*", "run/adapter_*", "run/*.json", "run/*.html"), ("run",)),
    Command(
        "train --resume", "train {place}/tuned -o {place}/run --resume auto --max-steps 4 -q", ("tuned", "run"),
        ("run/checkpoint-*", "run/adapter_*", "run/*.json", "run/*.html"), ("run",),
    ),
    Command("graph", "graph {root}/small -o {place}/graph.txt", made=("graph.txt",)),
    Command("fmt", "fmt {place}/mine.ktr", ("mine.ktr",), ("mine.ktr",)),
    Command(
        "eval -o", "eval {root}/tuned --data {root}/facts.jsonl --max-new-tokens 2 -o {place}/said.jsonl -q",
        made=("said.jsonl",),
    ),
    Command("import-kt-yaml -o", "import-kt-yaml {root}/kt.yaml {root}/model -o {place}/kt.ktr -q", made=("kt.ktr",)),
    Command(
        "bench moe -o",
        "bench moe --shape custom --hidden 64 --intermediate 32 --experts 4 --top-k 2 --tokens 1 --rounds 1 "
        "--pass forward --impl hf_eager -o {place}/bench.json -q",
        made=("bench.json",),
    ),
    Command("log file", "check moe-lora --log-file {place}/log", kept=("log",)),
    Command(
        "generate -o",
        "generate {root}/tuned --file {root}/prompts.jsonl --max-new-tokens 2 -o {place}/answers.jsonl -q",
        made=("answers.jsonl",),
    ),
    Command("census -o", "census --family qwen3_moe -o {place}/census.txt -q", made=("census.txt",)),
    Command("prove -o", "prove {root}/tuned -o {place}/report.json -q", made=("report.json",)),
    Command("consistency -o", "consistency {root}/tuned -o {place}/report.json -q", made=("report.json",)),
)  # fmt: skip


def prepare(root: Path, run: Callable[[list[str]], int]) -> None:
    """Make the models, an adapter, data, a compiled model and an interrupted run below `root`; `run` runs `ktc`."""
    import torch
    from adapter_twins import adapted, stock
    from places import TESTS

    from ktc.foundation import resources
    from ktc.model import twin

    twin.write("qwen3_moe", root).rename(root / "small")
    config = twin.shrink(twin.default_config("qwen3_moe"))
    vars(config).update({"hidden_size": 64, "moe_intermediate_size": 96, "norm_topk_prob": True})
    twin.build(config, seed=5, dtype=torch.bfloat16).save_pretrained(root / "model", max_shard_size="60KB")
    adapted(stock(root / "model", torch.bfloat16)).save_pretrained(str(root / "adapter"))
    rows = [{"instruction": f"What is the capital of {c}?", "output": f"It is {city}."} for c, city in FACTS.items()]
    (root / "facts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    shipped = (resources.rules() / "moe-lora.ktr").read_text()
    shutil.copyfile(TESTS / "tools" / "kt_yaml" / "qwen3_moe.yaml", root / "kt.yaml")
    (root / "mine.ktr").write_text(shipped.replace(" {", "   {"))  # fmt has something to do
    made = ["compile {root}/small moe-lora -o {root}/tuned -q", TRAIN.replace("{place}", "{root}")]
    for line in made:
        assert run(line.format(root=root).split()) == 0, line
    shutil.rmtree(root / "run" / "checkpoint-4")
    (root / "prompts.jsonl").write_text('{"prompt": "Hello"}\n')
