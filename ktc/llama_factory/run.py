"""LLaMA-Factory's own tuner in this process, with its trainer become a KTrainer while it runs.

In: a `Request`. Out: what LLaMA-Factory writes, and the run report of the KTrainer. No file of LLaMA-Factory changes.
Refused: what LLaMA-Factory itself refuses (F920), in its words; more processes than were started (F913).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from ktc import environment
from ktc.diagnostics import Diagnostic, InputRefused, KtcError, render
from ktc.llama_factory.settings import Request

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import nn

GetPeftModel: TypeAlias = "Callable[[Any, Any], PeftModel]"
log = logging.getLogger(__name__)

# Where each stage's workflow looks its trainer up.
_TRAINERS: Final = {
    "sft": ("llamafactory.train.sft.workflow", "CustomSeq2SeqTrainer"),
    "pt": ("llamafactory.train.pt.workflow", "CustomTrainer"),
    "dpo": ("llamafactory.train.dpo.trainer", "CustomDPOTrainer"),
}
_ROUTERS: Final = frozenset({"gate", "router"})  # as the families of transformers call them
# The modules whose errors are about settings and data.
_JUDGES: Final = ("llamafactory.", "transformers.hf_argparser", "transformers.training_args", "peft.", "datasets.")


def train(request: Request) -> None:
    """Runs the request as `llamafactory-cli train` does, in this process.

    Raises `InputRefused`: F913, F920, and what loading and attaching raise.
    """
    environment.switch_on_kt()
    _require_processes()
    import torch

    if torch.cuda.device_count() > 1:
        environment.join_world_of_one()
    tuner = import_module("llamafactory.train.tuner")
    with _substituted(request), _arguments(request.words), _its_refusals():
        tuner.run_exp()


def _require_processes() -> None:
    """LLaMA-Factory's launcher would start processes that know no KTrainer, so this one starts none."""
    asked = environment.asked_processes()
    if asked > environment.world_size():
        message = f"the environment asks for {asked} processes, and this is one of {environment.world_size()}"
        hint = f"`torchrun --nproc-per-node {asked} -m ktc lf train ...`"
        raise InputRefused(Diagnostic("F913", message, hint=hint))


@contextmanager
def _substituted(request: Request) -> Generator[None]:
    adapter = import_module("llamafactory.model.adapter")
    module, name = _TRAINERS[request.stage]
    workflow = import_module(module)
    adapted = _by_rules(request.model) if request.by_rules else adapter.get_peft_model
    with ExitStack() as stack:
        stack.enter_context(_replaced(workflow, name, _kt_trainer(getattr(workflow, name))))
        stack.enter_context(_replaced(adapter, "get_peft_model", _telling_of_routers(adapted)))
        if not request.do_train:
            stack.enter_context(_replaced(adapter, "PeftModel", _Unmerged))
        yield


def _kt_trainer(stock: type) -> type:
    """The trainer of LLaMA-Factory as a KTrainer."""
    from ktc.training.trainer import KTrainerMixin

    return type(f"KT{stock.__name__}", (KTrainerMixin, stock), {"__module__": __name__})


def _by_rules(folder: Path) -> GetPeftModel:
    """`get_peft_model` with the adapter of the model's rules, whose targets LLaMA-Factory has no words for."""
    from peft import get_peft_model

    from ktc.model.peft_glue import read_lora_config

    config = read_lora_config(folder)
    return lambda model, _: cast("PeftModel", get_peft_model(model, config))


def _telling_of_routers(make: GetPeftModel) -> GetPeftModel:
    """`make` with a warning (F914) where the adapter has got hold of a router, as `lora_target: all` may."""

    def get_peft_model(model: Any, config: Any) -> PeftModel:
        adapted = make(model, config)
        modules = cast("dict[str, nn.Module]", dict(cast("Any", adapted).named_modules()))
        named = (name.rpartition(".")[2] for name, module in modules.items() if hasattr(module, "lora_A"))
        if found := sorted(_ROUTERS.intersection(named)):
            message = f"LoRA adapts the router (`{found[0]}`): which experts a token meets will change while it trains"
            hint = "name the targets in `lora_target`, without it, if that is not meant"
            log.warning("%s", render([Diagnostic("F914", message, hint=hint, severity="warning")]))
        return adapted

    return get_peft_model


class _Unmerged:
    """LLaMA-Factory merges an adapter before it predicts, and packed experts cannot be merged into: it stays beside."""

    @staticmethod
    def from_pretrained(model: Any, folder: str, **_: Any) -> PeftModel:
        from ktc.adapters.adapter import attach

        attached = attach(model, Path(folder))
        cast("Any", attached).merge_and_unload = lambda: attached
        return attached


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Generator[None]:
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, stock)


@contextmanager
def _arguments(words: tuple[str, ...]) -> Generator[None]:
    """LLaMA-Factory reads the file and the settings after it from the command line."""
    before = sys.argv
    sys.argv = ["llamafactory-cli", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _its_refusals() -> Generator[None]:
    """An error that is about settings or data becomes the user's; any other is a bug of somebody."""
    try:
        yield
    except KtcError:
        raise
    except Exception as error:
        origin = _origin(error.__traceback__)
        if not origin.startswith(_JUDGES):
            raise
        message = f"LLaMA-Factory refuses ({origin}): {' '.join(str(error).split())}"
        raise InputRefused(Diagnostic("F920", message, hint="it is about the settings or the data")) from error


def _origin(trace: TracebackType | None) -> str:
    """The module that raised."""
    name = ""
    while trace is not None:
        name, trace = str(trace.tb_frame.f_globals.get("__name__", "")), trace.tb_next
    return name
