"""GGUF checkpoints: the model that is loaded is the one whose weights the file holds, in every way it can be stored."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf_twins
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from plain_experts import PLAIN_EXPERTS
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ktc.diagnostics import HostLacks, InputRefused
from ktc.foundation.formats import BLOCKS
from ktc.model.checkpoint import BLOCK_TYPES, gguf_values, open_index, read_sources, values, write_sources
from ktc.model.checkpoint.reader import TensorReader
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.weights import ExpertsWeights
from ktc.model.kernels.form import ExpertPart, parse_form
from ktc.model.loading.load import load
from ktc.model.loading.realise import realise
from ktc.model.manifest.manifest import Rewrite
from ktc.model.packed_store import weight_store
from ktc.stages.capture.forms import form_of
from ktc.stages.capture.weights import map_weights
from ktc.stages.link import Package, link

pytestmark = pytest.mark.usefixtures("one_thread")

STORED = [
    ("qwen3_moe", Type.F16, Type.Q8_0),
    ("qwen2_moe", Type.BF16, Type.BF16),
    ("olmoe", Type.Q8_0, Type.Q4_0),
    ("gpt_oss", Type.MXFP4, Type.BF16),
    ("mixtral", Type.Q4_0, Type.Q8_0),
    ("deepseek_v2", Type.Q5_1, Type.F16),
    ("deepseek_v3", Type.Q8_0, Type.Q8_0),
]


def recipe(model: PreTrainedModel) -> tuple[Rewrite, ...]:
    """Every stack of experts as one module of ours."""
    steps: list[Rewrite] = []
    for fqn, module in model.named_modules():
        if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts"):
            form = parse_form(form_of(module))
            experts, *sizes = module.down_proj.shape
            inner, hidden = sizes if form.transposed else reversed(sizes)
            args = {
                "num_experts": experts, "hidden": hidden, "intermediate": inner, "form": str(form), "threads": 1,
                "top_k": model.config.num_experts_per_tok, "activations": "keep", "numa": "shard",
                **PLAIN_EXPERTS,
            }  # fmt: skip
            steps.append(Rewrite(fqn, "fused_moe", None, "cpu", args, "experts", "moe-lora.ktr:5:3"))
    assert steps
    return tuple(steps)


def package(hand_made: ModuleType, folder: Path, *, rewritten: bool) -> Package:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    made: Package = hand_made.package(folder)
    rows = read_sources(write_sources(made.weights))
    assert rows == made.weights
    return replace(made, rewrites=recipe(model) if rewritten else ())


def assert_same(loaded: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Every weight equal to the last bit, and so what is computed but for the order of sums."""
    found = loaded.state_dict()
    for name, tensor in expected.state_dict().items():
        parent, _, leaf = name.rpartition(".")
        module = loaded.get_submodule(parent)
        held = getattr(module, leaf) if isinstance(module, FusedMoe) else found[name]
        assert torch.equal(held, tensor), name
    ids = torch.arange(4, 40).reshape(2, 18)
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=ids).logits, expected(input_ids=ids).logits, atol=1e-5)


@pytest.mark.parametrize("rewritten", [True, False])
@pytest.mark.parametrize(("family", "experts", "rest"), STORED)
def test_the_reference_is_the_model_of_the_dequantised_tensors(
    hand_made: ModuleType, tmp_path: Path, family: str, experts: Type, rest: Type, rewritten: bool
) -> None:
    written = gguf_twins.write(family, tmp_path / "model", experts=experts, rest=rest)
    out = link(package(hand_made, written.folder, rewritten=rewritten), tmp_path / "twin")
    loaded = load(out, reference=True)
    assert any(isinstance(module, FusedMoe) for module in loaded.modules()) == rewritten
    assert_same(loaded, written.model)


def test_shards_are_one_file(hand_made: ModuleType, tmp_path: Path) -> None:
    written = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=Type.Q4_0, shards=3)
    assert len(list(written.folder.glob("model-0000?-of-00003.gguf"))) == 3
    out = link(package(hand_made, written.folder, rewritten=True), tmp_path / "twin")
    assert_same(load(out, reference=True), written.model)


def test_the_latent_projection_may_be_in_two(hand_made: ModuleType, tmp_path: Path) -> None:
    written = gguf_twins.write("deepseek_v3", tmp_path / "model", rest=Type.BF16, split_latent=True)
    assert "blk.0.attn_k_b.weight" in open_index(written.folder).tensors
    out = link(package(hand_made, written.folder, rewritten=True), tmp_path / "twin")
    assert_same(load(out, reference=True), written.model)


@pytest.mark.parametrize("kind", [Type.Q2_K, Type.Q4_K, Type.Q6_K])
def test_long_blocks_are_read(hand_made: ModuleType, tmp_path: Path, kind: Type) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
    written = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=kind, num_hidden_layers=1, **sizes)
    index = open_index(written.folder)
    assert index.tensors["blk.0.ffn_down_exps.weight"].dtype == kind.name.lower()
    out = link(package(hand_made, written.folder, rewritten=True), tmp_path / "twin")
    assert_same(load(out, reference=True), written.model)


def test_in_bf16_weights_are_rounded_once(hand_made: ModuleType, tmp_path: Path) -> None:
    written = gguf_twins.write("qwen3_moe", tmp_path / "model", experts=Type.Q8_0, rest=Type.Q8_0)
    out = link(package(hand_made, written.folder, rewritten=False), tmp_path / "twin")
    loaded = load(out).state_dict()
    for name, tensor in written.model.state_dict().items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name


# What does not fit


def meta(folder: Path) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def problems(model: PreTrainedModel, folder: Path) -> str:
    with pytest.raises(InputRefused) as refused:
        map_weights(model, open_index(folder))
    return "\n".join(f"{d.code} {d.message}" for d in refused.value.diagnostics)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_twins.write("qwen3_moe", tmp_path_factory.mktemp("gguf") / "qwen", experts=Type.Q8_0).folder


def changed(folder: Path, **settings: Any) -> PreTrainedModel:
    """The model on meta by an edited config.json."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}, "`qwen3moe.attention.head_count` = 4"),
        ({"num_experts_per_tok": 3}, "I116 the GGUF file has `qwen3moe.expert_used_count`"),
        ({"moe_intermediate_size": 32}, "has shape [16, 64, 64], expected [16, 32, 64]"),
        ({"num_hidden_layers": 3}, "I115 the GGUF file lacks `blk.2.attn_q.weight`, for `model.layers.2"),
        ({"attention_bias": True}, "I115 the GGUF file lacks `blk.0.attn_q.bias`"),
    ],
)
def test_another_config_is_refused(qwen: Path, settings: dict[str, Any], expected: str) -> None:
    assert expected in problems(changed(qwen, **settings), qwen)


def test_layers_beyond_the_model_are_told(qwen: Path) -> None:
    found = map_weights(changed(qwen, num_hidden_layers=1), open_index(qwen))
    assert [warning.code for warning in found.warnings] == ["I118"]
    assert "`blk.1.attn_" in found.warnings[0].message


def test_a_tensor_of_unknown_meaning_is_refused(tmp_path: Path) -> None:
    folder = gguf_twins.write("qwen2_moe", tmp_path / "model").folder
    text = problems(changed(folder, qkv_bias=False), folder)
    assert "I122 tensor `blk.0.attn_q.bias` in `model.gguf` is unknown in `qwen2moe` files" in text


def test_another_architecture_is_refused_by_name(qwen: Path, tmp_path: Path) -> None:
    other = gguf_twins.write("olmoe", tmp_path / "model").folder
    assert "I122 the GGUF file is of architecture `olmoe`, config.json of a `qwen3_moe` model" in problems(
        meta(qwen), other
    )
    file = other / "model.gguf"
    file.write_bytes(file.read_bytes().replace(b"olmoe", b"mamba", 1))
    assert "I122 the GGUF file is of architecture `mamba`, whose conversion ktc cannot undo" in problems(
        meta(other), other
    )


def test_tied_embeddings_need_one_tensor(hand_made: ModuleType, tmp_path: Path) -> None:
    written = gguf_twins.write("qwen3_moe", tmp_path / "model", tie_word_embeddings=True)
    found = map_weights(meta(written.folder), open_index(written.folder))
    assert [warning.code for warning in found.warnings] == ["I118"]
    assert "`output.weight` is not read" in found.warnings[0].message
    out = link(package(hand_made, written.folder, rewritten=True), tmp_path / "twin")
    assert_same(load(out, reference=True), written.model)


def test_safetensors_win_and_the_other_file_is_told(tmp_path: Path) -> None:
    written = gguf_twins.write("qwen3_moe", tmp_path / "model")
    written.model.save_pretrained(written.folder)
    found = map_weights(meta(written.folder), open_index(written.folder))
    assert found.sources[0].file == "model.safetensors"
    assert [(w.code, w.severity) for w in found.warnings] == [("I121", "warning")]


def test_without_the_package_gguf_it_says_so(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(package: str) -> None:
        """No package is installed."""

    monkeypatch.setattr("ktc.foundation.versions.installed", nothing)
    with pytest.raises(HostLacks, match=r"H230.*gguf"):
        map_weights(meta(qwen), open_index(qwen))


# Blocks as they are


@pytest.mark.parametrize("threads", [1, 3])
def test_bands_are_dequantised_on_threads_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    folder, used, dequantised = (
        gguf_twins.write("olmoe", tmp_path / "model").folder,
        set[str](),
        gguf_values.dequantised,
    )
    index = open_index(folder)
    entry = max(index.tensors.values(), key=lambda entry: entry.shape[0] * (entry.dtype in BLOCK_TYPES))
    with TensorReader(folder) as reader:
        blocks = gguf_values.read_blocks(reader, entry, None)
        expected = dequantised(blocks, entry.dtype).reshape(entry.shape).bfloat16()

        def named(*given: Any) -> torch.Tensor:
            used.add(threading.current_thread().name.partition("_")[0])
            return dequantised(*given)

        monkeypatch.setattr(gguf_values, "dequantised", named)
        monkeypatch.setattr(gguf_values, "_BAND", 5 * entry.shape[-1])
        monkeypatch.setattr("ktc.foundation.host.usable_threads", lambda: threads)
        assert torch.equal(gguf_values.read_dequantised(reader, entry, None, torch.bfloat16), expected)
    assert used == {"ktc-dequantising"} and len(blocks) > 20


def blocks_of(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Compare the blocks of each stack, dequantised, with the weights that the same row gives; returns their number."""
    index, seen = open_index(folder), 0
    with TensorReader(folder) as reader:
        for source in map_weights(model, index).sources:
            kind = source.plain_blocks
            if kind is not None:
                blocks = values.read_blocks(reader, index, source, 1)()
                weights = values.read_weight(reader, index, source, 1, dtype)
                plain = gguf_values.dequantised(blocks, kind)
                assert torch.equal(plain.t() if source.steps else plain, weights), source.source_key
                assert gguf_values.are_finite(blocks, kind)
                seen += 1
    return seen


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gpt_oss", Type.MXFP4), ("qwen3_moe", Type.Q4_0), ("olmoe", Type.Q8_0), ("mixtral", Type.Q4_1)],
)
def test_blocks_are_the_weights(tmp_path: Path, family: str, kind: Type) -> None:
    folder = gguf_twins.write(family, tmp_path / "model", experts=kind).folder
    assert blocks_of(folder, meta(folder), torch.float32) == 6


def test_mxfp4_of_safetensors_becomes_the_same_blocks(tmp_path: Path) -> None:
    model, _ = gguf_twins.model_of("gpt_oss")
    model.config.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "_proj" not in name.rpartition(".")[2]}
    for name, tensor in model.state_dict().items():
        if "experts" in name and "bias" not in name:
            experts, columns, rows = tensor.shape
            codes = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(110, 130, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        elif "experts" in name:
            tensors[name] = tensor
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert blocks_of(tmp_path, meta(tmp_path), torch.float32) == 4


@pytest.mark.parametrize("kind", [name for name, row in BLOCKS.items() if row.coded and row.gguf])
def test_scales_tell_whether_blocks_are_numbers(kind: str) -> None:
    size = BLOCK_TYPES[kind].bytes
    blocks = torch.randint(0, 256, (300, 4 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for row in blocks.split(1):
        finite = bool(gguf_values.dequantised(row, kind).isfinite().all())
        assert gguf_values.are_finite(row, kind) == finite


class TakesBlocks(ExpertsWeights):
    """Experts that take blocks of every type, and say what they took."""

    taken: dict[tuple[int, str], str]

    def takes_blocks(self, part: ExpertPart, type_name: str) -> bool:
        self.__dict__.setdefault("taken", {})
        self.__dict__["kind"] = type_name
        return True

    def load_blocks(self, expert: int, part: ExpertPart, blocks: torch.Tensor) -> None:
        kind = self.__dict__["kind"]
        self.taken[expert, part] = kind
        self.load(expert, part, gguf_values.dequantised(blocks, kind))


def filled_with_blocks(folder: Path) -> PreTrainedModel:
    """The model in `folder` in fp32, its experts taken block by block."""
    model = meta(folder).float()
    realise(model, recipe(model), None)
    for module in model.modules():
        if isinstance(module, FusedMoe):
            module.weights.__class__ = TakesBlocks
    index = open_index(folder)
    weight_store.fill(model, map_weights(meta(folder), index).sources, index, {})
    return model


@pytest.mark.parametrize(("family", "kind"), [("gpt_oss", Type.MXFP4), ("mixtral", Type.Q5_0)])
def test_a_kernel_that_takes_blocks_gets_them_part_by_part(tmp_path: Path, family: str, kind: Type) -> None:
    written = gguf_twins.write(family, tmp_path / "model", experts=kind)
    model = filled_with_blocks(written.folder)
    banks = {name: module for name, module in model.named_modules() if isinstance(module, FusedMoe)}
    assert len(banks) == 2
    for name, bank in banks.items():
        every = {(expert, part) for expert in range(16) for part in ("gate", "up", "down")}
        assert isinstance(bank.weights, TakesBlocks)
        assert bank.weights.taken == dict.fromkeys(every, kind.name.lower())
        assert not bank.missing()
        stock = written.model.get_submodule(name)
        assert torch.equal(bank.gate_up_proj, stock.gate_up_proj)
        assert torch.equal(bank.down_proj, stock.down_proj)


def test_blocks_with_a_scale_that_is_no_number_are_refused(tmp_path: Path) -> None:
    folder = gguf_twins.write("olmoe", tmp_path / "model", experts=Type.Q8_0).folder
    entry = open_index(folder).tensors["blk.1.ffn_up_exps.weight"]
    with (folder / entry.file).open("r+b") as file:
        file.seek(entry.end - 34)
        file.write(b"\x00\x7c")
    with pytest.raises(InputRefused, match=r"L407.*`blk.1.ffn_up_exps.weight` \(expert 15\) in `model.gguf`"):
        filled_with_blocks(folder)
    with pytest.raises(InputRefused, match=r"L407.*`blk.1.ffn_up_exps.weight`"):
        weight_store.fill(
            meta(folder).float(), map_weights(meta(folder), open_index(folder)).sources, open_index(folder), {}
        )


# Rows that were not written by capture

HALF: dict[str, Any] = {
    "target": "x.experts.gate_up_proj", "expert": None, "part": "gate", "source_key": "g", "file": "m.gguf",
    "dtype": "q8_0", "shape": [4, 2, 64], "transform": "per_expert", "span": {"dim": 1, "start": 0, "length": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stride": 0}, "an invalid stride"),
        ({"span": None, "stride": 2}, "a stride or a view without a span"),
        ({"span": None, "viewed": [4, 4]}, "a stride or a view without a span"),
        ({"viewed": [1 << 40, 1 << 40]}, "an invalid stride or view"),
        ({"span": {"dim": 0, "start": 0, "length": 2}}, "an inconsistent combination"),
        ({"transform": "copy", "expert": 1}, "a span of one expert"),
        ({"dtype": "q4_k"}, "not blocks of q4_k"),
        ({"dtype": "q9_9"}, "an unknown dtype"),
        ({"steps": [{"operation": "deinterleave_runs", "dims": [1, 3]}]}, "does not fit"),
        ({"steps": [{"operation": "deinterleave_runs", "dims": [1, 0]}]}, "mixes experts"),
        ({"steps": [{"operation": "unsqueeze", "dims": [9]}]}, "does not fit"),
        ({"file": "../m.gguf"}, "an unknown file"),
    ],
)
def test_a_row_that_says_nonsense_is_refused(changes: dict[str, Any], reason: str) -> None:
    (row,) = read_sources(json.dumps([HALF]))
    assert row.loaded_shape == (4, 2, 64)
    assert row.kept_as == ("q8_0", 32)
    with pytest.raises(ValueError, match=reason):
        read_sources(json.dumps([{**HALF, **changes}]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"span": {"dim": 1, "start": 1, "length": 64}}, "no `gate` there"),
        ({"span": {"dim": 1, "start": 0, "length": 128}}, "no `gate` there"),
        ({"stride": 2}, "no `gate` there"),
        ({"part": "up"}, "no `up` there"),
        ({"part": "down"}, "no `down` there"),
        ({"target": "model.layers.0.mlp.experts.down_proj"}, "no `gate` there"),
        ({"steps": [{"operation": "transpose", "dims": [0, 1]}]}, "I112|L408|a step that mixes experts"),
    ],
)
def test_a_row_that_does_not_fit_its_experts_is_refused(qwen: Path, changes: dict[str, Any], reason: str) -> None:
    model, index = meta(qwen), open_index(qwen)
    realise(model, recipe(model), None)
    rows = json.loads(write_sources(map_weights(meta(qwen), index).sources))
    (place,) = (i for i, row in enumerate(rows) if row["source_key"] == "blk.0.ffn_gate_exps.weight")
    rows[place] |= changes
    with pytest.raises((InputRefused, ValueError), match=reason):
        weight_store.fill(model, read_sources(json.dumps(rows)), index, {})
