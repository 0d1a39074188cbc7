"""A compiled model answers as its stock model wherever a library decides by a class' name, module or source.

docs/design.md lists the places; each question here is one of them.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModel, LoraConfig, get_model_status, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.generic import find_labels

import ktc
from ktc.model.hf import remote_code
from ktc.model.loading.compiled_model import CompiledModel, compiled_class

pytestmark = pytest.mark.usefixtures("one_thread")

QUESTIONS: dict[str, Callable[[PreTrainedModel], Any]] = {
    "its name": lambda model: (type(model).__name__, type(model).__qualname__, model._get_name()),
    "its module": lambda model: type(model).__module__,
    "its source": lambda model: inspect.getsource(type(model)),
    "whether label smoothing shifts labels": lambda model: (
        model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    ),
    "its loss": lambda model: model.loss_type,
    "its labels": lambda model: find_labels(type(model)),
    "whether it is code of a checkpoint": lambda model: (model.is_remote_code(), model.is_custom_code()),
    "whether attention and experts can be chosen": lambda model: (
        type(model)._can_set_attn_implementation(),
        type(model)._can_set_experts_implementation(),
    ),
    "its conversions": lambda model: repr(get_model_conversion_mapping(model)),
    "its cache": lambda model: (model.can_generate(), model._supports_default_dynamic_cache()),
    "its architectures": lambda model: model.config.architectures,
    "its modules that stay whole": lambda model: sorted(
        {type(each).__name__ for each in model.modules()} & set(model._no_split_modules)
    ),
}


@pytest.fixture(scope="module")
def stock(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module", params=["ktc.load", "AutoModelForCausalLM"])
def ours(compiled: Path, request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "ktc.load":
        return ktc.load(compiled, reference=True)
    return AutoModelForCausalLM.from_pretrained(compiled, trust_remote_code=True, reference=True)


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_answers_as_stock(question: str, ours: PreTrainedModel, stock: PreTrainedModel) -> None:
    assert isinstance(ours, CompiledModel)
    assert QUESTIONS[question](ours) == QUESTIONS[question](stock)


def test_a_pipeline_takes_it(ours: PreTrainedModel, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        made = pipeline("text-generation", model=ours, tokenizer=AutoTokenizer.from_pretrained(checkpoint))
        assert made("Question: how many", max_new_tokens=2)[0]["generated_text"].startswith("Question")
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "is not supported" not in caplog.text


def test_an_adapter_without_a_task_names_the_stock_class(ours: PreTrainedModel, tmp_path: Path) -> None:
    """PEFT imports the class by the names in adapter_config.json."""
    tuned = get_peft_model(copy.deepcopy(ours), LoraConfig(target_modules=["o_proj"]))
    tuned.save_pretrained(tmp_path)
    named = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    stock = type(ours).__bases__[-1]
    assert get_model_status(tuned).base_model_type == stock.__name__
    assert named == {"base_model_class": stock.__name__, "parent_library": stock.__module__}
    loaded = AutoPeftModel.from_pretrained(tmp_path, import_allowlist=[stock.__module__])
    assert type(loaded.get_base_model()) is stock


def test_a_pickle_is_the_compiled_model(ours: PreTrainedModel) -> None:
    again = pickle.loads(pickle.dumps(ours))
    assert isinstance(again, CompiledModel)
    assert type(again) is compiled_class(type(ours).__bases__[-1])


def test_a_class_of_the_users_keeps_its_name(ours: PreTrainedModel) -> None:
    made = type("Mine", (type(ours),), {})
    assert made.__name__ == "Mine"
    assert made.__module__ != type(ours).__module__
    copied = copy.deepcopy(ours)
    copied.__class__ = made
    assert type(copy.deepcopy(copied)) is made


def test_code_of_a_checkpoint_stays_known_as_such(tmp_path: Path) -> None:
    """Stock code gives such models other inputs in `generate`, and leaves the names of their tensors alone."""
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "qwen3_moe", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}
    }))  # fmt: skip
    (tmp_path / "modeling_own.py").write_text(
        "from transformers import Qwen3MoeForCausalLM\nclass Own(Qwen3MoeForCausalLM): pass\n"
    )
    _, own = remote_code.run_code(tmp_path)
    made = compiled_class(own)
    assert (own.is_remote_code(), own.is_custom_code()) == (True, True)
    assert (made.is_remote_code(), made.is_custom_code(), made.__name__) == (True, True, "Own")
