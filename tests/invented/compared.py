"""A compiled model of the zoo beside the stock model of the same folder, from one token to greedy text.

In: a case. Out: `Found`, the outcome and the error of every comparison. Reference mode is compared with stock in fp32.
The kernel's error is compared with the error of stock in bf16. A refusal of the compiler is an outcome; every other
exception passes through.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

import ktc
from invented import observed
from invented.calls import SEED, VOCABULARY, Inputs, inputs, real
from invented.errors import gradient_error, relative
from invented.family import REWRITTEN, Case
from invented.inference import inferred
from invented.recorded import recorded_errors
from invented.surroundings import forget_code_of_models
from invented.written import OF_EXPERTS, stock, write
from ktc.diagnostics import KtcError
from ktc.model.experts.module import FusedMoe
from ktc.model.loading.peft_glue import read_lora_config

TOLERANCE: Final = 1e-5  # of reference mode, relative Frobenius
KERNEL_RATIO: Final = 1.5  # of the kernel's error to that of stock bf16
_NEW_TOKENS = 24
_STAYS = "stays as it is"  # begins the reason of a plan for a block that is not rewritten
_BARE_EXCEPTION = re.compile(r"(?:^|[:;(] |, and |\()\w+(?:Error|Exception): ")


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a case.

    `outcome` is `rewritten`, `rewritten 2 of 4` or the reasons. `errors` are those of reference mode by comparison, and
    `kernel` those of the kernel and of stock bf16 by subject. `attention` has the reasons of the program for inference
    for attention that keeps its own code.
    """

    outcome: str
    errors: Mapping[str, float]
    kernel: Mapping[str, tuple[float, float]]
    attention: str = ""

    @property
    def worst(self) -> tuple[str, float]:
        """The comparison with the largest error in reference mode."""
        return max(self.errors.items(), key=lambda item: item[1], default=("", 0.0))

    @property
    def faults(self) -> list[str]:
        """The comparisons that are not within their tolerance."""
        wrong = [f"{name}: {error:.1e}" for name, error in self.errors.items() if not error <= TOLERANCE]
        if not self.outcome.startswith(REWRITTEN) and (quoted := _BARE_EXCEPTION.search(self.outcome)):
            wrong.append(f"the reason is an exception without its place: {quoted[0]}")
        return wrong + [
            f"kernel, {subject}: {ours:.1e}, stock bf16 {theirs:.1e}"
            for subject, (ours, theirs) in self.kernel.items()
            if not ours <= KERNEL_RATIO * theirs
        ]


def compare(case: Case, folder: Path) -> Found:
    """Write, compile and compare one case below `folder`."""
    model, reasons = write(case, folder / case.name), list[str]()

    def observe(stage: str, value: Any) -> None:
        if stage == "plan":
            reasons.extend(reason.text for reason in value.reasons if reason.text.startswith(_STAYS))

    try:
        out = ktc.compile(
            model, "moe-lora", folder / f"{case.name}_ktc",
            settings={"device": "cpu"}, trust_remote_code=True, observe=observe,
        )  # fmt: skip
    except KtcError as error:
        return Found(f"refused: {error}", {}, {})
    forget_code_of_models()  # capture ran it on meta tensors, which its global lists may hold
    ours = ktc.load(out, reference=True, trust_remote_code=True)
    outcome = _outcome(ours, reasons)
    exact = stock(model, torch.float32)
    errors = {**dict(_reference_errors(ours, exact)), **dict(recorded_errors(ours, exact))}
    attention, kernel = "", dict[str, tuple[float, float]]()
    if case.attention is not None:
        found = inferred(model, folder / f"{case.name}_inference", exact)
        attention, kernel = found.attention, dict(found.kernel)
        errors |= found.errors
    tuned, wanted = _adapted(ours, out), _adapted(exact, out)
    for training in (False, True):
        errors |= dict(_gradient_errors(tuned.train(training), wanted.train(training)))
    pair = _learning_adapters(tuned.eval()), _learning_adapters(wanted.eval())
    errors |= {f"{name}, all but adapters frozen": error for name, error in _gradient_errors(*pair)}
    if not outcome.startswith(REWRITTEN):
        return Found(outcome, errors, kernel, attention)
    _learning_all(wanted)
    half = _adapted(ktc.load(out, trust_remote_code=True), out), _adapted(stock(model, torch.bfloat16), out)
    return Found(outcome, errors, kernel | _kernel_errors(*half, wanted), attention)


def _outcome(model: PreTrainedModel, reasons: list[str]) -> str:
    layers = list(model.model.layers)
    rewritten = sum(any(isinstance(module, FusedMoe) for module in layer.modules()) for layer in layers)
    if rewritten == len(layers):
        return REWRITTEN
    return f"{REWRITTEN} {rewritten} of {len(layers)}" if rewritten else "left: " + "; ".join(dict.fromkeys(reasons))


# reference mode and stock in fp32 ------------------------------------------------------------------------------------
def _reference_errors(ours: PreTrainedModel, exact: PreTrainedModel) -> Iterator[tuple[str, float]]:
    for training in (False, True):
        mode = "training" if training else "evaluation"
        for name, call in inputs().items():
            yield from _forward_errors(f"{name}, {mode}", ours.train(training), exact.train(training), call)
    padded = inputs()["3 x 37, padded left"]
    for factor in (5.0, 1e25):
        with amplified(ours.eval(), factor), amplified(exact.eval(), factor):
            yield from _forward_errors(f"activations times {factor:g}", ours, exact, padded)
    with heavy(ours), heavy(exact):
        yield from _forward_errors("weights that overflow", ours, exact, padded)
        yield from _forward_errors("weights that overflow, 1 token", ours, exact, inputs()["1 token"])
    with torch.inference_mode():
        yield "inference mode", relative(ours(**padded).logits, exact(**padded).logits)
    yield "steps with a cache", _cached_error(ours, exact)
    yield "greedy tokens", 0.0 if torch.equal(_greedy(ours), _greedy(exact)) else math.inf
    if hasattr(exact, "set_from_outside"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("INVENTED_CALM", "")
            for model in (ours, exact):
                cast("Any", model).set_from_outside()
            yield from _forward_errors("set from outside", ours, exact, padded)


def _forward_errors(name: str, ours: nn.Module, exact: nn.Module, call: Inputs) -> Iterator[tuple[str, float]]:
    """Compare logits, what the forward leaves behind, and the random numbers that it drew."""
    wanted, left, state = _seeded(exact, call)
    found, left_by_ours, our_state = _seeded(ours, call)
    yield name, relative(real(found, call), real(wanted, call))
    yield f"random state after {name}", 0.0 if torch.equal(state, our_state) else math.inf
    for place, values in left.items():
        yield f"`{'.'.join(place)}` after {name}", _values_error(left_by_ours.get(place), values)


def _seeded(model: nn.Module, call: Inputs) -> tuple[Tensor, dict[observed.Place, list[Any]], Tensor]:
    results = list[Tensor]()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(SEED)
        left = observed.changes(model, lambda: results.append(model(**call).logits))
        left = {place: [v.clone() if isinstance(v, Tensor) else v for v in values] for place, values in left.items()}
        return results[0], left, torch.get_rng_state()


def _values_error(found: list[Any] | None, wanted: list[Any]) -> float:
    if found is None or len(found) != len(wanted):
        return math.inf
    pairs = [(torch.as_tensor(f).double(), torch.as_tensor(w).double()) for f, w in zip(found, wanted, strict=True)]
    return max((relative(f, w) if f.shape == w.shape else math.inf for f, w in pairs), default=0.0)


@contextmanager
def amplified(model: PreTrainedModel, factor: float) -> Generator[None]:
    """Scale the hidden states that enter the experts' blocks."""
    with torch.no_grad():
        norms = [layer.norm_2.weight for layer in model.model.layers]
        before = [norm.clone() for norm in norms]
        for norm in norms:
            norm.mul_(factor)
        yield
        for norm, kept in zip(norms, before, strict=True):
            norm.copy_(kept)


@contextmanager
def heavy(model: PreTrainedModel) -> Generator[None]:
    """Let the products of the experts be beyond the largest number of fp32."""
    modules = [module for layer in model.model.layers for module in layer.mlp.modules()]
    held = {p for module in modules for name, p in module.named_parameters(recurse=False) if _is_of_experts(name, p)}
    held |= {layer.weight for module in modules for name, layer in module.named_children() if _is_linear(name, layer)}
    before = {parameter: parameter.detach().clone() for parameter in held}
    for parameter in held:
        parameter.data.mul_(1e30)
    yield
    for parameter, kept in before.items():
        parameter.data.copy_(kept)


def _is_linear(name: str, layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) and _is_of_experts(name, layer.weight)


def _is_of_experts(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and any(part in name for part in OF_EXPERTS)


def _cached_error(ours: PreTrainedModel, exact: PreTrainedModel) -> float:
    """Compare a text that is read in pieces of 20, 1, 1 and 5 tokens."""
    ids = inputs()["3 x 37, padded left"]["input_ids"][:, :27]

    def run(model: PreTrainedModel) -> Tensor:
        cache, parts = None, list[Tensor]()
        with torch.no_grad():
            for piece in ids.split((20, 1, 1, 5), dim=1):
                result = model(input_ids=piece, past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                parts.append(result.logits)
        return torch.cat(parts, 1)

    return relative(run(ours.eval()), run(exact.eval()))


def _greedy(model: PreTrainedModel) -> Tensor:
    ids = inputs()["3 x 37, padded left"]["input_ids"][:2]
    return model.eval().generate(ids, max_new_tokens=_NEW_TOKENS, do_sample=False, eos_token_id=None)


# gradients -----------------------------------------------------------------------------------------------------------
def _adapted(model: PreTrainedModel, out: Path) -> nn.Module:
    """Return `model` with the compiled model's adapter, seeded by the names of its factors; all parameters train."""
    config = read_lora_config(out)
    config.lora_dropout = 0.0
    tuned = get_peft_model(model, config)
    for name, parameter in tuned.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point())
        if "lora_" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            scale = 0.1 * parameter.shape[-1] ** -0.5
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return tuned


def _learning_adapters(model: nn.Module) -> nn.Module:
    """Freeze everything but LoRA, as PEFT does."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def _learning_all(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model


def _gradient_errors(ours: nn.Module, exact: nn.Module) -> Iterator[tuple[str, float]]:
    """Compare the loss, its gradients, and the gradients of what the forward leaves behind."""
    call, mode = inputs()["3 x 37, padded left"], "training" if exact.training else "evaluation"
    wanted, found = _gradients(exact, call), _gradients(ours, call)
    yield f"loss, {mode}", relative(found[0]["loss"], wanted[0]["loss"])
    for kind, theirs, of_ours in zip(("loss", "attributes"), wanted[1:], found[1:], strict=True):
        largest = max((float(g.double().norm()) for g in theirs.values()), default=0.0)
        shared = [name for name in theirs if name in dict(ours.named_parameters())]
        for name in shared:
            error = gradient_error(of_ours.get(name), theirs[name], 1e-2 * largest)
            yield f"gradient of the {kind} to {name.removeprefix('base_model.model.')}, {mode}", error


def _gradients(model: nn.Module, call: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    results = list[Tensor]()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        left = observed.changes(model, lambda: results.append(model(**call, labels=call["input_ids"]).loss))
        extra = observed.scalar(left)
        found = [_named(parameters, results[0]), {} if extra is None else _named(parameters, extra)]
    return {"loss": results[0].detach()}, *found


def _named(parameters: Mapping[str, nn.Parameter], value: Tensor) -> dict[str, Tensor]:
    made = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {name: g for name, g in zip(parameters, made, strict=True) if g is not None and bool(g.any())}


# the kernel and stock in bf16 ----------------------------------------------------------------------------------------
def _kernel_errors(ours: nn.Module, half: nn.Module, exact: nn.Module) -> dict[str, tuple[float, float]]:
    """Return the errors against stock fp32 of the kernel and of stock bf16: logits and LoRA gradients."""
    found: dict[str, tuple[float, float]] = {}
    for subject, read in {"logits": _all_logits, "LoRA gradients": _lora_gradients}.items():
        wanted = read(exact.eval())
        found[subject] = relative(read(ours.eval()), wanted), relative(read(half.eval()), wanted)
    return found


def _all_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return torch.cat([real(model(**call).logits, call).reshape(-1, VOCABULARY) for call in inputs().values()])


def _lora_gradients(model: nn.Module) -> Tensor:
    call = inputs()["1 x 700"]  # enough tokens that one choice of an expert decides nothing
    factors = {name: p for name, p in model.named_parameters() if "lora_" in name}
    made = torch.autograd.grad(model(**call, labels=call["input_ids"]).loss, list(factors.values()))
    return torch.cat(
        [g.float().flatten() for _, g in sorted(zip(factors, made, strict=True), key=lambda item: item[0])]
    )


# a family and its near-twin ------------------------------------------------------------------------------------------
def difference(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """Return the largest error between two stock models over every comparison; both keep their own weights."""
    errors = [*_reference_errors(one, other), *recorded_errors(one, other)]
    for training in (False, True):
        errors += _gradient_errors(_learning_all(one).train(training), _learning_all(other).train(training))
    everywhere = LoraConfig(target_modules="all-linear")
    errors += _gradient_errors(*(get_peft_model(model.eval(), everywhere) for model in (one, other)))
    return max((error for _, error in errors), default=0.0)
