"""One run of a trainer, and the comparison of the runs of a case: on the stock model and on the compiled one.

In: a case and both models in fp32. Out: `Row`, whose differences are relative to the largest number of each logged
series and of each adapter weight. An exception of stock code is a result, which the compiled model has to share.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    set_seed,
)

import ktc
from ktc.model.manifest.manifest import read_manifest
from ktc.training import KTrainerMixin
from trainer_options.cases import Case
from trainer_options.trainers import KINDS

TOLERANCE: Final = 1e-4  # stacked micro-batches add up in another order, which Adam amplifies to 2e-5
_TIMES = ("runtime", "per_second", "step_time")


@dataclass(frozen=True, slots=True)
class Models:
    """Both models in fp32, which runs copy, and their tokenizer."""

    stock: PreTrainedModel
    compiled: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(cls, out: Path) -> Models:
        """Return the models of a compiled folder."""
        folder = read_manifest(out).model.folder
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
        return cls(stock, ktc.load(out, reference=True), AutoTokenizer.from_pretrained(folder))


@dataclass(frozen=True, slots=True)
class Run:
    """The logged numbers by name (losses, norms, metrics) and the adapter's weights; or the exception in words."""

    logged: Mapping[str, list[float]]
    weights: Mapping[str, Tensor]
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A case beside one trainer of the compiled model: the largest differences of both runs, and the verdict."""

    case: Case
    trainer: str
    stock: Run
    logged: float
    weights: float
    verdict: str

    @property
    def right(self) -> bool:
        """Whether the compiled model did as the stock model does, or was refused as expected."""
        return self.verdict == "equal" or self.verdict.startswith("refused ")

    def __str__(self) -> str:
        name = f"{self.case.kind:8} {self.trainer:15} {self.case.name:60.60}"
        return f"{name} {self.logged:8.0e} {self.weights:8.0e}  {self.verdict}"


def compare(case: Case, models: Models) -> list[Row]:
    """Run a case with the stock trainer on the stock model, and with every trainer on the compiled one."""
    kind = KINDS[case.kind]
    stock = run(case, kind.stock, models.stock, models.tokenizer)
    rows = list[Row]()
    for trainer in kind.compiled:
        ours = run(case, trainer, models.compiled, models.tokenizer)
        logged, weights = difference(stock.logged, ours.logged), difference(stock.weights, ours.weights)
        refused = case.refused if issubclass(trainer, KTrainerMixin) else ""
        verdict = _verdict(stock, ours, max(logged, weights), refused)
        rows.append(Row(case, trainer.__name__, stock, logged, weights, verdict))
    return rows


def _verdict(stock: Run, ours: Run, difference: float, refused: str) -> str:
    if refused and refused in ours.raised:
        return f"refused by ktc: {ours.raised:.80}"
    if stock.raised != ours.raised:
        return f"stock: {stock.raised or 'runs'}; compiled: {ours.raised or 'runs'}"
    if stock.raised:
        return f"refused alike: {stock.raised:.80}"
    return "equal" if difference <= TOLERANCE else "DIFFERS"


def difference(some: Mapping[str, Any], others: Mapping[str, Any]) -> float:
    """Return the largest difference, relative to the largest number of its series; infinite for other series."""
    if some.keys() != others.keys():
        return math.inf
    return max((_distance(some[name], others[name]) for name in some), default=0.0)


def _distance(some: Any, others: Any) -> float:
    one, other = torch.as_tensor(some, dtype=torch.float64), torch.as_tensor(others, dtype=torch.float64)
    if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return math.inf
    one, other = one.nan_to_num(), other.nan_to_num()
    return float((one - other).abs().max()) / max(1e-3, float(one.abs().max())) if one.numel() else 0.0


def run(case: Case, trainer: type[Trainer], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Run:
    """Train an adapter of a copy of `model`, and evaluate it where the case does."""
    kind = KINDS[case.kind]
    rows = kind.rows[case.rows]()
    given = {**kind.given, **({"processing_class": copy.deepcopy(tokenizer)} if kind.has_tokenizer else {})}
    with tempfile.TemporaryDirectory() as folder, _settings_of_the_process():
        set_seed(0)
        try:
            args = kind.arguments(output_dir=folder, **{**kind.defaults, **case.settings})
            # stacked micro-batches draw other dropout masks than separate ones: docs/details/training.md
            tuned = adapted(model, dropout=0.0 if args.gradient_accumulation_steps > 1 else 0.1)
            made = trainer(model=tuned, args=args, train_dataset=rows, eval_dataset=rows, **given)
            made.remove_callback(PrinterCallback)
            made.train()
            if args.do_eval:
                made.evaluate()
        except Exception as error:  # noqa: BLE001 - an exception of stock code is a result
            return Run({}, {}, f"{type(error).__name__}: {error}".partition("\n")[0].replace(folder, "RUN"))
        weights = {name: each.detach().clone() for name, each in made.model.named_parameters() if each.requires_grad}
        return Run(_logged(made), weights)


def adapted(model: PreTrainedModel, dropout: float) -> Any:
    """Return a copy of `model` with an adapter on attention that changes it."""
    targets = ["q_proj", "v_proj"]
    config = LoraConfig(r=2, lora_alpha=8, lora_dropout=dropout, target_modules=targets, task_type="CAUSAL_LM")
    tuned, generator = get_peft_model(copy.deepcopy(model), config), torch.Generator().manual_seed(1)
    for name, parameter in tuned.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return tuned


def _logged(trainer: Trainer) -> dict[str, list[float]]:
    numbers = dict[str, list[float]]()
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if isinstance(value, int | float) and not any(time in name for time in _TIMES):
                numbers.setdefault(name, []).append(float(value))
    return numbers


@contextmanager
def _settings_of_the_process() -> Generator[None]:
    """Undo at the end what some options leave behind."""
    deterministic, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.set_default_dtype(dtype)
