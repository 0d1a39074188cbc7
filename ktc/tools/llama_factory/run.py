"""LLaMA-Factory's own tuner in this process, with a KTrainer as its trainer for that time.

In: a `Request`. Out: LLaMA-Factory's own output, and the run report of the KTrainer. No file of LLaMA-Factory
changes. Refused: settings that LLaMA-Factory itself refuses before the first step (F920), in its words; more processes
than were started (F913).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from ktc.diagnostics import Diagnostic, InputRefused, KtcError, render
from ktc.foundation import environment, versions
from ktc.model.hf.patching import with_attributes
from ktc.tools.llama_factory.settings import TESTED, Request

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
_ROUTERS: Final = frozenset({"gate", "router"})  # names in the families of transformers
# The modules whose errors concern settings and data.
_JUDGES: Final = ("llamafactory.", "transformers.hf_argparser", "transformers.training_args", "peft.", "datasets.")


def train(request: Request) -> None:
    """Run the request as `llamafactory-cli train` does, in this process.

    Raise `InputRefused`: F913, F920, and the errors of loading and attaching.
    """
    environment.switch_on_kt()
    _require_processes()
    import torch

    if torch.cuda.device_count() > 1:
        environment.join_world_of_one()
    tuner = import_module("llamafactory.train.tuner")
    begun = Event()
    with _substituted(request, begun), _arguments(request.words), its_refusals(begun):
        tuner.run_exp()


def _require_processes() -> None:
    """Raise InputRefused (F913) for several processes: LLaMA-Factory's launcher would start them without a KTrainer."""
    processes = environment.asked_processes()
    if processes > environment.world_size():
        message = f"the environment requests {processes} processes, and this is one of {environment.world_size()}"
        hint = f"`torchrun --nproc-per-node {processes} -m ktc lf train ...`"
        raise InputRefused(Diagnostic("F913", message, hint=hint))


@contextmanager
def _substituted(request: Request, begun: Event) -> Generator[None]:
    adapter = import_module("llamafactory.model.adapter")
    module, name = _TRAINERS[request.stage]
    workflow = import_module(module)
    adapted = _by_rules(request.model) if request.by_rules else adapter.get_peft_model
    with ExitStack() as stack:
        stack.enter_context(with_attributes(workflow, **{name: _kt_trainer(getattr(workflow, name), begun)}))
        stack.enter_context(with_attributes(adapter, get_peft_model=_telling_of_routers(adapted)))
        if not request.do_train:
            stack.enter_context(with_attributes(adapter, PeftModel=_Unmerged))
        yield


def _kt_trainer(stock: type, begun: Event) -> type:
    """Return LLaMA-Factory's trainer class with the KTrainer mixin. Its first step sets `begun`."""
    from ktc.training.trainers.trainer import KTrainerMixin

    names = {"__module__": __name__, "passes_loss_on": property(partial(passes_loss_on, stock))}
    made: Any = type(f"KT{stock.__name__}", (KTrainerMixin, stock), names)
    for name in ("training_step", "prediction_step"):
        setattr(made, name, telling(begun, getattr(made, name)))
    made.only_calls_step = made.training_step
    return made


def passes_loss_on(stock: type, trainer: Any) -> bool:
    """Return whether a trainer's loss is that of transformers: `compute_loss` of the known release only calls it.

    One of its kinds of loss is computed there, for which the model runs twice.
    """
    from transformers import Trainer

    given, calls = vars(stock).get("compute_loss"), cast("Any", super(stock, trainer)).compute_loss
    is_own = getattr(trainer.compute_loss, "__func__", None) is given
    is_known = versions.release(versions.installed("llamafactory") or "") == TESTED
    stock_loss = getattr(calls, "__func__", None) is Trainer.compute_loss
    return is_own and is_known and stock_loss and not getattr(trainer.finetuning_args, "use_asft_loss", False)


def telling(begun: Event, step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        begun.set()
        return step(*args, **kwargs)

    return wrapped


def _by_rules(folder: Path) -> GetPeftModel:
    """Call `get_peft_model` with the adapter of the model's rules, which LLaMA-Factory cannot express."""
    from peft import get_peft_model

    from ktc.model.loading.peft_glue import read_lora_config

    config = read_lora_config(folder)
    return lambda model, _: cast("PeftModel", get_peft_model(model, config))


def _telling_of_routers(make: GetPeftModel) -> GetPeftModel:
    """Wrap `make` with a warning (F914) if the adapter includes a router, as with `lora_target: all`."""

    def get_peft_model(model: Any, config: Any) -> PeftModel:
        adapted = make(model, config)
        modules = cast("dict[str, nn.Module]", dict(cast("Any", adapted).named_modules()))
        named = (name.rpartition(".")[2] for name, module in modules.items() if hasattr(module, "lora_A"))
        if routers := sorted(_ROUTERS.intersection(named)):
            message = f"LoRA adapts the router (`{routers[0]}`): the choice of experts will change during training"
            hint = "name the targets in `lora_target` without it if this is not intended"
            log.warning("%s", render([Diagnostic("F914", message, hint=hint, severity="warning")]))
        return adapted

    return get_peft_model


class _Unmerged:
    """Keeps an adapter unmerged: LLaMA-Factory merges it before prediction, which packed experts cannot do."""

    @staticmethod
    def from_pretrained(model: Any, folder: str, **_: Any) -> PeftModel:
        from ktc.adapters.adapter import attach

        attached = attach(model, Path(folder), alone=True)
        cast("Any", attached).merge_and_unload = lambda: attached
        return attached


@contextmanager
def _arguments(words: tuple[str, ...]) -> Generator[None]:
    """Set the command line from which LLaMA-Factory reads the file and the settings."""
    before = sys.argv
    sys.argv = ["llamafactory-cli", *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def its_refusals(begun: Event) -> Generator[None]:
    """Turn an error about settings or data into InputRefused (F920); one after the first step has `begun` is a bug."""
    from ktc.training.trainers.library_refusals import origin_of, refusal_in

    try:
        yield
    except KtcError:
        raise
    except Exception as error:
        origin = origin_of(error.__traceback__)
        if begun.is_set() or (not origin.startswith(_JUDGES) and refusal_in(error) is None):
            raise
        message = f"LLaMA-Factory refuses ({origin}): {' '.join(str(error).split())}"
        raise InputRefused(Diagnostic("F920", message, hint="the message concerns the settings or the data")) from error
