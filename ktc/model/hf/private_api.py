"""Every private name of transformers and peft that ktc uses outside of training and serving.

`tests/model/hf/test_private_api.py` checks each name with the oldest and the newest release (`make versions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

if TYPE_CHECKING:
    from peft import LoraConfig

ATTENTION = "_attn_implementation_internal"  # of a config; the public setters check the name
EXPERTS = "_experts_implementation_internal"


def attention_of(config: object) -> str | None:
    """Return the attention implementation that a config chooses; None for another object."""
    return getattr(config, "_attn_implementation", None)


def refused_by_peft(model_type: str, name: str) -> bool:
    """Return whether PEFT refuses LoRA on layers called `name` in models of this type; releases before that do not."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if check is None:
        return False
    try:
        check(LoraConfig(), SimpleNamespace(config=SimpleNamespace(model_type=model_type)), name)
    except ValueError:
        return True
    return False


def read_as_experts(model_type: str) -> frozenset[str]:
    """Return the names that PEFT interprets as those of routed experts or their router in models of this type."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # releases before that read names as they are
        return frozenset()
    kinds, names = (
        cast("Any", conversion)._MODEL_TO_CONVERSION_PATTERN,
        cast("Any", conversion)._MOE_TARGET_MODULE_MAPPING,
    )
    return frozenset(names.get(kinds.get(model_type), ()))


def experts_of(config: object) -> str | None:
    """Return the implementation of experts that a config chooses."""
    return getattr(config, "_experts_implementation", None)


def model_of_config(model_class: type[PreTrainedModel], config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a model of this class. `AutoModelForCausalLM.from_config` would choose the class."""
    return cast("Any", model_class)._from_config(config, **options)


def kept_in_fp32(model: nn.Module, *, half: bool) -> set[str]:
    """Return parts of the names of tensors that stay fp32 in half precision; `half`: fp16, which keeps more."""
    kept: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return kept | set(getattr(model, "_keep_in_fp32_modules", None) or ()) if half else kept


def unexpected_keys(model: nn.Module) -> tuple[str, ...]:
    """Return patterns of tensors that a checkpoint may have besides those of the model."""
    return tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def tie_patterns(model: nn.Module) -> dict[str, str]:
    """Return the tied tensors that a model declares, as patterns of target and source."""
    ties = getattr(model, "_tied_weights_keys", None)
    return cast("dict[str, str]", ties) if isinstance(ties, dict) else {}


def set_tie_patterns(model: nn.Module, ties: dict[str, str]) -> None:
    """Declare the ties of this one model, in place of those of its class."""
    cast("Any", model)._tied_weights_keys = ties


def initialise_buffers(model: nn.Module, module: nn.Module) -> bool:
    """Run the model's own initialisation of a module, except of its parameters; False for a model without one."""
    initialise = getattr(model, "_init_weights", None)
    if initialise is None:
        return False
    for parameter in module.parameters(recurse=False):
        cast("Any", parameter)._is_hf_initialized = True
    initialise(module)
    return True


def takes_bool_masks(model: nn.Module) -> bool:
    """Return whether transformers makes bool masks for a model: it does if the class supports `sdpa`."""
    return bool(getattr(model, "_supports_sdpa", False))


def recorded_outputs(model: nn.Module) -> dict[str, Any]:
    """Return the inner results that a model records for its caller, by name."""
    return getattr(model, "_can_record_outputs", None) or {}


def gate_code(module: nn.Module) -> Callable[..., Any] | None:
    """Return the code with which an experts module combines gate and up."""
    code = getattr(module, "_apply_gate", None)
    return code if callable(code) else None


def register_layers(config: LoraConfig, layers: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Let PEFT wrap modules of these classes by these layers."""
    cast("Any", config)._register_custom_module(dict(layers))


def pad_token(generation_config: object) -> Tensor | None:
    """Return the padding token that `generate` has prepared, as a tensor, None without one."""
    token = getattr(generation_config, "_pad_token_tensor", None)
    return token if isinstance(token, Tensor) else None


def defers_stop(device: torch.device) -> bool:
    """Return whether stock code's loop on a device can end a step later than its criteria say, as since 5.23."""
    from transformers.generation import utils

    check: Any = getattr(utils, "DeferredStopCheck", None)
    return check is not None and bool(check.is_supported(device, None, False, False))


class GenerationHooks:
    """A base before the class of a model: steps inside `generate`, as methods with public names."""

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether backward computes activations again.

        PEFT and TRL read this name, and transformers warns of it since 5.23: the user cannot change their code.
        """
        return any(getattr(module, "gradient_checkpointing", False) for module in cast("nn.Module", self).modules())

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        stock = cast("Any", super())._prepare_cache_for_generation
        return self.prepare_cache(model_kwargs, lambda: stock(generation_config, model_kwargs, *args, **kwargs))

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: Any, *args: Any) -> bool:
        return self.takes_compiled_steps(generation_config)

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        stock = cast("Any", super())._prefill
        return self.prefill(lambda: stock(*args, **kwargs))

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        stock = cast("Any", super())._sample
        return self.sample(kwargs, lambda: stock(*args, **kwargs))

    def prepare_cache(self, model_kwargs: dict[str, Any], prepare: Callable[[], Any]) -> Any:
        """Call `prepare`, which puts the cache into `model_kwargs`."""
        return prepare()

    def takes_compiled_steps(self, generation_config: Any) -> bool:
        """Return whether `generate` takes its steps from `get_compiled_call`."""
        raise NotImplementedError

    def prefill(self, read: Callable[[], Any]) -> Any:
        """Call `read`, which reads the prompt."""
        return read()

    def decoding(self) -> AbstractContextManager[Any]:
        """Return a context in which stock code computes decoding steps; releases before 5.2 have none."""
        make = getattr(self, "_optimize_model_for_decode", None)
        return nullcontext() if make is None else make()

    def sample(self, options: dict[str, Any], sample: Callable[[], Any]) -> Any:
        """Call `sample`, which chooses tokens with `options`, such as `stopping_criteria`."""
        return sample()
