"""The kinds of input that come from outside: a row each, with whole inputs and the function of ktc that reads them.

Readers are called below the commands, without capture, kernels and weights, so that a mutant costs a millisecond or
less. An original that is not accepted is an error of this file: `test_fuzz.py` holds that.
"""

from __future__ import annotations

import io
import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from places import RULES
from safetensors.torch import save

from fuzz import mutate
from fuzz.fuzzing import Kind, Original, Unsound
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation import resources
from ktc.foundation.regular_files import read_regular
from ktc.language import dsl

HERE = Path(__file__).parent
SAMPLES = HERE / "originals"


def _texts(folder: Path, name: str, *texts: str, by: mutate.Mutate = mutate.json_text) -> list[Original]:
    """Write the first of some texts and return all as originals of one file."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(texts[0], encoding="utf-8")
    return [Original(name, text.encode(), by) for text in texts]


def _bytes(folder: Path, name: str, *contents: bytes, by: mutate.Mutate = mutate.binary) -> list[Original]:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(contents[0])
    return [Original(name, content, by) for content in contents]


# Rules ---------------------------------------------------------------------------------------------------------------
def _rules(folder: Path) -> Sequence[Original]:
    (folder / "lib").mkdir(exist_ok=True)
    for library in (*(RULES / "pass" / "lib").iterdir(), *(RULES / "fail" / "lib").iterdir()):
        (folder / "lib" / library.name).write_text(library.read_text())
    bundled = [path.read_text() for path in sorted(resources.rules().rglob("*.ktr"))]
    tested = [path.read_text() for name in ("pass", "fail") for path in sorted((RULES / name).rglob("*.ktr"))]
    return _texts(folder, "mutant.ktr", *bundled, *tested, by=_rule_tokens)


_WORDS = (
    *("rule", "match", "at", "{", "}", "(", ")", "=>", "=", "==", "->", "..", "?", "|", ",", "$x", "_", "has", "not"),
    *("9" * 30, "1e999", "22GiB", "cuda:0", '"', "\\", "#", "\n", "\x00", "\u00e9", "m.a.b.c", "auto", "[1..]", "%"),
    *("-", "**", "{a,b}", "[3..60]", "*", "overrides", "except", "0", "in", "import", "pattern", "require", "param"),
)


def _rule_tokens(content: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    return mutate.tokens(content, chance, others, _WORDS)


def _read_rules(folder: Path) -> None:
    from ktc.language.dsl.parser import parse
    from ktc.language.dsl.printer import print_module

    try:
        ruleset = dsl.load(folder / "mutant.ktr")
    except InputRefused as refused:
        for diagnostic in refused.diagnostics:
            if diagnostic.code != "E011":  # no such file
                _check_span(refused, diagnostic)
        raise
    module = ruleset.units[0].module
    if parse(print_module(module), module.file) != module:
        raise Unsound("the printed program is another")


def _check_span(refused: InputRefused, diagnostic: Diagnostic) -> None:
    span = diagnostic.span
    if span is None:
        raise Unsound(f"`{diagnostic.message[:100]}` has no place")
    if span.file not in refused.sources:  # a file that cannot be shown, such as one that is not UTF-8
        return
    lines = refused.sources[span.file].split("\n")
    if not (1 <= span.line <= len(lines) and 1 <= span.column <= len(lines[span.line - 1]) + 1):
        raise Unsound(f"{span} is outside of its file")


# Checkpoints ---------------------------------------------------------------------------------------------------------
def _headers(folder: Path) -> Sequence[Original]:
    tensors = {"a": torch.zeros(2, 3), "b.weight": torch.zeros(4, dtype=torch.bfloat16), "c": torch.zeros(1, 2, 3, 1)}
    empty, named = save({"x": torch.zeros(0)}), save(tensors, {"format": "pt"})
    return _bytes(folder, "model.safetensors", named, save(tensors), empty, by=mutate.safetensors)


def _index(folder: Path) -> Sequence[Original]:
    (folder / "one.safetensors").write_bytes(save({"a": torch.zeros(2), "b": torch.zeros(3)}))
    (folder / "two.safetensors").write_bytes(save({"c": torch.zeros(2)}))
    named = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    content = json.dumps({"metadata": {"total_size": 28}, "weight_map": named})
    return _texts(folder, "model.safetensors.index.json", content)


def _read_checkpoint(folder: Path) -> None:
    from ktc.model.checkpoint.index import open_index
    from ktc.model.checkpoint.reader import TORCH_DTYPE, TensorReader

    index = open_index(folder)
    for entry in index.tensors.values():
        size = (index.folder / entry.file).stat().st_size
        if not 0 <= entry.begin <= entry.end <= size:
            raise Unsound(f"a tensor from {entry.begin} to {entry.end} of {size} bytes")
    with TensorReader(index.folder) as reader:
        for entry in index.tensors.values():
            if entry.dtype in TORCH_DTYPE and tuple(reader.read(entry).shape) != entry.shape:
                raise Unsound(f"a tensor of another shape than {entry.shape}")


def _gguf(folder: Path) -> Sequence[Original]:
    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def file(settings: Sequence[bytes], tensors: Sequence[bytes], data: int) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings)) + b"".join((*settings, *tensors))
        return head + bytes(-len(head) % 32) + bytes(data)

    kind = text(b"general.architecture") + struct.pack("<I", 8) + text(b"olmoe")
    many = (
        kind,
        text(b"olmoe.block_count") + struct.pack("<II", 4, 2),
        text(b"general.alignment") + struct.pack("<II", 4, 32),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"a") + text(b"bc"),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.5, 1.5),
        text(b"olmoe.flag") + struct.pack("<IB", 7, 1),
    )
    tensors = (
        text(b"token_embd.weight") + struct.pack("<I2QIQ", 2, 64, 3, 8, 0),
        text(b"output_norm.weight") + struct.pack("<IQIQ", 1, 32, 0, 224),
    )
    alone = text(b"a") + struct.pack("<IQIQ", 1, 32, 0, 0)
    return _bytes(folder, "model.gguf", file(many, tensors, 224 + 128), file((kind,), (alone,), 128))


def _read_gguf(folder: Path) -> None:
    from ktc.model.checkpoint.index import open_index

    index = open_index(folder)
    for entry in index.tensors.values():
        if not 0 <= entry.begin <= entry.end <= (folder / entry.file).stat().st_size:
            raise Unsound(f"a tensor from {entry.begin} to {entry.end}")


def _quantisation_configs() -> Iterator[dict[str, Any]]:
    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {"targets": ["Linear"], "weights": int4, "input_activations": None}
    yield {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
        "quantization_status": "compressed",
    }
    yield {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    yield {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    yield {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def _quantisation(folder: Path) -> Sequence[Original]:
    return _texts(
        folder, "config.json", *(json.dumps({"quantization_config": each}) for each in _quantisation_configs())
    )


def _read_quantisation(folder: Path) -> None:
    from ktc.foundation.decode import read_json
    from ktc.model.checkpoint.quantisation_config import read_config

    try:
        config: Any = read_json((folder / "config.json").read_bytes())
    except ValueError:
        return  # capture refuses it before this reader
    if isinstance(config, dict):
        found, problems = read_config(config.get("quantization_config"))
        if problems:
            raise InputRefused(*problems)
        found.group_of("model.layers.0.self_attn.q_proj")


def _configs(folder: Path) -> Sequence[Original]:
    found = [
        path for path in sorted((HERE.parent / "configs").rglob("config.json")) if "auto_map" not in path.read_text()
    ]
    return _texts(folder, "config.json", *(path.read_text() for path in found))


def _read_config(folder: Path) -> None:
    from ktc.stages.capture.source import open_model

    open_model(folder)


def _generation(folder: Path) -> Sequence[Original]:
    settings = {"bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    return _texts(folder, "generation_config.json", json.dumps(settings), json.dumps({"max_new_tokens": 8}))


def _read_generation(folder: Path) -> None:
    from ktc.model.hf.generation_config import read_generation_config

    read_generation_config(folder)


def _tokenizers(folder: Path) -> Sequence[Original]:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    made: Any = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<s>": 3}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken("<s>", special=True)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "model_max_length": 64}
    template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    return [
        *_texts(folder, "tokenizer.json", made.to_str()),
        *_texts(folder, "tokenizer_config.json", json.dumps({**settings, "chat_template": template})),
        *_texts(folder, "special_tokens_map.json", json.dumps({"bos_token": "<s>"})),
    ]


def _read_tokenizer(folder: Path) -> None:
    from ktc.model.hf.tokenizer import read_tokenizer

    read_tokenizer(folder, "G702")


# Compiled models -----------------------------------------------------------------------------------------------------
def _manifests(folder: Path) -> Sequence[Original]:
    from ktc.model.manifest.manifest import SCHEMA

    content = json.loads((SAMPLES / "ktc.json").read_text())
    return _texts(folder, "ktc.json", json.dumps({**content, "schema": SCHEMA}))


def _read_manifest(folder: Path) -> None:
    from ktc.foundation.decode import decode
    from ktc.model.manifest.manifest import Manifest, check_sealed, read_manifest

    manifest = read_manifest(folder)
    if decode(json.loads(manifest.to_json()), Manifest) != manifest:
        raise Unsound("the manifest is another when it is written again")
    manifest.renewal(folder)
    try:
        check_sealed(manifest, folder)
    except InputRefused as refused:
        if {each.code for each in refused.diagnostics} != {"L404"}:
            raise Unsound(str(refused)) from refused


def _weights(folder: Path) -> Sequence[Original]:
    return _texts(folder, "weights.json", (SAMPLES / "weights.json").read_text())


def _read_weights(folder: Path) -> None:
    from ktc.model.checkpoint.source import read_sources

    _refusing("weights.json", lambda: read_sources(read_regular(folder / "weights.json")))


def _refusing(file: str, read: Callable[[], object]) -> None:
    """Read as a caller does that refuses a `ValueError` with its file."""
    try:
        read()
    except (ValueError, OSError) as error:
        raise InputRefused(Diagnostic("L402", f"`{file}` is damaged: {error}")) from error


def _lora(folder: Path) -> Sequence[Original]:
    return _texts(folder, "lora.json", (SAMPLES / "lora.json").read_text())


def _read_lora(folder: Path) -> None:
    from ktc.model.loading.peft_glue import read_lora_config

    read_lora_config(folder)


def _packed(folder: Path) -> Sequence[Original]:
    from ktc.model.packed_store import packed_file, packed_store

    origin = packed_file.Origin("k" * 64, "t" * 64, "c" * 64)
    header = packed_file.Header(packed_file.SCHEMA, "model.layers.0.mlp.experts", "FusedMoe", 4, 4096, origin, "d" * 64)
    place = folder / packed_store.FOLDER
    place.mkdir(exist_ok=True)
    path = packed_store.FOLDER + "/" + packed_store.file_name(header.fqn)
    data = memoryview(bytearray(4096))
    packed_file.write(folder / path, lambda _: header, data, lambda _: None)
    whole = (folder / path).read_bytes()
    packed_store.write_index(folder, packed_store.make_index([header], "c" * 64))
    index = (place / packed_store.INDEX).read_bytes()
    return [
        Original(path, whole[: 12 + int.from_bytes(whole[8:12], "little") + 32], mutate.packed_file),
        Original(f"{packed_store.FOLDER}/{packed_store.INDEX}", index, _sealed),
    ]


def _sealed(content: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
    """Mutate `packed.json`, half of the time under a correct seal where there can be one."""
    from ktc.foundation.decode import Undecodable, decode
    from ktc.model.packed_store.packed_store import PackedIndex

    mutant = mutate.json_text(content, chance, others)
    if chance.randrange(2):
        try:
            return json.dumps(asdict(decode(json.loads(mutant), PackedIndex).sealed())).encode()
        except (Undecodable, ValueError, RecursionError):
            pass
    return mutant


def _read_packed(folder: Path) -> None:
    from ktc.model.packed_store import packed_file, packed_store

    index = packed_store.read_index(folder)
    for path in (folder / packed_store.FOLDER).glob(f"*{packed_store.SUFFIX}"):
        with path.open("r+b") as file:
            file.truncate(packed_file.DATA + 4096)
        try:
            packed_file.read_header(path)
        except packed_file.Damaged as damaged:
            raise InputRefused(packed_store.damaged(folder, path, str(damaged))) from damaged
    for entry in index.layers:
        packed_store.file_name(entry.fqn)


# Adapters and runs ---------------------------------------------------------------------------------------------------
def _adapters(folder: Path) -> Sequence[Original]:
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "models/qwen3_moe", "rank_pattern": {}, "alpha_pattern": {}, "bias": "none",
        "use_rslora": False, "modules_to_save": None, "layers_to_transform": None, "task_type": "CAUSAL_LM",
        "init_lora_weights": True, "target_parameters": None, "exclude_modules": None,
    }  # fmt: skip
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {f"{layer}.lora_A.weight": torch.zeros(2, 8), f"{layer}.lora_B.weight": torch.zeros(6, 2)}
    return [
        *_texts(folder, "adapter_config.json", json.dumps(config)),
        *_bytes(folder, "adapter_model.safetensors", save(factors), by=mutate.safetensors),
        *_texts(folder, "adapter_ktc.json", json.dumps({"experts": ["bf16"]})),
    ]


def _read_adapter(folder: Path) -> None:
    from peft import PeftConfig

    from ktc.adapters.adapter import read_adapter, require_base
    from ktc.model.loading.trained_beside import find_difference

    adapter = read_adapter(folder)
    require_base(adapter, adapter.base)
    if not (0 < adapter.r < 1 << 20 and math.isfinite(adapter.lora_alpha)):
        raise Unsound(f"r = {adapter.r}, lora_alpha = {adapter.lora_alpha}")
    find_difference(folder, torch.nn.Linear(1, 1))
    PeftConfig.from_pretrained(str(folder))


def _runs(folder: Path) -> Sequence[Original]:
    from transformers import TrainerState

    _adapters(folder)
    (folder / "adapter_ktc.json").unlink()
    trained = [torch.nn.Parameter(torch.zeros(2, 8)), torch.nn.Parameter(torch.zeros(6, 2))]
    optimizer = torch.optim.AdamW([{"params": trained}, {"params": []}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    state = TrainerState(global_step=1, max_steps=3, epoch=0.5, log_history=[{"loss": 1.0, "step": 1, "epoch": 0.5}])
    state.save_to_json(str(folder / "trainer_state.json"))
    generators = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    saved = {
        "optimizer.pt": optimizer.state_dict(),
        "scheduler.pt": scheduler.state_dict(),
        "rng_state.pth": generators,
    }
    files = [
        original
        for name, value in saved.items()
        for original in _bytes(folder, name, _torch_bytes(value), by=mutate.torch_file)
    ]
    # The other files are read in less time and have more to mutate: they come more often.
    state_text = (folder / "trainer_state.json").read_text()
    return [*files, *_texts(folder, "trainer_state.json", *(state_text,) * 4)]


def _torch_bytes(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _read_run(folder: Path) -> None:
    from ktc.training.trainers import checkpoint_state
    from ktc.training.tune import run_folder

    if faults := run_folder.checkpoint_faults(folder):
        raise InputRefused(*(Diagnostic("T524", fault) for fault in faults))
    parameters = [torch.nn.Parameter(torch.zeros(2, 8)), torch.nn.Parameter(torch.zeros(6, 2))]
    optimizer = torch.optim.AdamW([{"params": parameters}, {"params": []}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    if fault := checkpoint_state.optimizer_fault(folder, optimizer):
        raise InputRefused(Diagnostic("T524", fault))
    # What the Trainer does with it.
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True))
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()


# Data and settings ---------------------------------------------------------------------------------------------------
_TURNS = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
_ROWS: tuple[list[dict[str, Any]], ...] = (
    [{"instruction": "Say.", "input": "", "output": "Said.", "history": [["a", "b"]]}] * 2,
    [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}],
    [{"messages": [{"role": "system", "content": "s"}, *_TURNS]}],
    [{"prompt": "a", "completion": "b"}],
    [{"prompt": _TURNS[:1], "completion": [{**_TURNS[1], "weight": 1}], "tools": '[{"name": "f"}]'}],
    [{"messages": [*_TURNS[:1], {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "tools": []}],
    [{"text": "plain"}],
)


def _data(folder: Path) -> Sequence[Original]:
    lines = ["\n".join(map(json.dumps, rows)) for rows in _ROWS]
    return [
        *_texts(folder, "data.jsonl", *lines, by=mutate.rows),
        *_texts(folder, "data.json", *(json.dumps(rows) for rows in _ROWS)),
        *_texts(folder, "data.csv", 'prompt,completion\na,"b, c"\n', by=mutate.text),
        *_texts(folder, "data.txt", "one\n\ntwo\nlines\n", by=mutate.text),
    ]


def _read_data(folder: Path) -> None:
    from ktc.training.tune.examples import read_training_data

    for path in sorted(folder.glob("data.*")):
        for example in read_training_data(path).examples:
            "".join(turn.content for turn in example.turns).encode()
            if not any(turn.is_answer for turn in example.turns) or example.line < 1:
                raise Unsound(f"{example}")


def _questions(folder: Path) -> Sequence[Original]:
    rows = [
        {"question": "Which?", "options": ["a", "b", "c"], "answer": "B"},
        {"question": "How many?", "options": {"A": "1", "B": "2"}, "answer": 0},
    ]
    asked = [{"prompt": "a", "id": "x"}, {"messages": _TURNS[:1]}]
    return [
        *_texts(folder, "questions.jsonl", *(json.dumps(row) for row in rows), by=mutate.rows),
        *_texts(folder, "prompts.jsonl", *(json.dumps(row) for row in asked), by=mutate.rows),
    ]


def _read_questions(folder: Path) -> None:
    from ktc.inference.evaluate.data import read_questions
    from ktc.inference.generate.prompts import read_rows

    for question in read_questions(folder / "questions.jsonl"):
        if question.answer not in question.letters:
            raise Unsound(f"{question}")
    read_rows(folder / "prompts.jsonl")


def _settings(folder: Path) -> Sequence[Original]:
    from ktc.training.tune.settings import TrainSettings

    held = TrainSettings(data=("a.jsonl", "b:2"), rank=8, targets=("q_proj",), eval_split=0.1).to_yaml()
    few = "data: a.jsonl\nlearning_rate: 1e-4\ntargets: [q_proj, v_proj]\nstack: on\n"
    return _texts(folder, "train.yaml", held, few, by=mutate.text)


def _read_settings(folder: Path) -> None:
    from ktc.training.tune.settings import read_settings

    found = read_settings(folder / "train.yaml", {})
    (folder / "again.yaml").write_text(found.to_yaml(), encoding="utf-8")
    if read_settings(folder / "again.yaml", {}) != found:
        raise Unsound("the settings are others when they are written again")


def _hosts(folder: Path) -> Sequence[Original]:
    text = 'isa = "avx2"\ncores = 8\nnuma = 2\nmemory = "64GiB"\n[[gpu]]\nmemory = "24GiB"\n'
    return _texts(folder, "host.toml", text, by=mutate.text)


def _read_host(folder: Path) -> None:
    from ktc.foundation.host_file import read_host_file

    read_host_file(folder / "host.toml")


def _records(folder: Path) -> Sequence[Original]:
    """The small records that ktc writes and reads again: of conversions, graphs and comparisons."""
    made = {
        "kind": "merge", "model": "m", "adapter": "a", "settings": {"x": "y"}, "files": {"model.safetensors": "0"},
        "others": ["config.json"],
    }  # fmt: skip
    node = {
        "name": "x", "op": "input", "target": "x", "inputs": [], "attributes": [["a", "b"]], "shape": [1, "s"],
        "dtype": "bf16", "device": "cpu", "fqn": "", "rule": "", "span": "",
    }  # fmt: skip
    block = {"key": "mlp_0", "class_name": "Mlp", "sites": ["a"], "layers": [0], "nodes": [node], "notes": []}
    module = {"fqn": "a", "class_name": "Mlp", "parameters": 1, "bytes": 2, "device": "", "rule": ""}
    graph = {
        "schema": 1, "stage": "captured", "model_type": "m", "dtype": "bf16", "modules": [module], "blocks": [block],
        "matches": [{"rule": "r", "pattern": "p", "site": "a", "captures": [["a", "x"]]}], "near_misses": ["x"],
    }  # fmt: skip
    return [
        *_texts(folder, "ktc_conversion.json", json.dumps(made)),
        *_texts(folder, "graph.json", json.dumps(graph)),
    ]


def _read_records(folder: Path) -> None:
    from ktc.adapters.conversion import read_record
    from ktc.stages.pictures.dump import from_json, read_dump, to_json

    read_record(folder)
    dump = read_dump(folder / "graph.json")
    if from_json(to_json(dump)) != dump:
        raise Unsound("the graph is another when it is written again")


def _kt_yaml(folder: Path) -> Sequence[Original]:
    rules = [
        {
            "match": {"name": "^model\\.layers\\.\\d+\\.mlp\\.experts$"},
            "replace": {
                "class": "ktransformers.operators.experts.KTransformersExperts",
                "kwargs": {"generate_device": "cpu", "prefill_op": "KExpertsTorch", "out_device": "cuda"},
            },
            "recursive": False,
        },
        {"match": {"class": "torch.nn.Linear"}, "replace": {"class": "default", "kwargs": {"generate_device": "cuda"}}},
    ]
    return _texts(folder, "optimize.yaml", yaml.safe_dump(rules), by=mutate.text)


def _read_kt_yaml(folder: Path) -> None:
    from ktc.foundation.text_files import read_text
    from ktc.tools.kt_yaml import document

    text = read_text(folder / "optimize.yaml", unreadable="K001", not_utf8="K001", most_bytes=document.MAX_BYTES)
    document.parse(text, "optimize.yaml")


KINDS: tuple[Kind, ...] = (
    Kind("rules", _rules, _read_rules),
    Kind("headers", _headers, _read_checkpoint),
    Kind("indices", _index, _read_checkpoint),
    Kind("gguf", _gguf, _read_gguf),
    Kind("configs", _configs, _read_config),
    Kind("quantisation", _quantisation, _read_quantisation),
    Kind("generation", _generation, _read_generation),
    Kind("tokenizers", _tokenizers, _read_tokenizer),
    Kind("manifests", _manifests, _read_manifest),
    Kind("weights", _weights, _read_weights),
    Kind("lora", _lora, _read_lora),
    Kind("packed", _packed, _read_packed),
    Kind("adapters", _adapters, _read_adapter),
    Kind("runs", _runs, _read_run),
    Kind("data", _data, _read_data),
    Kind("questions", _questions, _read_questions),
    Kind("settings", _settings, _read_settings),
    Kind("hosts", _hosts, _read_host),
    Kind("records", _records, _read_records),
    Kind("kt-yaml", _kt_yaml, _read_kt_yaml),
)
