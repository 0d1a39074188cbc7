"""LLaMA-Factory, unpatched in its own environment, on compiled models: trains, resumes, predicts, refuses to export.

The environment is that of `make lf-environment`; every run is a process of it, started as a user would. The settings
are those of docs/details/llama-factory.md, shortened.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import ROOT

ENVIRONMENT = ROOT / "build" / "llama-factory"
BUILT = ENVIRONMENT / "made-with"
CONSTRAINTS = ROOT / "constraints-lf.txt"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not BUILT.is_file() or BUILT.read_bytes() != CONSTRAINTS.read_bytes(),
        reason="`make lf-environment` has not built build/llama-factory with the present constraints-lf.txt",
    ),
]

SHORT = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "lora_dropout": 0.0, "preprocessing_num_workers": 1}
# A DeepSeek-V2 whose experts are in no groups, like V2-Lite's: transformers 5.6 cannot run the groups.
UNGROUPED = {"topk_method": "greedy", "n_group": None, "topk_group": None}


@dataclass(frozen=True)
class Desk:
    """A folder with a data set, checkpoints and their compiled forms, in which LLaMA-Factory runs."""

    folder: Path

    def call(self, *words: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment."""
        path = f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
        command = [str(ENVIRONMENT / "bin" / words[0]), *words[1:]]
        return subprocess.run(
            command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=1200, check=False
        )

    def train(self, out: str, *program: str, environment: Mapping[str, str] | None = None, **settings: Any) -> Path:
        """A run with the settings of the docs, these before them, less those that are `...`; its output folder."""
        file = self.folder / f"{out}.yaml"
        chosen = {**documented(), **SHORT, "dataset_dir": "data", "dataset": "backwards", "output_dir": out, **settings}
        file.write_text(yaml.safe_dump({k: v for k, v in chosen.items() if v is not ...}), encoding="utf-8")
        done = self.call(*(program or ("llamafactory-cli", "train")), file.name, environment=environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        return self.folder / out

    def compile(self, model: str, rules: str, out: str) -> str:
        done = self.call("ktc", "compile", model, rules, "-o", out)
        assert done.returncode == 0, done.stderr
        return out


def documented() -> dict[str, Any]:
    """The settings that docs/details/llama-factory.md shows."""
    text = (ROOT / "docs" / "details" / "llama-factory.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return yaml.safe_load(found[1])


def losses(out: Path) -> list[float]:
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def original(desk: Desk, compiled: str) -> str:
    return json.loads((desk.folder / compiled / "ktc.json").read_text(encoding="utf-8"))["model"]["name"]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("llama_factory")
    (folder / "data").mkdir()
    words = ["red", "blue", "green", "small", "large", "old", "new", "bright", "dark", "cold"]
    dice = random.Random(0)
    picks = [dice.sample(words, 3) for _ in range(64)]
    rows = [
        {"instruction": f"Say backwards: {' '.join(p)}", "input": "", "output": " ".join(reversed(p))} for p in picks
    ]
    (folder / "data" / "backwards.json").write_text(json.dumps(rows), encoding="utf-8")
    pairs = [{"instruction": row["instruction"], "chosen": row["output"], "rejected": "no"} for row in rows]
    (folder / "data" / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    plain = [{"text": f"{row['instruction']}. That is {row['output']}."} for row in rows]
    (folder / "data" / "plain.json").write_text(json.dumps(plain), encoding="utf-8")
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "backwards": {"file_name": "backwards.json"},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns},
        "plain": {"file_name": "plain.json", "columns": {"prompt": "text"}},
    }
    (folder / "data" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    return Desk(folder)


@pytest.fixture(scope="module")
def qwen(desk: Desk) -> str:
    return desk.compile("tiny:qwen3_moe", "moe-lora", "qwen3_moe_ktc")


@pytest.fixture(scope="module")
def trained(desk: Desk, qwen: str) -> Path:
    """The compiled model, trained by `llamafactory-cli`."""
    return desk.train("trained", model_name_or_path=qwen)


@pytest.fixture(scope="module")
def deepseek(desk: Desk) -> str:
    made = desk.call("python", "-c", _WRITE_DEEPSEEK, "deepseek", json.dumps(UNGROUPED))
    assert made.returncode == 0, made.stderr
    return desk.compile(str(desk.folder / "deepseek"), "moe-lora", "deepseek_ktc")


_WRITE_DEEPSEEK = """
import json, pathlib, shutil, sys
from ktc.foundation import environment
from ktc.model import twin
folder, changes = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
shutil.copytree(twin.write("deepseek_v2", environment.cache_dir() / "models"), folder)
config = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps({**config, **changes}))
"""


def test_llama_factory_trains_the_compiled_model_as_the_stock_one(desk: Desk, qwen: str, trained: Path) -> None:
    stock = desk.train("stock", model_name_or_path=original(desk, qwen))
    assert losses(trained) == pytest.approx(losses(stock), rel=1e-2)  # both in bf16
    adapter = json.loads((trained / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["base_model_name_or_path"] == original(desk, qwen)
    assert set(adapter["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_llama_factory_trains_deepseek_as_the_stock_one(desk: Desk, deepseek: str) -> None:
    targets = {"lora_target": "q_proj,kv_b_proj,o_proj"}
    compiled = desk.train("deepseek_trained", model_name_or_path=deepseek, **targets)
    stock = desk.train("deepseek_stock", model_name_or_path=original(desk, deepseek), **targets)
    assert losses(compiled) == pytest.approx(losses(stock), rel=1e-2)


def test_a_resumed_run_ends_bit_equal(desk: Desk, qwen: str, trained: Path) -> None:
    checkpoint = str(trained / "checkpoint-2")
    resumed = desk.train("resumed", model_name_or_path=qwen, resume_from_checkpoint=checkpoint)
    assert losses(resumed) == losses(trained)
    weights = "adapter_model.safetensors"
    assert (resumed / weights).read_bytes() == (trained / weights).read_bytes()


PREDICT = {
    "do_train": False, "do_predict": True, "predict_with_generate": True, "dataset": None, "eval_dataset": "backwards",
    "max_samples": 4, "max_new_tokens": 8,
}  # fmt: skip


def test_llama_factory_predicts_with_metrics(desk: Desk, qwen: str, trained: Path) -> None:
    out = desk.train("predicted", model_name_or_path=qwen, adapter_name_or_path=str(trained), **PREDICT)
    found = json.loads((out / "predict_results.json").read_text(encoding="utf-8"))
    assert {"predict_bleu-4", "predict_rouge-1", "predict_rouge-2", "predict_rouge-l"} <= found.keys()
    assert len((out / "generated_predictions.jsonl").read_text(encoding="utf-8").splitlines()) == 4


def test_export_of_a_compiled_model_fails_and_writes_no_weights(desk: Desk, qwen: str, trained: Path) -> None:
    settings = {
        "model_name_or_path": qwen, "adapter_name_or_path": str(trained), "template": "default",
        "trust_remote_code": True, "export_dir": "exported",
    }  # fmt: skip
    (desk.folder / "export.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    done = desk.call("llamafactory-cli", "export", "export.yaml")
    assert done.returncode == 1
    assert "L423" in done.stderr
    assert not list((desk.folder / "exported").glob("*.safetensors"))


# `ktc lf`


def test_ktc_lf_trains_as_llama_factory_does_and_reports(desk: Desk, qwen: str, trained: Path) -> None:
    out = desk.train("kt", "ktc", "lf", "train", model_name_or_path=qwen)
    assert losses(out) == pytest.approx(losses(trained), rel=1e-2)  # stacked micro-batches round otherwise in bf16
    report = json.loads((out / "ktc_report.json").read_text(encoding="utf-8"))
    assert (report["steps"], report["finished"]) == (4, True)


def test_ktc_lf_trains_the_experts_that_the_rules_adapt_and_predicts_with_them(desk: Desk) -> None:
    model = desk.compile("tiny:qwen3_moe", "moe-experts-lora", "experts_ktc")
    rules = {"lora_target": "rules", "lora_rank": ..., "lora_alpha": ..., "lora_dropout": ...}
    out = desk.train("experts", "ktc", "lf", "train", model_name_or_path=model, **rules)
    adapter = json.loads((out / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["target_parameters"]
    assert adapter["base_model_name_or_path"] == original(desk, model)
    start = {"adapter_name_or_path": str(out), **PREDICT, **rules}
    predicted = desk.train("experts_predicted", "ktc", "lf", "train", model_name_or_path=model, **start)
    assert (predicted / "predict_results.json").is_file()


def test_ktc_lf_trains_pairs(desk: Desk, qwen: str) -> None:
    settings = {"stage": "dpo", "dataset": "pairs", "pref_loss": "sigmoid"}
    out = desk.train("pairs", "ktc", "lf", "train", model_name_or_path=qwen, **settings)
    assert losses(out)[0] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference yet


def test_plain_text_is_learned_as_by_the_stock_model(desk: Desk, qwen: str) -> None:
    settings = {"stage": "pt", "dataset": "plain", "cutoff_len": 64, "gradient_accumulation_steps": 1}
    stock = desk.train("plain_stock", model_name_or_path=original(desk, qwen), **settings)
    plain = desk.train("plain", model_name_or_path=qwen, **settings)
    kt = desk.train("plain_kt", "ktc", "lf", "train", model_name_or_path=qwen, **settings)
    assert losses(plain) == pytest.approx(losses(stock), rel=1e-2)  # both in bf16
    weights = "adapter_model.safetensors"
    assert (kt / weights).read_bytes() == (plain / weights).read_bytes()


# Several processes

HALVES = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
FORCED = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
# Python runs it as it starts: each process of a torchrun leaves its adapter in the output, where only rank 0 writes.
_LEAVE_ADAPTERS = """
import os
if "RANK" in os.environ:
    from safetensors.torch import save_file
    from transformers import Trainer
    stock = Trainer.train
    def train(self, *args, **kwargs):
        done = stock(self, *args, **kwargs)
        trained = {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}
        save_file(trained, os.path.join(self.args.output_dir, f"rank-{os.environ['RANK']}.safetensors"))
        return done
    Trainer.train = train
"""


@pytest.fixture(scope="module")
def one(desk: Desk, qwen: str) -> Path:
    """One process that takes as many micro-batches as two."""
    settings = {**HALVES, "gradient_accumulation_steps": 4}
    return desk.train("one", "ktc", "lf", "train", model_name_or_path=qwen, **settings)


@pytest.mark.parametrize(
    "program",
    [("llamafactory-cli", "train"), ("torchrun", "--nproc-per-node", "2", "-m", "ktc", "lf", "train")],
    ids=["llamafactory-cli", "ktc-lf"],
)
def test_two_processes_train_as_one_and_end_equal(desk: Desk, qwen: str, one: Path, program: tuple[str, ...]) -> None:
    (desk.folder / "start").mkdir(exist_ok=True)
    (desk.folder / "start" / "sitecustomize.py").write_text(_LEAVE_ADAPTERS, encoding="utf-8")
    environment = {**FORCED, "PYTHONPATH": str(desk.folder / "start")}
    two = desk.train(f"two_{program[0]}", *program, environment=environment, model_name_or_path=qwen, **HALVES)
    assert losses(two) == pytest.approx(losses(one), rel=1e-2)
    assert (two / "rank-0.safetensors").read_bytes() == (two / "rank-1.safetensors").read_bytes()


def test_ktc_lf_starts_no_processes_and_says_who_does(desk: Desk, qwen: str) -> None:
    file = desk.folder / "forced.yaml"
    file.write_text(yaml.safe_dump({**documented(), "model_name_or_path": qwen}), encoding="utf-8")
    done = desk.call("ktc", "lf", "train", file.name, environment=FORCED)
    assert done.returncode == 2
    assert "F913" in done.stderr
    assert "torchrun --nproc-per-node 2 -m ktc lf train" in done.stderr


def test_what_llama_factory_refuses_is_said_in_its_words(desk: Desk, qwen: str) -> None:
    file = desk.folder / "no_data.yaml"
    file.write_text(
        yaml.safe_dump({**documented(), "model_name_or_path": qwen, "dataset_dir": "data"}), encoding="utf-8"
    )
    done = desk.call("ktc", "lf", "train", file.name, "--json")
    assert done.returncode == 2
    (told,) = json.loads(done.stdout)["diagnostics"]
    assert told["code"] == "F920"
    assert "alpaca_en_demo" in told["message"]


LOSSES = """
import json
from importlib import import_module
from types import SimpleNamespace

from ktc.tools.llama_factory.run import passes_loss_on


def known(module, name, **kinds):
    stock = getattr(import_module(f"llamafactory.train.{module}.trainer"), name)
    trainer = stock.__new__(stock)
    trainer.finetuning_args = SimpleNamespace(**{"use_asft_loss": False, **kinds})
    changed = type("Changed", (stock,), {"compute_loss": lambda *_, **__: None})
    other = changed.__new__(changed)
    other.finetuning_args = trainer.finetuning_args
    return passes_loss_on(stock, trainer), passes_loss_on(stock, other)


print(json.dumps({
    "sft": known("sft", "CustomSeq2SeqTrainer"),
    "asft": known("sft", "CustomSeq2SeqTrainer", use_asft_loss=True),
    "pt": known("pt", "CustomTrainer"),
    "dpo": known("dpo", "CustomDPOTrainer"),
}))
"""


def test_its_own_trainers_have_the_stock_loss_where_they_only_call_it(desk: Desk) -> None:
    done = desk.call("python", "-c", LOSSES)
    assert done.returncode == 0, done.stderr[-3000:]
    known = json.loads(done.stdout.splitlines()[-1])
    assert known == {"sft": [True, False], "asft": [False, False], "pt": [True, False], "dpo": [False, False]}
