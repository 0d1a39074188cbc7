"""Circumstances that a model's code can test besides its inputs, and whether its computation depends on one.

In: a module on meta tensors, and a function that runs its code. Out: the reason in words, "" if it depends on none. A
row of `CIRCUMSTANCES` lists the names by which code tests a circumstance, and states in which to try it. Code that
mentions a name runs again in each state of the row, alone and together with the first state of each earlier row. Where
a row has no state, mentioning it is the reason; the same holds for an attribute that the module lacks, and for a
mutable value outside of modules. A run that raises is not compared, since the stock model raises too. Exceptions: the
run reads data, or it needs a device that is only simulated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ktc.foundation.temporary_values import context_value
from ktc.stages.capture import states
from ktc.stages.capture.mentioned import Mentions, TorchCallsIgnored, own_names
from ktc.stages.capture.observed_run import Ran, observed, unrecorded
from ktc.stages.capture.reasons import reads_data
from ktc.stages.capture.states import Given, State
from ktc.stages.capture.trace import training_mode

Inside = Callable[[], AbstractContextManager[object]]
Run = Callable[[Given, Inside], object]  # runs the code on what the inputs become, inside a context entered last


@dataclass(frozen=True, slots=True)
class Circumstance:
    """A circumstance: `when` completes the sentence, `names` test for it, `states` are tried.

    `more` returns further states, which depend on the module.
    """

    when: str
    names: frozenset[str]
    states: tuple[State, ...] = ()
    more: Callable[[nn.Module], Sequence[State]] | None = None


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


CIRCUMSTANCES = (
    Circumstance(
        "where parameters or inputs are frozen",
        _names("requires_grad requires_grad_ is_leaf grad_fn retains_grad grad _grad_fn"),
        (states.frozen, states.inputs_frozen, states.with_gradients),
        states.partly_frozen,
    ),
    Circumstance("without gradients", _names("is_grad_enabled GradMode grad_mode"), (states.without_gradients,)),
    Circumstance(
        "in inference mode", _names("is_inference_mode_enabled is_inference inference_mode"), (states.inference,)
    ),
    Circumstance(
        "with autocast",
        _names(
            "is_autocast_enabled is_autocast_cpu_enabled is_autocast_cache_enabled get_autocast_dtype "
            "get_autocast_cpu_dtype get_autocast_gpu_dtype autocast maybe_autocast"
        ),
        states.AUTOCAST,
    ),
    Circumstance(
        "under `torch.compile`",
        _names("is_compiling is_dynamo_compiling is_torchdynamo_compiling is_exporting is_torchdynamo_exporting"),
        (states.compiling,),
    ),
    Circumstance(
        "where hooks are set",
        _names(
            "_forward_hooks _forward_pre_hooks _forward_hooks_with_kwargs _forward_pre_hooks_with_kwargs "
            "_forward_hooks_always_called _global_forward_hooks _global_forward_pre_hooks has_hooks"
        ),
        (states.hooked,),
    ),
    Circumstance(
        "where PEFT has wrapped its layers or parameters",
        _names(
            "isinstance issubclass type __class__ __name__ callable base_layer children modules parameters "
            "_parameters _modules named_parameters named_modules named_children state_dict is_parametrized "
            "parametrizations get_submodule get_parameter"
        ),
        (states.wrapped, states.parametrised),
    ),
    Circumstance(
        "for tensors that are not contiguous",
        _names("is_contiguous stride storage_offset is_non_overlapping_and_dense _is_view _base"),
        (states.strided_inputs, states.strided_parameters),
    ),
    Circumstance(
        "on another device", _names("device is_cuda is_cpu is_meta is_mps is_xpu get_device type"), states.DEVICES
    ),
    Circumstance(
        "in another dtype",
        _names("dtype finfo element_size itemsize is_floating_point type float16 bfloat16 float32 half"),
        states.DTYPES,
    ),
    Circumstance("with another default dtype", _names("get_default_dtype"), (states.other_default_dtype,)),
    Circumstance(
        "whether it is traced",
        _names("is_tracing is_jit_tracing is_fx_tracing is_scripting _is_tracing _get_tracing_state"),
    ),
    Circumstance(
        "hooks on gradients",
        _names(
            "_backward_hooks _backward_pre_hooks _post_accumulate_grad_hooks _global_backward_hooks "
            "_global_backward_pre_hooks"
        ),
    ),
    Circumstance("the environment", _names("environ environb getenv expandvars gethostname cpu_count")),
    Circumstance("the interpreter or its arguments", _names("sys argv executable getrecursionlimit")),
    Circumstance(
        "files",
        _names(
            "open exists lexists isfile isdir islink is_file is_dir is_symlink stat lstat access listdir scandir "
            "iterdir glob iglob rglob walk getmtime getsize read_text read_bytes getcwd"
        ),
    ),
    Circumstance(
        "versions of packages",
        _names(
            "__version__ version version_info python_version hexversion find_spec import_module is_torch_version "
            "is_torch_greater_or_equal is_torch_less_or_equal get_torch_version"
        ),
    ),
    Circumstance(
        "the time or random numbers of Python",
        _names(
            "time time_ns perf_counter perf_counter_ns monotonic process_time now today random "
            "urandom getrandbits uuid4"
        ),
    ),
    Circumstance(
        "settings of torch",
        _names(
            "are_deterministic_algorithms_enabled is_deterministic_algorithms_warn_only_enabled "
            "get_deterministic_debug_mode get_num_threads get_num_interop_threads get_float32_matmul_precision "
            "is_anomaly_enabled backends initial_seed get_rng_state get_default_device is_warn_always_enabled"
        ),
    ),
    Circumstance(
        "the machine",
        _names(
            "is_available device_count get_device_capability get_device_properties memory_allocated mem_get_info "
            "is_initialized get_world_size get_rank is_torch_available is_current_stream_capturing current_stream"
        ),
    ),
    Circumstance("the memory of a tensor", _names("data_ptr _version untyped_storage _cdata")),
    Circumstance("its callers or its own attributes by name", _names("_getframe currentframe __dict__ vars")),
)


_circumstances_checked: ContextVar[bool] = ContextVar("circumstances_checked", default=False)


def circumstances_checked() -> AbstractContextManager[object]:
    """Return a context without these checks: a capture of the same code, with other sizes, has done them."""
    return context_value(_circumstances_checked, True)


def are_circumstances_checked() -> bool:
    """Return whether a capture of the same code has done these checks."""
    return _circumstances_checked.get()


def dependence(module: nn.Module, run: Run) -> str:
    """Return the circumstance in which the code of `module` computes something else, "" if there is none.

    Raises the exceptions of `run` with trained parameters and inputs.
    """
    if are_circumstances_checked():
        return ""
    runs, first, seen = _Runs(module, run), list[State](), set[Circumstance]()
    while rows := [row for row in CIRCUMSTANCES if row not in seen and row.names & runs.mentioned]:
        for row in rows:
            seen.add(row)
            if not row.states:
                return f"it reads {row.when}"
            others = [(), *((other,) for other in first)]
            tried = (*row.states, *(row.more(module) if row.more else ()))
            if any(runs.differ((state, *other)) for state in tried for other in others):
                return f"it computes something else {row.when}"
            first += row.states[:1]
    return runs.reads_outside


def question(module: nn.Module, run: Run) -> str:
    """Return which circumstance the code of a module tests, "" if none, for code that does not run without data.

    Tests for dtypes, devices and classes do not count: stock code has them too.
    """
    mentions = Mentions()
    with suppress(Exception):
        _run(module, run, (), mentions, training=False)
    tested = (row for row in CIRCUMSTANCES if row.names & mentions.names and not row.names & _OF_ANY_CODE)
    row = next(tested, None)
    return _outside(mentions.missing, mentions.outside) if row is None else f"it reads {row.when}"


_OF_ANY_CODE = frozenset({"dtype", "device", "isinstance", "is_contiguous"})


def _outside(missing: Collection[str], outside: Collection[str]) -> str:
    if missing:
        return f"it may compute something else where `{next(iter(missing))}` is set from outside"
    return f"it reads `{next(iter(outside))}` outside of its modules, which may change" if outside else ""


class _Runs:
    """The runs of one module, and the names that any of them mentioned.

    Runs are in evaluation mode, and in training mode too once code mentions it.
    """

    def __init__(self, module: nn.Module, run: Run) -> None:
        self._module, self._run = module, run
        self.mentioned = frozenset(_partials(module))
        self.reads_outside = ""
        self._plain = {False: self._ran(False, ())}

    def differ(self, together: Sequence[State]) -> bool:
        """Return whether the code computes something else in these states, in evaluation or in training."""
        if True not in self._plain and "training" in self.mentioned:
            self._plain[True] = self._ran(True, ())
        return any(self._differs(training, plain, together) for training, plain in self._plain.items())

    def _differs(self, training: bool, plain: Ran, together: Sequence[State]) -> bool:
        try:
            return not plain.computes_as(self._ran(training, together))
        except Exception as error:  # noqa: BLE001 - foreign code in a state for which it was not made
            # On a simulated device, the code took a branch that needs the device.
            return reads_data(error) or (len(together) == 1 and together[0] in states.DEVICES)

    def _ran(self, training: bool, together: Sequence[State]) -> Ran:
        mentions = Mentions()
        try:
            ran = _run(self._module, self._run, together, mentions, training=training)
        finally:
            self.mentioned |= mentions.names
            self.reads_outside = self.reads_outside or _outside(mentions.missing, mentions.outside)
        self.mentioned |= ran.mentioned
        return ran


def _run(module: nn.Module, run: Run, together: Sequence[State], mentions: Mentions, *, training: bool) -> Ran:
    with ExitStack() as stack:
        stack.enter_context(training_mode(module, training))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        changes = [stack.enter_context(state.around(module)) for state in together]
        inside = next((state.inside for state in together if state.inside), nullcontext)

        @contextmanager
        def entered() -> Generator[None]:
            with inside(), TorchCallsIgnored():
                yield

        return observed(module, lambda: run(_all(changes), entered), mentions)


def _partials(module: nn.Module) -> Iterator[str]:
    """Yield the functions in `functools.partial` attributes of modules: calling one is not a profiler event."""
    for inner in module.modules():
        for attributes in (vars(inner), *map(vars, type(inner).__mro__)):
            parts = (cast("object", value) for value in attributes.values() if isinstance(value, partial))
            yield from (name for part in parts for name in own_names(part))


def _all(changes: Sequence[Given]) -> Given:
    def given(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        with unrecorded():  # calls of this function, not of the module
            result = tensor.detach().requires_grad_() * 1  # as hidden states are: no leaf
            for change in changes:
                result = change(result)
            return result

    return given
