"""A model of its own code, its experts in a list that a Python loop calls: refused, trusted, compiled, tuned."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from places import REMOTE_CODE
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import ktc
from ktc.diagnostics import InputRefused
from ktc.model import twin
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.peft_glue import read_lora_config
from ktc.model.manifest.manifest import read_manifest
from ktc.stages.capture import open_model

SOURCE = REMOTE_CODE / "orchard"
IDS = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(1))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _modules_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)  # a package that another folder holds
        yield


def checkpoint(folder: Path, loop: str) -> Path:
    """The model folder with seeded weights."""
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "loop": loop}))
    tensors = stock(folder, torch.bfloat16).state_dict()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def stock(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return twin.build(open_model(folder, trust_remote_code=True).config, 0, torch.bfloat16).to(dtype)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("remote") / "orchard", "hit")


@pytest.fixture(scope="module")
def out(model: Path) -> Path:
    return ktc.compile(
        model, "moe-lora", model.parent / "orchard_ktc", settings={"device": "cpu"}, trust_remote_code=True
    )


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(InputRefused) as caught:
        action()
    return str(caught.value)


def test_code_is_not_run_unless_it_is_trusted(model: Path, out: Path) -> None:
    compiling = refusal(lambda: ktc.compile(model, "moe-lora", model.parent / "other"))
    assert "I108" in compiling
    assert "modeling_orchard.py" in compiling
    loading = refusal(lambda: ktc.load(out))
    assert "L425" in loading
    assert str(model / "modeling_orchard.py") in loading


def test_logits_are_as_near_to_fp32_as_those_of_stock_bf16(model: Path, out: Path) -> None:
    ours, wanted = ktc.load(out, trust_remote_code=True), logits(stock(model, torch.float32))
    assert isinstance(ours.get_submodule("trunk.trees.1.grove.pickers"), FusedMoe)
    assert relative(logits(ours), wanted) <= 1.5 * relative(logits(stock(model, torch.bfloat16)), wanted)


def test_reference_mode_generates_the_tokens_of_stock_fp32(model: Path, out: Path) -> None:
    ours, exact = ktc.load(out, reference=True, trust_remote_code=True), stock(model, torch.float32)
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(IDS, **settings), exact.generate(IDS, **settings))


def test_lora_steps_follow_the_stock_model_and_the_router_stays_a_module(model: Path, out: Path) -> None:
    def steps(made: PreTrainedModel) -> tuple[nn.Module, list[float]]:
        config = read_lora_config(out)
        config.lora_dropout = 0.0
        torch.manual_seed(7)
        tuned = get_peft_model(made, config).train()
        adapted = [p for p in tuned.parameters() if p.requires_grad]
        optimizer, losses = torch.optim.AdamW(adapted, lr=1e-2), list[float]()
        for _ in range(4):
            loss = tuned(input_ids=IDS, labels=IDS).loss
            losses.append(float(loss))
            loss.backward()
            assert all(p.grad is not None for p in adapted)
            optimizer.step()
            optimizer.zero_grad()
        return tuned, losses

    tuned, losses = steps(ktc.load(out, trust_remote_code=True))
    assert losses == pytest.approx(steps(stock(model, torch.bfloat16))[1], abs=0.03)
    assert losses[0] - losses[-1] > 0.1, "a tolerance must be smaller than what is learned"
    block = tuned.get_submodule("base_model.model.trunk.trees.0.grove")
    assert type(block).__name__ == "OrchardGrove"
    assert type(block.get_submodule("chooser")) is nn.Linear


def test_a_setting_in_the_graph_of_a_block_is_said_and_a_layer_that_it_calls_is_not(
    out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = ktc.load(out, trust_remote_code=True)
    ours.add_adapter(read_lora_config(out))
    for tree in ours.trunk.trees:
        tree.grove.chooser.register_forward_hook(lambda module, args, output: output * 1.0)
    before = logits(ours)
    assert not caplog.records
    for tree in ours.trunk.trees:
        tree.grove.per_token = 1
    assert torch.equal(logits(ours), before)
    (record,) = caplog.records
    assert "`trunk.trees.0.grove.per_token` is now 1, and the compiled code has 2" in record.message


def test_single_experts_and_pickles_are_refused_and_copies_made(model: Path, out: Path) -> None:
    ours = ktc.load(out, reference=True, trust_remote_code=True)
    wanted = logits(ours)
    experts = ours.trunk.trees[0].grove.pickers
    assert "L437" in refusal(lambda: experts[1])
    assert "L437" in refusal(lambda: experts.__setitem__(1, nn.Identity()))
    assert "L435" in refusal(lambda: pickle.dumps(ours))
    assert "L436" in refusal(lambda: ours.load_state_dict(stock(model, torch.float32).state_dict(), strict=False))
    for copied in (copy.deepcopy(ours), copy.copy(ours)):
        assert torch.equal(logits(copied), wanted)
    assert torch.equal(logits(ours.half()), logits(stock(model, torch.float32).half()))


@pytest.mark.slow
def test_torch_compile_traces_the_code_of_a_block(out: Path) -> None:
    ours = ktc.load(out, reference=True, trust_remote_code=True)
    wanted = logits(ours)
    assert (logits(torch.compile(ours, backend="eager")) - wanted).norm() <= 1e-6 * wanted.norm()


def test_code_of_a_block_that_was_altered_is_refused(out: Path) -> None:
    path = next((out / "blocks").glob("*.py"))
    text = path.read_text()
    try:
        path.write_text(text.replace("True", "False"))
        assert "L404" in refusal(lambda: ktc.load(out, trust_remote_code=True))
    finally:
        path.write_text(text)


def test_code_of_the_model_that_was_altered_is_refused(model: Path, out: Path) -> None:
    path = model / "modeling_orchard.py"
    text = path.read_text()
    try:
        path.write_text(text + "\n")
        assert "L426" in refusal(lambda: ktc.load(out, trust_remote_code=True))
    finally:
        path.write_text(text)


@pytest.mark.slow
def test_code_in_a_folder_below_is_sealed_and_its_class_is_taken_whatever_its_name(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SOURCE, tmp_path / "nested", ignore=shutil.ignore_patterns("__pycache__")))
    (folder / "sub").mkdir()
    for path in folder.glob("*.py"):
        text = path.read_text().replace("OrchardForCausalLM", "Qwen3MoeForCausalLM")
        (folder / "sub" / path.name).write_text(text)
        path.unlink()
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3MoeForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "sub/configuration_orchard.OrchardConfig",
        "AutoModelForCausalLM": "sub/modeling_orchard.Qwen3MoeForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    theirs = stock(folder, torch.bfloat16)
    tensors = {name: t.contiguous() for name, t in theirs.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    out = ktc.compile(folder, "moe-lora", tmp_path / "nested_ktc", settings={"device": "cpu"}, trust_remote_code=True)
    assert sorted(read_manifest(out).model.code) == ["sub/configuration_orchard.py", "sub/modeling_orchard.py"]
    assert "L425" in refusal(lambda: ktc.load(out))
    made = ktc.load(out, reference=True, trust_remote_code=True)
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    assert relative(logits(made), logits(theirs.float())) < 1e-6
    with (folder / "sub" / "modeling_orchard.py").open("a") as file:
        file.write("\n")
    assert "L426" in refusal(lambda: ktc.load(out, trust_remote_code=True))
    manifest = json.loads((out / "ktc.json").read_text())
    for change in ({"own_code": False}, {"code": {}}):
        (out / "ktc.json").write_text(json.dumps({**manifest, "model": {**manifest["model"], **change}}))
        assert "L402" in refusal(lambda: ktc.load(out, trust_remote_code=True))


@pytest.mark.slow
def test_a_loop_that_is_none_leaves_its_block_alone_and_the_rest_compiles(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "orchard_scaled", "scaled")
    options = {"settings": {"device": "cpu"}, "trust_remote_code": True}
    report = ktc.inspect(folder, "moe-lora", **options)
    assert "the routing weights enter the modules of `pickers`" in report.captured.block("grove_0").opaque
    made = ktc.load(ktc.compile(folder, "moe-lora", tmp_path / "scaled_ktc", **options), trust_remote_code=True)
    assert relative(logits(made), logits(stock(folder, torch.bfloat16))) < 1e-6
    assert len(read_lora_config(tmp_path / "scaled_ktc").target_modules) == 8
