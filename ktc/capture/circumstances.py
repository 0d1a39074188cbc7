"""The one list of what code may ask beside its inputs, and whether it then computes something else.

In: a module on meta tensors, and a function that runs its code. Out: the reason in words, "" if there is none. A row of
`CIRCUMSTANCES` has the names by which code asks. Code that mentions one runs again in each state of the row, and in two
states at once, of which one is the first of its row; where a row has none, asking is the reason. Code that raises in a
state is not compared there: stock raises too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktc.capture import states
from ktc.capture.observed_run import Ran, observed, unrecorded
from ktc.capture.states import Given, State

Inside = Callable[[], AbstractContextManager[object]]
Run = Callable[[Given, Inside], object]  # runs the code on what the inputs become, inside a context entered last


@dataclass(frozen=True, slots=True)
class Circumstance:
    """Something that code may ask about: `when` it is another, by which `names`, and the `states` to try.

    `pairs`: its states are tried together with those of other rows.
    """

    when: str
    names: frozenset[str]
    states: tuple[State, ...] = ()
    pairs: bool = True


def _asked_by(names: str) -> frozenset[str]:
    return frozenset(names.split())


CIRCUMSTANCES = (
    Circumstance(
        "where parameters or inputs are frozen",
        _asked_by("requires_grad requires_grad_ is_leaf grad_fn retains_grad grad _grad_fn"),
        (states.frozen, *states.PARTLY_FROZEN, states.inputs_frozen, states.with_gradients),
    ),
    Circumstance("without gradients", _asked_by("is_grad_enabled GradMode grad_mode"), (states.without_gradients,)),
    Circumstance(
        "in inference mode", _asked_by("is_inference_mode_enabled is_inference inference_mode"), (states.inference,)
    ),
    Circumstance(
        "with autocast",
        _asked_by(
            "is_autocast_enabled is_autocast_cpu_enabled is_autocast_cache_enabled get_autocast_dtype "
            "get_autocast_cpu_dtype get_autocast_gpu_dtype autocast maybe_autocast"
        ),
        states.AUTOCAST,
    ),
    Circumstance(
        "under `torch.compile`",
        _asked_by(
            "is_compiling is_dynamo_compiling is_torchdynamo_compiling is_exporting is_torchdynamo_exporting "
            "is_tracing is_jit_tracing is_fx_tracing is_scripting"
        ),
        (states.compiling,),
    ),
    Circumstance("where hooks are set", _asked_by("_forward_hooks _forward_pre_hooks has_hooks"), (states.hooked,)),
    Circumstance(
        "where PEFT has wrapped its layers or parameters",
        _asked_by("isinstance issubclass type __class__ __name__ callable base_layer children modules parameters"),
        (states.wrapped, states.parametrised),
    ),
    Circumstance(
        "for tensors that are not contiguous",
        _asked_by("is_contiguous stride storage_offset is_non_overlapping_and_dense _is_view _base"),
        (states.strided_inputs, states.strided_parameters),
    ),
    Circumstance(
        "in another dtype",
        _asked_by("dtype finfo element_size itemsize is_floating_point type float16 bfloat16 float32 half"),
        states.DTYPES,
        pairs=False,
    ),
    Circumstance(
        "on another device",
        _asked_by("device is_cuda is_cpu is_meta is_mps is_xpu get_device type"),
        states.DEVICES,
        pairs=False,
    ),
    Circumstance(
        "with another default dtype", _asked_by("get_default_dtype"), (states.other_default_dtype,), pairs=False
    ),
    Circumstance("hooks on gradients", _asked_by("_backward_hooks _backward_pre_hooks _post_accumulate_grad_hooks")),
    Circumstance("the environment", _asked_by("environ environb getenv expandvars gethostname cpu_count")),
    Circumstance(
        "the time or random numbers of Python",
        _asked_by(
            "time time_ns perf_counter perf_counter_ns monotonic process_time now today random "
            "urandom getrandbits uuid4"
        ),
    ),
    Circumstance(
        "settings of torch",
        _asked_by(
            "are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled "
            "get_deterministic_debug_mode get_num_threads get_num_interop_threads get_float32_matmul_precision "
            "is_anomaly_enabled backends initial_seed get_rng_state get_default_device is_warn_always_enabled"
        ),
    ),
    Circumstance(
        "the machine",
        _asked_by(
            "is_available device_count get_device_capability get_device_properties memory_allocated mem_get_info "
            "is_initialized get_world_size get_rank is_torch_available"
        ),
    ),
    Circumstance("the memory of a tensor", _asked_by("data_ptr _version untyped_storage _cdata")),
    Circumstance("its callers or its own attributes by name", _asked_by("_getframe currentframe __dict__ vars")),
)


def dependence(module: nn.Module, run: Run) -> str:
    """Return in which circumstances the code of `module` computes something else, "" if in none.

    Raises what `run` raises with trained parameters and inputs.
    """
    runs, first, seen = _Runs(module, run), list[State](), set[Circumstance]()
    while rows := [row for row in CIRCUMSTANCES if row not in seen and row.names & runs.mentioned]:
        for row in rows:
            seen.add(row)
            if not row.states:
                return f"it reads {row.when}"
            others = [(), *((other,) for other in first)] if row.pairs else [()]
            if any(runs.differ((state, *other), names=row.pairs) for state in row.states for other in others):
                return f"it computes something else {row.when}"
            first += row.states[:1] if row.pairs else ()
    for owner, name in runs.missing:
        if any(runs.differ((states.having(owner, name, value),)) for value in (True, 2.0)):
            return f"it computes something else where `{name}` is set from outside"
    return ""


class _Runs:
    """The runs of one module in evaluation and in training, and what was mentioned in any of them."""

    def __init__(self, module: nn.Module, run: Run) -> None:
        self._module, self._run = module, run
        self.mentioned: frozenset[str] = frozenset()
        self.missing: list[tuple[nn.Module, str]] = []
        self._plain = {training: self._ran(training, (), names=True) for training in (False, True)}

    def differ(self, together: Sequence[State], *, names: bool = True) -> bool:
        """Return whether the code computes something else in these states, in evaluation or in training."""
        return any(not plain.computes_as(found) for plain, found in self._in(together, names))

    def _in(self, together: Sequence[State], names: bool) -> Iterator[tuple[Ran, Ran]]:
        for training, plain in self._plain.items():
            try:
                yield plain, self._ran(training, together, names)
            except Exception:  # noqa: BLE001 - foreign code in a state for which it was not made
                continue

    def _ran(self, training: bool, together: Sequence[State], names: bool) -> Ran:
        with ExitStack() as stack:
            stack.enter_context(_mode(self._module, training))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            changes = [stack.enter_context(state.around(self._module)) for state in together]
            inside = next((state.inside for state in together if state.inside), nullcontext)
            ran = observed(self._module, lambda: self._run(_all(changes), inside), names=names)
        self.mentioned |= ran.mentioned
        self.missing += [each for each in ran.missing if each not in self.missing]
        return ran


def _all(changes: Sequence[Given]) -> Given:
    def given(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        with unrecorded():  # these calls are not of the module
            result = tensor.detach().requires_grad_() * 1  # as hidden states are: no leaf
            for change in changes:
                result = change(result)
            return result

    return given


@contextmanager
def _mode(module: nn.Module, training: bool) -> Generator[None]:
    before = {inner: inner.training for inner in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for inner, mode in before.items():
            inner.training = mode
