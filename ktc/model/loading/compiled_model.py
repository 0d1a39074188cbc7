"""The differences of a compiled model from its stock class: loading, and refused saving.

`CompiledModel` precedes the stock class (`class KtcX(CompiledModel, X)`), here for `ktc.load` and in
`modeling_ktc.py` for `AutoModelForCausalLM`. Such a class has the name and the module of X, by which libraries decide.
Refused: writing the base model as a checkpoint, unknown options.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import DynamicCache, LogitsProcessorList, PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused, suggest
from ktc.model.decode_steps.cuda_graph import CACHE, DecodeGraphs
from ktc.model.decode_steps.growing_cache import growing
from ktc.model.decode_steps.int8_cache import as_int8, int8_kernels
from ktc.model.decode_steps.run_ahead import FirstSteps, OpenStreamer, RunAhead
from ktc.model.decode_steps.step_ahead import BeforeSampling, StepAhead, WaitingCriteria, waited_for_by
from ktc.model.decode_steps.token_choice import TokenChoice
from ktc.model.experts.load_state import LoadState
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained.frozen_weights import tell_of_frozen
from ktc.model.hf import remote_code
from ktc.model.hf.private_api import GenerationHooks
from ktc.model.kernels.step_context import StepContext
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.loading import refresh
from ktc.model.loading.load_as import load_as

log = logging.getLogger(__name__)

_LOADING_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
_OWN = frozenset({"weights", "reference", "map", "allow_nonfinite"})
_TAKEN = frozenset({
    "attn_implementation", "config", "dtype", "experts_implementation", "output_loading_info", "quantization_config",
    "torch_dtype",
})  # fmt: skip
_HUB = frozenset({
    "adapter_kwargs", "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "resume_download",
    "revision", "subfolder", "token", "trust_remote_code", "use_auth_token", "use_safetensors", "variant",
    "weights_only",
})  # fmt: skip
_DECIDED = frozenset({
    "device_map", "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "offload_state_dict",
    "tp_plan", "tp_size",
})  # fmt: skip


class _Empty:
    """Makes an empty object of the compiled form of a stock class, for a copy or a pickle."""

    def __init__(self, stock: type[PreTrainedModel]) -> None:
        self._stock = stock

    def __call__(self) -> Any:
        return object.__new__(compiled_class(self._stock))

    def __reduce__(self) -> Any:
        """Name the stock class. Raise InputRefused (L435) for code of a checkpoint, which a pickle cannot name."""
        if not remote_code.is_own_code(self._stock):
            return (_Empty, (self._stock,))
        message = "a compiled model whose class is code of its checkpoint cannot be pickled"
        hint = "save the adapter, and load the base from its compiled folder"
        raise InputRefused(Diagnostic("L435", message, hint=hint))


class CompiledModel(GenerationHooks):
    """Mixin before a stock causal LM. `decode_graphs` computes the decoding steps of `generate`, where there is one.

    `weights_state` is the state of a replacement of the weights: see `restore_weights`.
    """

    decode_graphs: DecodeGraphs | None = None
    weights_state: LoadState = LoadState.KERNEL_LAYOUT

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Give a compiled form of a stock class its name and module: libraries look both up (docs/design.md)."""
        super().__init_subclass__(**kwargs)
        if CompiledModel in cls.__bases__:
            stock = _stock(cls)
            cls.__name__, cls.__qualname__, cls.__module__ = stock.__name__, stock.__qualname__, stock.__module__

    @classmethod
    def register_for_auto_class(cls, auto_class: object = "AutoModel") -> None:
        """Do nothing: `AutoModelForCausalLM` would mark the class as code of a checkpoint.

        A stock class that is code of a checkpoint has a mark of its own, which this class inherits.
        """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> PreTrainedModel:
        """Load the compiled folder.

        Takes `config`, `attn_implementation`, `experts_implementation` (of experts that no rule replaced),
        `output_loading_info`, and ktc's own `weights`, `reference`, `map`, `allow_nonfinite`. Placement and dtype are
        the compiler's: `device_map`, `low_cpu_mem_usage`, `max_memory`, `offload_*`, `tp_*` and another dtype are
        ignored with a line in the log. Options about downloads or trust do not apply to a folder and are ignored.
        Raises what `ktc.load` raises, and `InputRefused`: L422 for a quantisation config, L424 for other options.
        """
        _check_options(kwargs)
        if kwargs.get("quantization_config") is not None:
            hint = "choose a weight format in the rule file instead"
            message = "a compiled model cannot be quantised while it is loaded"
            raise InputRefused(Diagnostic("L422", message, hint=hint))
        config = kwargs.get("config")
        model = load_as(
            cast("type[PreTrainedModel]", cls),
            Path(pretrained_model_name_or_path),
            config=config if isinstance(config, PreTrainedConfig) else None,
            attention=kwargs.get("attn_implementation"),
            experts=kwargs.get("experts_implementation"),
            **{name: kwargs[name] for name in sorted(_OWN) if name in kwargs},
        )
        _tell_ignored(kwargs, model)
        if kwargs.get("output_loading_info"):
            info: dict[str, list[str]] = {name: [] for name in _LOADING_INFO}
            return cast("PreTrainedModel", (model, info))
        return model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Raise InputRefused (L423): the experts are packed, so a checkpoint written from here would lack them."""
        raise InputRefused(
            Diagnostic(
                "L423",
                "a compiled model is not written as a checkpoint: its experts are packed and it would lack them",
                hint=f"save the adapter (`PeftModel.save_pretrained`); its base is `{cast('Any', self).name_or_path}`",
            )
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the stock class, from which a copy or a pickle makes this class again.

        Copying goes through here, and not through `__deepcopy__`: PEFT's wrappers have the attributes of the model that
        they wrap, so a wrapper would be copied as a bare model. A caller's class derived from this one keeps its own.
        """
        reduced: Any = super().__reduce_ex__(protocol)
        if CompiledModel not in type(self).__bases__:
            return reduced
        return (_Empty(_stock(type(self))), (), *reduced[2:])

    def restore_weights(self) -> None:
        """Let all weights await a load into the same memory; until `process_weights`, calls are refused (L460).

        Addresses stay, captured steps are dropped. Raises InputRefused: L461 for a merged adapter or mapped experts.
        """
        refresh.restore(cast("PreTrainedModel", self))

    def load_weights(self, checkpoint: str | Path) -> None:
        """Read a checkpoint with the same config into the model's memory, one tensor at a time.

        A fault leaves the model waiting for another load. Raises InputRefused: L460 without `restore_weights`, L405 for
        another config, and what `ktc.load` raises.
        """
        refresh.load(cast("PreTrainedModel", self), Path(checkpoint))

    def process_weights(self) -> None:
        """Admit calls after a load; a second call does nothing. Raises InputRefused (L460) without a whole load."""
        refresh.process(cast("PreTrainedModel", self))

    def refresh(self, checkpoint: str | Path) -> None:
        """Replace all weights by those of a checkpoint with the same config, or none of them.

        All of them are read and checked in memory of their own first, as large as the model. Adapters stay attached.
        Raises what `load_weights` and `restore_weights` raise, and HostLacks (L462) for memory.
        """
        refresh.Stage.for_model(cast("PreTrainedModel", self)).fill(Path(checkpoint)).apply()

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count as the stock model does, packed experts included."""
        counted = int(cast("Any", super()).num_parameters(only_trainable, exclude_embeddings))
        return counted if only_trainable else counted + sum(packed_parameters(cast("nn.Module", self)))

    def requires_grad_(self, requires_grad: bool = True) -> PreTrainedModel:
        """Set it for all parameters. Packed weights are none: they stay frozen, with a warning (L470)."""
        frozen = packed_parameters(cast("nn.Module", self))
        if requires_grad and frozen:
            tell_of_frozen(len(frozen), sum(frozen), cast("nn.Module", self))
        return cast("PreTrainedModel", cast("Any", super()).requires_grad_(requires_grad))

    def train(self, mode: bool = True) -> PreTrainedModel:
        """Set the mode of all modules. Training releases the memory of captured steps."""
        if mode and self.decode_graphs is not None:
            self.decode_graphs.clear()
        return cast("PreTrainedModel", cast("Any", super()).train(mode))

    def prepare_cache(self, model_kwargs: dict[str, Any], prepare: Callable[[], Any]) -> Any:
        """Make the cache of stock `generate`, with room for the next tokens. A caller's cache stays as it is."""
        given = model_kwargs.get(CACHE)
        prepared = prepare()
        made = model_kwargs.get(CACHE)
        if given is None and type(made) is DynamicCache and not getattr(made, "offloading", False):
            growing(as_int8(made, int8_kernels(cast("nn.Module", self))))
        return prepared

    def takes_compiled_steps(self, generation_config: Any) -> bool:
        """Return whether `generate` takes its steps from `get_compiled_call`.

        `torch.compile`, which stock code would use with a static cache, fails for kernels of experts.
        """
        reads_prompt = StepContext.of(cast("nn.Module", self)).reads_prompt
        return self.decode_graphs is not None and not generation_config.disable_compile and not reads_prompt

    def prefill(self, read: Callable[[], Any]) -> Any:
        """Read the prompt as stock code does: its chunks (`prefill_chunk_size`) are not decoding steps."""
        with StepContext.of(cast("nn.Module", self)).entered(reads_prompt=True):
            return read()

    def sample(self, options: dict[str, Any], sample: Callable[[], Any]) -> Any:
        """Choose tokens as stock code does; a GPU computes a step while the host prepares the next one (`RunAhead`).

        With a user's criteria stock code prepares the choice after a step meanwhile; with a streamer too, which reads
        each token, each step is waited for.
        """
        graphs, criteria = self.decode_graphs, options.get("stopping_criteria")
        config = options.get("generation_config")
        choice = None if graphs is None else TokenChoice.of(options, torch.device(graphs.recorder.device))
        if graphs is not None and choice is not None and self.takes_compiled_steps(config):
            return self._sample_ahead(graphs, choice, options, sample)
        ahead: StepAhead | None = None
        if graphs is not None and graphs.recorder.ahead and criteria is not None and options.get("streamer") is None:
            ahead = StepAhead()
            options["stopping_criteria"] = WaitingCriteria(ahead, criteria)
            if config is None or config.do_sample:
                processors = options.get("logits_processor") or ()
                options["logits_processor"] = LogitsProcessorList([*processors, BeforeSampling(ahead)])
        with waited_for_by(ahead, StepContext.of(cast("nn.Module", self))):
            return sample()

    def _sample_ahead(
        self, graphs: DecodeGraphs, choice: TokenChoice, options: dict[str, Any], sample: Callable[[], Any]
    ) -> Any:
        """Let stock code take the first steps, and continue behind the first that is captured."""
        model, streamer, ahead = cast("PreTrainedModel", self), options.get("streamer"), StepAhead()
        first = options["stopping_criteria"] = FirstSteps(ahead, options["stopping_criteria"])
        if streamer is not None:
            options["streamer"] = OpenStreamer(streamer)
        if choice.samples or streamer is not None:
            options["logits_processor"] = LogitsProcessorList([*choice.processors, BeforeSampling(ahead)])
        with waited_for_by(ahead, StepContext.of(model)):
            result = sample()
            if first.begun is not None:
                assert first.ids is not None and first.unfinished is not None, "the criteria were asked"
                with self.decoding():
                    rest = RunAhead(model, graphs, ahead, choice, None if streamer is None else streamer.put)
                    sequences = rest.run(first.begun, first.ids, first.unfinished)
                if isinstance(result, torch.Tensor):
                    result = sequences
                else:
                    result.sequences = sequences
        if streamer is not None:
            streamer.end()
        return result

    def get_compiled_call(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return the function for decoding steps: captured ones where the plan has them."""
        if self.decode_graphs is None:
            return cast("Any", super()).get_compiled_call(*args, **kwargs)
        return functools.partial(self.decode_graphs.step, cast("PreTrainedModel", self))


def _stock(model_class: type[Any]) -> type[PreTrainedModel]:
    bases = (b for b in model_class.__mro__ if issubclass(b, nn.Module) and not issubclass(b, GenerationHooks))
    return cast("type[PreTrainedModel]", next(bases))


@functools.cache
def compiled_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return the compiled form of a stock class, for models that are loaded without `modeling_ktc.py`."""
    return type(stock.__name__, (CompiledModel, stock), {"__doc__": stock.__doc__})


def packed_parameters(model: nn.Module) -> list[int]:
    """Return the number of weights that are not parameters of the model, of each module that has some."""
    counts = list[int]()
    for module in model.modules():
        if isinstance(module, FusedMoe) and not module.weights.training.trains:
            counts.append(module.num_parameters())
        elif isinstance(module, StoredLinear):
            counts.append(module.in_features * module.out_features)
    return counts


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse unknown options, which would be ignored although their user expects an effect."""
    known = _OWN | _TAKEN | _HUB | _DECIDED
    problems = [
        Diagnostic("L424", f"`from_pretrained` of a compiled model has no option `{name}`", hint=suggest(name, known))
        for name in options
        if name not in known and not name.startswith("_")  # transformers passes some of its own
    ]
    if problems:
        raise InputRefused(*problems)


def _tell_ignored(options: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Log one line about the options that the compilation has decided."""
    dtype = model.dtype
    ignored = sorted(name for name in _DECIDED & options.keys() if options[name] not in (None, False))
    if options.get("experts_implementation") and any(isinstance(module, FusedMoe) for module in model.modules()):
        ignored.append("experts_implementation of compiled experts")
    asked = options.get("dtype") or options.get("torch_dtype")
    wanted = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if isinstance(wanted, torch.dtype) and wanted != dtype:
        ignored.append(f"dtype {wanted}")
    if ignored:
        log.warning("a compiled model keeps its placement and its dtype %s; ignored: %s", dtype, ", ".join(ignored))
