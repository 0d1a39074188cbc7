"""The private names of torch, transformers and peft that ktc uses outside of training: few, known, and as we take them.

Training's own are in `ktc/training/trainers/private_api.py`, with a test beside it. `make versions` runs both with the
oldest and the newest supported releases.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from parsed_sources import trees
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ktc.model.manifest.watch import HOOKS
from ktc.stages.capture.forms import reads_rows

KNOWN = {
    "_apply", "_apply_gate", "_attn_implementation", "_attn_implementation_internal", "_base",
    "_build_generation_config", "_can_record_outputs", "_dynamo", "_experts_implementation",
    "_experts_implementation_internal", "_from_config", "_init_weights", "_is_compiling_flag", "_is_exporting_flag",
    "_is_hf_initialized", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_unexpected", "_load_from_state_dict", "_make_wrapper_subclass",
    "_non_persistent_buffers_set", "_normalize_input", "_normalize_tools", "_prefill",
    "_prepare_cache_for_generation", "_python_dispatch", "_pytree", "_register_custom_module", "_resolve_model",
    "_sample", "_schema", "_StreamError", "_subclasses", "_supports_sdpa", "_tied_weights_keys", "_validate_request",
    "_version",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier() and name != "_"


def own_names() -> set[str]:
    """Private names that ktc itself defines."""
    nodes = [node for tree in trees().values() for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    own = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return defined | {name for name in stored if f"self.{name}" in own}


def foreign(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names of other packages in a file: attributes, names given to `getattr`, and imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls" | "os")):
                continue  # `os._exit` is documented
            case ast.Attribute(value=ast.Attribute(value=ast.Attribute(value=ast.Name(id="torch"), attr="ops"))):
                continue  # an operator of ATen
            case ast.Attribute(value=value, attr=name) if is_private(name):
                if name not in own or "super()" in ast.unparse(value):
                    yield name
            case ast.Call(func=ast.Name(id="getattr" | "setattr" | "hasattr" | "with_attribute"), args=[_, key, *_]):
                if isinstance(key, ast.Constant) and is_private(str(key.value)):
                    yield str(key.value)
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("ktc"):
                yield from filter(is_private, [*module.split("."), *(alias.name for alias in names)])


def test_training_uses_private_names_in_one_file() -> None:
    own = own_names()
    rooms = {Path(file).relative_to("ktc"): set(foreign(tree, own)) for file, tree in trees().items()}
    training = {path.name: names for path, names in rooms.items() if path.parts[0] == "training" and names}
    assert training.keys() == {"private_api.py"}
    others = {name for path, names in rooms.items() if path.parts[0] != "training" for name in names}
    assert others <= KNOWN, "give it a test below, and a row in KNOWN"


def test_the_ties_of_an_instance_count_before_those_of_its_class() -> None:
    """`ktc/model/loading/first_layers.py` leaves out those of layers that it removes."""

    class Tied(PreTrainedModel):
        _tied_weights_keys = {"b.weight": "a.weight"}  # noqa: RUF012 - as models of transformers declare it

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.a, self.b = nn.Linear(1, 1), nn.Linear(1, 1)
            self.post_init()

    model = Tied(PretrainedConfig(tie_word_embeddings=True))
    assert model.get_expanded_tied_weights_keys(all_submodels=True) == {"b.weight": "a.weight"}
    model._tied_weights_keys = {}
    assert model.get_expanded_tied_weights_keys(all_submodels=True) == {}


def test_a_module_has_its_children_parameters_and_hooks_in_its_dictionary() -> None:
    """`ktc/model/manifest/watch.py` reads them there, and `_load_from_state_dict` receives the keys of one module."""
    received = list[tuple[list[str], str]]()

    class Asked(nn.Linear):
        def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object) -> None:
            received.append((sorted(state_dict), prefix))

    module = nn.Sequential(Asked(1, 1))
    module.load_state_dict({"0.weight": torch.zeros(1, 1), "0.more": torch.zeros(1)}, strict=False)
    assert received == [(["0.more", "0.weight"], "0.")]
    for hooks in (*HOOKS, "_modules"):
        assert hooks in vars(module)
    module.register_forward_pre_hook(print)
    module.register_full_backward_hook(print)
    assert vars(module)["_modules"] == {"0": module[0]}
    assert [name for name in HOOKS if vars(module)[name]] == ["_forward_pre_hooks", "_backward_hooks"]
    assert set(vars(module[0])["_parameters"]) == {"weight", "bias"}


def test_a_tensor_may_hold_others_that_pytorch_takes_for_one() -> None:
    class Wrapper(torch.Tensor):
        """As `ktc/model/attention/int8_tensor.py` makes it."""

        @classmethod
        def __torch_dispatch__(cls, *args: object) -> None:
            """Compute nothing."""

    made = torch.Tensor._make_wrapper_subclass(Wrapper, (2, 3), dtype=torch.bfloat16, device="cpu")
    assert type(made) is Wrapper
    assert (made.shape, made.dtype) == ((2, 3), torch.bfloat16)


@pytest.fixture(scope="module")
def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(config: Qwen3MoeConfig) -> PreTrainedModel:
    return Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)


def test_a_model_is_made_from_a_config_in_a_dtype(model: PreTrainedModel) -> None:
    assert model.dtype == torch.bfloat16


def test_a_config_keeps_its_implementations_where_capture_sets_them(config: Qwen3MoeConfig) -> None:
    from ktc.stages.capture import markers

    for internal in markers._CHOICES:
        public, before = internal.removesuffix("_internal"), getattr(config, internal)
        setattr(config, internal, "of ktc")
        assert getattr(config, public) == "of ktc", "no public setter has checked it"
        setattr(config, internal, before)


def test_a_class_says_what_stays_in_fp32_and_what_a_checkpoint_may_have_besides() -> None:
    for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "_keys_to_ignore_on_load_unexpected"):
        assert getattr(PreTrainedModel, name) is None
    assert isinstance(PreTrainedModel._supports_sdpa, bool)
    from transformers import DeepseekV3ForCausalLM

    assert "e_score_correction_bias" in " ".join(DeepseekV3ForCausalLM._keep_in_fp32_modules_strict)


@pytest.mark.parametrize("name", ["_can_set_attn_implementation", "_can_set_experts_implementation"])
def test_a_class_reads_its_source_for_what_it_can_do(name: str) -> None:
    """A compiled class has the module of its stock class, whose source is read."""
    assert getattr(Qwen3MoeForCausalLM, name)() is True


def test_generation_reads_a_prompt_in_a_method_of_its_own(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    stock = type(model)._prefill
    monkeypatch.setattr(type(model), "_prefill", lambda *given, **named: (read.append(1), stock(*given, **named))[1])
    model.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=3, prefill_chunk_size=2, pad_token_id=0)
    assert len(read) == 1


def test_generation_chooses_tokens_in_a_method_with_named_criteria(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CompiledModel` adds what waits for a step to them."""
    named: list[dict[str, object]] = []
    stock = type(model)._sample
    monkeypatch.setattr(type(model), "_sample", lambda *given, **more: (named.append(more), stock(*given, **more))[1])
    model.generate(torch.ones(1, 5, dtype=torch.int64), max_new_tokens=3, do_sample=True, pad_token_id=0)
    (found,) = named
    assert {"stopping_criteria", "logits_processor", "generation_config"} <= set(found)


def test_generation_leaves_its_cache_in_the_arguments_of_the_model(model: PreTrainedModel) -> None:
    """`CompiledModel` gives the `DynamicCache` there room to grow."""
    given: dict[str, object] = {}
    config = copy.deepcopy(model.generation_config)
    config.cache_implementation, config.use_cache = None, True
    named = inspect.signature(model._prepare_cache_for_generation).parameters
    values = {"generation_config": config, "model_kwargs": given, "batch_size": 1, "max_cache_length": 8}
    model._prepare_cache_for_generation(**{name: values.get(name) for name in named})
    assert isinstance(given["past_key_values"], DynamicCache)


def test_generation_asks_the_model_whether_it_compiles_it() -> None:
    """`CompiledModel` says that it does not."""
    assert "model_kwargs" in inspect.signature(Qwen3MoeForCausalLM._valid_auto_compile_criteria).parameters


def test_initialising_leaves_marked_parameters_alone(model: PreTrainedModel) -> None:
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    for parameter in layer.parameters():
        parameter._is_hf_initialized = True
    model._init_weights(layer)
    assert torch.equal(layer.weight, before)
    del layer.weight._is_hf_initialized
    model._init_weights(layer)
    assert not torch.equal(layer.weight, before)


def test_experts_tell_their_activation_alone(config: Qwen3MoeConfig) -> None:
    config._experts_implementation = "eager"
    experts = Qwen3MoeExperts(config)
    both = torch.randn(3, 16)
    gate, up = both.chunk(2, dim=-1)
    assert torch.allclose(experts._apply_gate(both), nn.functional.silu(gate) * up)


def test_a_module_knows_the_buffers_that_no_checkpoint_has() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("made", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"made"}


def test_every_change_of_dtype_or_device_goes_through_apply() -> None:
    seen: list[torch.dtype] = []

    class Seeing(nn.Linear):
        def _apply(self, fn: object, recurse: bool = True) -> nn.Module:
            seen.append(fn(torch.empty(1)).dtype)
            return super()._apply(fn, recurse)

    nn.Sequential(Seeing(2, 2)).to(torch.bfloat16)
    assert seen == [torch.bfloat16]


def test_an_operator_tells_the_names_of_its_arguments() -> None:
    assert [argument.name for argument in torch.ops.aten.softmax.int._schema.arguments] == ["self", "dim", "dtype"]


def test_peft_takes_a_layer_of_ours_for_a_class() -> None:
    class Ours(LoraLinear):
        pass

    config = LoraConfig(target_modules=["0"])
    config._register_custom_module({nn.Linear: Ours})
    found = get_peft_model(nn.Sequential(nn.Linear(4, 4)), config)
    assert type(found.base_model.model[0]) is Ours


def test_handlers_of_requests_check_and_configure_where_ours_do() -> None:
    pytest.importorskip("fastapi")
    from transformers.cli.serving.chat_completion import ChatCompletionHandler

    for name in ("_validate_request", "_build_generation_config", "_resolve_model"):
        assert callable(getattr(ChatCompletionHandler, name))


def test_an_input_of_responses_becomes_messages_and_nested_tools() -> None:
    pytest.importorskip("fastapi")
    from transformers.cli.serving.response import ResponseHandler

    messages = ResponseHandler._normalize_input({"input": "Hello", "instructions": "Answer."})
    assert [turn["role"] for turn in messages] == ["system", "user"]
    assert ResponseHandler._normalize_tools([{"type": "function", "name": "f"}]) == [
        {"type": "function", "function": {"name": "f"}}
    ]


def test_an_error_of_a_stream_carries_a_message() -> None:
    pytest.importorskip("fastapi")
    from transformers.cli.serving.utils import _StreamError

    assert _StreamError("out of luck").msg == "out of luck"


def test_foreign_names_are_found(tmp_path: Path) -> None:
    text = "from torch.utils import _pytree\nx._secret\ngetattr(x, '_hidden')\nsuper()._own()\nself._own\nx._own"
    assert sorted(foreign(ast.parse(text), {"_own"})) == ["_hidden", "_own", "_pytree", "_secret"]


def test_a_tensor_of_any_number_of_rows_leaves_a_guard_where_code_asks_for_it() -> None:
    sample = torch.zeros(2, 8)
    assert not reads_rows(lambda x: x * 2, sample)
    assert reads_rows(lambda x: x * (2 if x.shape[0] == 55 else 1), sample)


def test_a_write_into_a_tensor_or_a_view_of_it_changes_its_version() -> None:
    """`ktc/model/attention/key_index.py` tells by it that a cache was changed by others."""
    whole = torch.zeros(4, 3)
    view = whole[:2]
    before = view._version
    whole[3] = 1
    assert view._version > before
    before = whole._version
    view.add_(1)
    assert whole._version > before


def test_torch_says_that_it_compiles_by_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.compiler.is_compiling()
    assert not torch.compiler.is_exporting()
    for flag in ("_is_compiling_flag", "_is_exporting_flag"):
        monkeypatch.setattr(torch.compiler, flag, True)
    assert torch.compiler.is_compiling()
    assert torch.compiler.is_exporting()
