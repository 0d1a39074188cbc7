"""Every private name of torch and transformers that training uses, and every method of theirs that it replaces.

In: modules, trainers and training arguments of those packages. Out: the functions that ktc's trainers need, by public
names. A docstring says why no public name suffices. All of it holds from the oldest to the newest release of
`ktc/foundation/versions.py`; `tests/training/trainers/test_private_api.py` checks each name there (`make versions`).
No other file of this room may use a private name.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Trainer, TrainingArguments, masking_utils

from ktc.foundation.temporary_values import attributes
from ktc.model.hf.patching import Patch, with_attributes
from ktc.model.kernels.sent_values import SentValues
from ktc.training.trainers import gradient_norm

log = logging.getLogger(__name__)
__all__ = ["pytree"]  # torch has no public module of nested containers; torch.compile's own inputs go through this one

_transformers_trainer = cast("Any", inspect.getmodule(Trainer))

if TYPE_CHECKING:
    _Trainer = Trainer
else:
    _Trainer = object


# torch: compilation ---------------------------------------------------------------------------------------------------
_exceptions = cast("Any", torch)._dynamo.exc
CompilerError: tuple[type[Exception], ...] = (
    _exceptions.TorchDynamoException,
    *([_exceptions.FailOnRecompileLimitHit] if hasattr(_exceptions, "FailOnRecompileLimitHit") else []),
)
"""All refusals and failures of `torch.compile`; torch has no public names for them."""


def with_fixed_width(x: Tensor) -> None:
    """Make `torch.compile(dynamic=True)` take the last dimension of `x` as a constant.

    `torch.compile` has an option for all dimensions or none.
    """
    cast("Any", torch)._dynamo.mark_static(x, x.ndim - 1)


def sizes_of_their_own() -> AbstractContextManager[None]:
    """Compile code inside the context with one symbol per dimension.

    By default dimensions of equal size share a symbol: code compiled where a batch has as many tokens as a head has
    channels would be for that number of tokens alone. The setting's own `patch` makes a class for each call.
    """
    return attributes(cast("Any", torch).fx.experimental._config, use_duck_shape=False)


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the children of a module, to replace one in less time than `nn.Module.__setattr__` takes."""
    return cast("Any", module)._modules


def hooks_of_all_modules() -> bool:
    """Return whether a hook is called with every module; the registered ones have no public name."""
    names = cast("Any", nn.modules.module)
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(names, f"_global_{kind}") for kind in kinds)


# torch: captures ------------------------------------------------------------------------------------------------------
def end_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """End what the capture of a graph in `pool` began on a device, where it failed.

    `CUDAGraph.capture_end` raises before it has ended the allocator's part, which then frees no memory that several
    streams used; random numbers may still be those of a graph. No public function ends either.
    """
    library = cast("Any", torch)._C
    end, release = (getattr(library, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if end is not None and release is not None:
        try:
            end(device.index, pool)
            release(device.index, pool)
        except RuntimeError:  # that part has ended, and the graph itself releases the pool
            log.debug("the allocator of %s captures nothing", device)
    for generator in torch.cuda.default_generators[device.index : device.index + 1]:
        generator.graphsafe_set_state(generator.clone_state())


# torch: optimizers ----------------------------------------------------------------------------------------------------
def steps_as_its_class(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the `step` of this one object is its class's, with no hook but ktc's own.

    A learning-rate schedule wraps it to count its calls. The wrapper has no public mark, and hooks have no public list.
    """
    names = cast("Any", vars(optimizer))
    inner, step = cast("Any", inspect.getmodule(torch.optim.Optimizer)), names.get("step")
    kinds = [getattr(inner, f"_global_optimizer_{kind}_hooks", {}) for kind in ("pre", "post")]
    kinds += [names.get(f"_optimizer_step_{kind}_hooks", {}) for kind in ("pre", "post")]
    hooks = [hook for kind in kinds for hook in kind.values()]
    counted = hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is type(optimizer).step
    return (step is None or counted) and {*map(package_of, hooks)} <= {"ktc"}


# torch: processes -----------------------------------------------------------------------------------------------------
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to others of their shapes, on a GPU by few launches; torch has no public name for it."""
    cast("Any", torch)._foreach_copy_([*targets], [*sources])


@contextmanager
def in_one_call(group: Any) -> Generator[None]:
    """Send the `all_reduce` calls inside the context, of one dtype and one operation, as one call of a group.

    `dist.all_reduce_coalesced` is deprecated, and its message names this context. After an error torch would
    continue to note calls of the group, and send none.
    """
    inner = cast("Any", dist).distributed_c10d
    try:
        with inner._coalescing_manager(group):
            yield
    finally:
        inner._world.pg_coalesce_state.pop(group or dist.group.WORLD, None)


@contextmanager
def without_masks() -> Generator[None]:
    """Let the functions of transformers that make masks return any mask, for layers that read none.

    They ask the device whether rows are packed or a mask hides anything, for which the host would wait. Every model of
    the process gets such a mask inside the context.
    """
    stock: Callable[..., Any] = cast("Any", masking_utils)._preprocess_mask_arguments
    signature = inspect.signature(stock)

    def given(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["attention_mask"] = torch.zeros(1, 1, 1, 1)  # one of four dimensions is returned as it is
        return stock(*bound.args, **bound.kwargs)

    with attributes(masking_utils, _preprocess_mask_arguments=given):
        yield


def positions_follow() -> AbstractContextManager[Any]:
    """Let the functions of transformers that make masks take positions as those of one sequence in each row.

    They ask the device whether rows are packed, for which the host would wait.
    """

    def of_one_sequence(position_ids: Tensor) -> None:
        """Return what the stock function does where each position is the one before plus one."""

    if not hasattr(masking_utils, "find_packed_sequence_indices"):
        return nullcontext()
    return attributes(masking_utils, find_packed_sequence_indices=of_one_sequence)


def store_of_the_run(prefix: str) -> Any:
    """Return the key-value store that launched this run of several processes, its keys below `prefix`.

    A store opened by ktc would need an address and a port of its own in every launcher; `_get_default_store` gives the
    one that `init_process_group` received.
    """
    distributed = cast("Any", dist)
    return distributed.PrefixStore(prefix, distributed.distributed_c10d._get_default_store())


# transformers: arguments and losses -----------------------------------------------------------------------------------
def use_as_one_device(args: TrainingArguments) -> None:
    """Make the Trainer see one GPU. With more, it wraps the model in DataParallel and multiplies the batch size.

    `n_gpu` has no setter, and hiding the other GPUs by the environment would hide them from the placement too.
    """
    if args.n_gpu > 1:
        cast("Any", args)._n_gpu = 1


def send_to_log(trainer: Trainer, losses: Sequence[Tensor]) -> SentValues:
    """Send what `sum_as_logged` reads to the host: the running loss and the losses of a step."""
    return SentValues(torch.stack([_running_loss(trainer, losses), *losses]))


def _running_loss(trainer: Any, losses: Sequence[Tensor]) -> Tensor:
    return torch.as_tensor(getattr(trainer, "_tr_loss", 0.0)).to(losses[0])  # absent until `train` has begun


def sum_as_logged(trainer: Trainer, losses: Sequence[Tensor], sent: SentValues | None = None) -> float:
    """Return the sum that the Trainer would have added to its running loss, if it had received the losses one by one.

    The values of the losses may have been `sent` by `send_to_log`.

    With `logging_nan_inf_filter` an infinite loss or NaN counts as the running mean: `_tr_loss` over the steps since
    the last log, `_globalstep_last_logged`. The Trainer applies that filter per call, and keeps both to itself.
    """
    inner = cast("Any", trainer)
    steps = 1 + trainer.state.global_step - getattr(inner, "_globalstep_last_logged", 0)
    first, *values = cast("list[float]", (sent or send_to_log(trainer, losses)).read())
    total = first
    for value in values:
        total += value if math.isfinite(value) or not trainer.args.logging_nan_inf_filter else total / steps
    return total - first


def prepared_inputs(trainer: Trainer, inputs: Mapping[str, Any]) -> Any:
    """Return a micro-batch as `training_step` would give it to the model: moved to the device of the inputs."""
    return cast("Any", trainer)._prepare_inputs(dict(inputs))


def prepares_inputs_itself(trainer: Trainer) -> bool:
    """Return whether this class of trainer overrides `_prepare_inputs`, as trainers that generate their batches do."""
    return cast("Any", type(trainer))._prepare_inputs is not cast("Any", Trainer)._prepare_inputs


def add_sft_metrics(trainer: Any, entropies: Sequence[float], accuracies: Sequence[float], tokens: int) -> None:
    """Add metrics of micro-batches to those that TRL's `SFTTrainer` logs: means over micro-batches, and all tokens.

    It collects them in `_metrics` and `_total_train_tokens`, and has no method that adds some.
    """
    metrics = trainer._metrics["train"]
    metrics["entropy"] += entropies
    metrics["mean_token_accuracy"] += accuracies
    trainer._total_train_tokens += tokens
    metrics["num_tokens"] = [trainer._total_train_tokens]


def with_all_positions(utilities: Any) -> AbstractContextManager[None]:
    """Make the head of TRL, whose module these are, compute all positions and not the learned alone.

    Their number is known on the GPU, and the host waits for it in forward and in backward. `_use_triton` decides that
    by the device and has no argument; the kernels read a name of their own.
    """

    def computes_the_learned(device: torch.device) -> bool:
        return False

    if not hasattr(utilities, "_use_triton"):
        return nullcontext()
    return attributes(utilities, _use_triton=computes_the_learned)


def has_head_of_trl(module: nn.Module) -> bool:
    """Return whether the `forward` of this one object is the one that TRL's `add_fused_lm_head` puts there.

    It calls the class's own parts, and has no public mark.
    """
    forward = vars(module).get("forward")
    return getattr(forward, "__self__", None) is module and package_of(forward) == "trl"


def modules_with_tensors(module: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield a module and those in it, with the parameters and buffers of each itself.

    The public iterators make names and look for repetitions, which takes ten times as long.
    """
    inside = cast("Any", module)
    yield module, [tensor for tensor in (*inside._parameters.values(), *inside._buffers.values()) if tensor is not None]
    for child in cast("Iterator[nn.Module | None]", inside._modules.values()):
        if child is not None:
            yield from modules_with_tensors(child)


def has_hooks(parameter: nn.Parameter) -> bool:
    """Return whether something is called with the gradient of a parameter, before or after it is added."""
    hooked = cast("Any", parameter)
    return bool(hooked._backward_hooks or hooked._post_accumulate_grad_hooks)


def lets_inputs_train(hook: Any) -> bool:
    """Return whether a hook is the one of transformers or PEFT by which the outputs of embeddings require gradients.

    It belongs to gradient checkpointing, and is a function inside of a method.
    """
    known = getattr(hook, "__name__", "") in ("make_inputs_require_grads", "make_inputs_require_grad")
    return known and package_of(hook) in ("transformers", "peft")


def package_of(function: Any) -> str:
    """Return the package that a function's or a method's code was written in, "" if it has none in Python.

    `__module__` is a copy of the wrapped function's where `functools.wraps` was used.
    """
    names: dict[str, Any] = getattr(getattr(function, "__func__", function), "__globals__", {})
    return str(names.get("__name__", "")).partition(".")[0]


def wraps_forward_in_autocast(module: nn.Module) -> bool:
    """Return whether the `forward` of this one object is the class's own inside the autocasting of accelerate.

    `Accelerator.prepare_model` puts it there. It also keeps the one before as `_original_forward`, which stays where
    another `forward` replaces accelerate's.
    """
    forward = vars(module).get("forward")
    code: Any = getattr(forward, "__func__", None) if getattr(forward, "__self__", None) is module else None
    if code is type(module).forward:
        return False
    while code is not None and code is not type(module).forward:
        of_accelerate = package_of(code if hasattr(code, "__globals__") else type(code).__call__)
        code = getattr(code, "__wrapped__", None) if of_accelerate in ("accelerate", "torch") else None
    return code is not None


# transformers: the trainer's hooks ------------------------------------------------------------------------------------
class TrainerHooks(_Trainer):
    """A base class before a trainer: steps inside `Trainer`, as methods with public names."""

    _writing: Path | None = None  # below which a checkpoint is written
    _waiting_log: Callable[[], None] | None = None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where its compilation put it.

        `TrainingArguments.place_model_on_device` is a property that only a subclass changes, and the arguments are
        the user's.
        """

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = cast("Any", super())._prepare_for_training(*args, **kwargs)
        self.on_model_prepared()
        return prepared

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clip the gradients of what trains: a walk through all modules takes longer than the norm."""
        trained, stock = self.trained_parameters(), cast("Any", super())._clip_grad_norm

        def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
            return iter(trained) if recurse else type(model).parameters(model, recurse=False)

        alone = with_attributes(model, parameters=parameters) if trained else nullcontext()
        with alone, gradient_norm.known(self.norm_of_gradients() if self.clips_as_stock else None):
            return stock(model)

    @property
    def clips_as_stock(self) -> bool:
        """Whether no class clips by code of its own, which may change gradients unseen (`.data`)."""
        stock = cast("Any", super())._clip_grad_norm
        is_whole = type(self)._clip_grad_norm is TrainerHooks._clip_grad_norm and "_clip_grad_norm" not in vars(self)
        return is_whole and getattr(stock, "__func__", None) is cast("Any", Trainer)._clip_grad_norm

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save behind a step, or log it later, where `logs_later` says so.

        The values of a log are read from the GPU, for which the host would wait before it gives it the next step.
        """
        stock = cast("Any", super())._maybe_log_save_evaluate
        self.log_now()
        if not self.logs_later:
            self.read_now()
            stock(tr_loss, grad_norm, *args, **kwargs)
            return
        if not self.control.should_log or self.state.global_step <= cast("Any", self)._globalstep_last_logged:
            return
        self.control.should_log = False
        loss = SentValues(_transformers_trainer.nested_gather(tr_loss, self.args.parallel_mode).mean())
        norm = SentValues(grad_norm) if isinstance(grad_norm, Tensor) else None
        dtype = tr_loss.dtype
        tr_loss -= tr_loss  # as the stock method does

        def as_it_is(value: Tensor, *_: Any) -> Tensor:
            return value  # the mean of all processes

        def log() -> None:
            only = attributes(cast("Any", self.control), should_log=True, should_evaluate=False, should_save=False)
            one = with_attributes(_transformers_trainer, nested_gather=as_it_is)
            with (
                only,
                one,
                with_attributes(self, store_flos=lambda: None),
            ):  # which the next checkpoint does, and the end
                stock(torch.tensor(loss.read(), dtype=dtype), norm.read() if norm else grad_norm, *args, **kwargs)

        self._waiting_log = log

    def log_now(self) -> None:
        """Log the step that waits for it, if one does."""
        log, self._waiting_log = self._waiting_log, None
        if log is not None:
            log()

    @property
    def logs_as_stock(self) -> bool:
        """Whether the log of a step is the stock one, of values that the next step does not change."""
        ours, stock = type(self), Trainer
        other = "log" in vars(self) or ours.log is not stock.log
        counted = getattr(self.args, "include_num_input_tokens_seen", "no") not in ("no", False)
        return (
            not other and not counted and hasattr(_transformers_trainer, "nested_gather") and self._ends_steps_as_stock
        )

    @property
    def _ends_steps_as_stock(self) -> bool:
        stock = cast("Any", super())._maybe_log_save_evaluate
        return getattr(stock, "__func__", None) is cast("Any", Trainer)._maybe_log_save_evaluate

    @property
    def logs_later(self) -> bool:
        """Whether the step that has ended is logged while the next one is computed."""
        return False

    def read_now(self) -> None:
        """Read what was not waited for."""

    def norm_of_gradients(self) -> gradient_norm.KnownNorm | None:
        """Return the norm of the gradients of what trains, if it is known."""
        return None

    def trained_parameters(self) -> Sequence[nn.Parameter]:
        """Return all parameters that can have a gradient, or none if they are not known."""
        return ()

    def _get_output_dir(self, trial: Any) -> str:
        """Return the run's folder, or the one below which a checkpoint is being written."""
        return str(self._writing or cast("Any", super())._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint where `save_checkpoint` says. The callback `on_save` comes when it has been written."""
        stock = cast("Any", super())._save_checkpoint
        self.read_now()
        self.log_now()

        def save(folder: Path) -> None:
            with attributes(self, _writing=folder):
                stock(model, trial)

        self.save_checkpoint(Path(self._get_output_dir(trial)), save)

    def save_checkpoint(self, run: Path, save: Callable[[Path], None]) -> None:
        """Call `save` with the folder below which `checkpoint-N` is to be written; `run` is where it belongs."""
        save(run)

    def on_model_prepared(self) -> None:
        """Run after the optimizer exists and before the first step.

        `on_train_begin`, the first callback, comes after a checkpoint has been read, and the order of callbacks is not
        ours.
        """


# accelerate and transformers: methods of one object -------------------------------------------------------------------
class _InPlace(Patch):
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        # without DistributedDataParallel, which accelerate skips in evaluation mode
        return cast("Any", super()).prepare_model(model, device_placement=False, evaluation_mode=True)

    def verify_device_map(self, model: nn.Module) -> bool:
        return False  # with a device map, accelerate refuses to train in several processes

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if norm_type != 2:
            return cast("Any", super()).clip_grad_norm_(parameters, max_norm, norm_type)
        cast("Any", self).unscale_gradients()
        return gradient_norm.clip(parameters, max_norm)


def keep_in_place(accelerator: Any) -> None:
    """Make the accelerator cast and compile, but neither place the model nor wrap it. It clips with all threads.

    Its settings turn off either only for the whole accelerator, data included.
    """
    _InPlace.put_on(accelerator)


def observe_steps(
    trainer: Any,
    fetching: Callable[[], AbstractContextManager[None]],
    fetched: Callable[[Any], None],
    backward: Callable[[], AbstractContextManager[None]],
) -> None:
    """Enter `fetching` around the fetching of a step's batches, hand them to `fetched`, and enter `backward` around
    every backward pass.

    No callback of the Trainer is called there.
    """
    fetch, run_backward = trainer.get_batch_samples, trainer.accelerator.backward

    def observed_fetch(*args: Any, **kwargs: Any) -> Any:
        with fetching():
            batches, *others = fetch(*args, **kwargs)
        fetched(batches)
        return batches, *others

    def observed_backward(*args: Any, **kwargs: Any) -> None:
        with backward():
            run_backward(*args, **kwargs)

    trainer.get_batch_samples, trainer.accelerator.backward = observed_fetch, observed_backward
