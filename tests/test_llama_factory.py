"""LLaMA-Factory, unpatched in its own environment, on compiled models: trains, resumes, predicts, refuses to export.

The environment is that of `make lf-environment`; every run is a process of it, started as a user would. The settings
are those of docs/llama_factory.md, shortened.
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

ROOT = Path(__file__).resolve().parent.parent
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
    """The settings that docs/llama_factory.md shows."""
    text = (ROOT / "docs" / "llama_factory.md").read_text(encoding="utf-8")
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
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "backwards": {"file_name": "backwards.json"},
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": columns},
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
from ktc import environment, twin
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


def test_two_processes_train_as_one_with_twice_the_batch(desk: Desk, qwen: str) -> None:
    halves = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    launch = ("torchrun", "--nproc-per-node", "2", "-m", "ktc", "lf", "train")
    two = desk.train("two", *launch, model_name_or_path=qwen, **halves)
    one = desk.train(
        "one", "ktc", "lf", "train", model_name_or_path=qwen, **{**halves, "gradient_accumulation_steps": 4}
    )
    assert losses(two) == pytest.approx(losses(one), rel=1e-2)


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
