"""Trainers for a compiled model. The compiler decides its placement, and processes exchange only its adapter.

`KTrainerMixin` is a base class before `transformers.Trainer` or a subclass of it. Refused: a model that ktc has not
compiled, training without an adapter, and FSDP or DeepSpeed, which would place the model themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel, get_peft_model_state_dict  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.foundation.files import files_into
from ktc.foundation.temporary_values import attributes
from ktc.model.attention.sinks import fused_sinks
from ktc.model.experts.streamed.shared_experts import Sharing
from ktc.model.loading.compiled_model import CompiledModel
from ktc.model.loading.trained_beside import write_record
from ktc.training.trainers import checkpoint_state, gradients
from ktc.training.trainers.checkpoints import checkpoints, write_checkpoint
from ktc.training.trainers.compiled_parts import CompiledParts
from ktc.training.trainers.expert_adapters import beside_experts
from ktc.training.trainers.fetch_ahead import FetchAhead, has_known_callbacks
from ktc.training.trainers.finite_gradients import GradientCheck
from ktc.training.trainers.frozen_beside import warn_of_frozen
from ktc.training.trainers.gradient_norm import KnownNorm, known_norm
from ktc.training.trainers.phases import PhaseClock
from ktc.training.trainers.private_api import (
    TrainerHooks,
    keep_in_place,
    package_of,
    prepares_inputs_itself,
    use_as_one_device,
)
from ktc.training.trainers.rank_liveness import RankLiveness, together
from ktc.training.trainers.report import report_of
from ktc.training.trainers.shared_experts import in_step, largest, shared_experts
from ktc.training.trainers.skipped_update import skip_nothing, skip_unless_finite, skips_alone
from ktc.training.trainers.stacking import Stacker, StackMode, reason_against
from ktc.training.trainers.trained_parameters import TrainedParameters, cleared_by, parameters_of

TRIED = frozenset({"SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer"})  # TRL's that tests run
# Packages whose `training_step` leaves gradients as backward wrote them.
_KNOWN_STEPS = frozenset({"transformers", "trl"})
_KNOWN_REASONS = {"RewardTrainer": "a reward model has its own head, and a compiled model is a causal LM"}


class KTrainerMixin(TrainerHooks):
    """A base class before a trainer of transformers 5.6 to 5.23 or TRL: `class T(KTrainerMixin, SFTTrainer)`.

    The model stays on the devices of its compilation, and neither DataParallel nor DDP wraps it. Several GPUs in one
    process are used as the placement says, and count as one for the batch size. Under torchrun every process has the
    whole model; in steps, those of a machine share the experts that are sent to its GPUs (`shared_experts.py`). The
    adapter starts as rank 0's, and its gradients are averaged once per optimizer step, before they are clipped. The
    loss is returned on `args.device`, independent of the device of the model's head. TRL's SFT, DPO, KTO, GRPO and
    RLOO trainers are tested; its others are refused when the class is created (T535).

    Args:
        stack_micro_batches: whether the micro-batches of a step share one pass over each layer's experts
            (`ktc.training.trainers.stacking`). If that is impossible, "auto" trains without it and "on" refuses (T540).
        compile_layers: whether stacked layers on a GPU with Triton run through `torch.compile`, except for their
            experts. It takes about a minute in a run's first step; layers that it cannot take are reported.

    Raises:
        InputRefused: T530 for a model that is not compiled, T531 for training without an adapter, T532 for FSDP and
            DeepSpeed, T533 for processes that train different parameters, T537 for Liger's code in place of experts.
        KtcError: T534 when another process is gone.
    """

    phase_clock: PhaseClock | None = None  # of a report, which counts the backward passes of stacked steps too
    _flops_of_token: int = 0
    only_calls_step: Callable[..., Tensor] | None = None  # a class's `training_step` that leaves gradients as they are
    _parameters: TrainedParameters | None = None  # while it trains
    _norm_of_step: KnownNorm | None = None
    _unread: GradientCheck | None = None  # of a step whose update is issued before its norm is read
    _reads_later = False  # whether it is read in the next step
    expert_adapters: str = ""  # where the factors on routed experts are
    _ahead: FetchAhead | None = None  # while it trains
    _sharing: Sharing | None = None  # of streamed experts, with the other processes of the machine
    _rank_liveness: RankLiveness | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a trainer of TRL that is not known to work on a compiled model.

        Raises:
            InputRefused: T535.
        """
        super().__init_subclass__(**kwargs)
        names = [base.__name__ for base in cls.__mro__ if base.__module__.startswith("trl.")]
        for name in names:
            if name.endswith("Trainer") and name != "_BaseTrainer" and name not in TRIED:
                message = f"`trl.{name}` is not known to train a compiled model"
                reason = _KNOWN_REASONS.get(name, "ktc's tests do not run it")
                hint = f"{reason}; known are {listing(sorted(TRIED))}"
                raise InputRefused(Diagnostic("T535", message, hint=hint))

    def __init__(
        self, *args: Any, stack_micro_batches: StackMode = "auto", compile_layers: bool = True, **kwargs: Any
    ) -> None:
        for settings in (*args, *kwargs.values()):
            if isinstance(settings, TrainingArguments):
                use_as_one_device(settings)  # some trainers read it before they create the accelerator
        super().__init__(*args, **kwargs)
        _check_compiled(cast("nn.Module", self.model))
        self.stacker = Stacker(self, stack_micro_batches, compiled=CompiledParts() if compile_layers else None)
        report_of(self)  # measures every run, and writes `ktc_report.json` at its end

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that casts and compiles, and neither places nor wraps."""
        _check_sharding(self.args)
        _check_liger(self.args)
        use_as_one_device(self.args)
        super().create_accelerator_and_postprocess()
        keep_in_place(self.accelerator)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the base trainer does.

        A checkpoint to resume from is checked before the base trainer reads it.

        Raises:
            InputRefused: T524 for a checkpoint that is damaged, or of another adapter or optimizer.
        """
        model = _checked_adapter(cast("nn.Module", self.model))
        warn_of_frozen(model)
        self._flops_of_token = 0
        beside = nullcontext("") if self._keeps_adapters() else beside_experts(model, self)
        noted = attributes(
            self,
            _parameters=None,
            _norm_of_step=None,
            _unread=None,
            _reads_later=False,
            _waiting_log=None,
            _ahead=FetchAhead(self),
        )
        filtered = attributes(self.args, logging_nan_inf_filter=self.args.logging_nan_inf_filter)  # in any end
        with filtered, fused_sinks(model), beside as self.expert_adapters, noted:
            alone = prepares_inputs_itself(self) or self.model_init is not None
            shared = nullcontext() if alone else shared_experts(model)
            with cleared_by(model, self._clear_gradients), shared as self._sharing:
                try:
                    return self._train(model, resume_from_checkpoint, *args, **kwargs)
                finally:
                    self.stacker.drop_graphs()
                    skip_nothing(self.optimizer)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict as the base trainer does, also with the memory of a step's graphs."""
        self.stacker.drop_graphs()
        return super().evaluation_loop(*args, **kwargs)

    @property
    def shares_experts(self) -> bool:
        """Whether the processes of the machine share the experts that are sent to its GPUs."""
        return self._sharing is not None

    def most_of_processes(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each value over the processes that share experts: they run each pass together."""
        return [*values] if self._sharing is None else largest(values, self._groups["cpu"])

    def _keeps_adapters(self) -> bool:
        """Return whether adapters of experts stay in host memory: the CPU reads them, or another model trains."""
        alone = bool(reason_against(self, cast("nn.Module", self.model)))
        other_groups = gradients.distributed() and not gradients.by_nccl()
        return alone or prepares_inputs_itself(self) or self.model_init is not None or other_groups

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the stock number of a micro-batch's FLOPs. The stock trainer counts all parameters each time."""
        name = getattr(cast("Any", self.model), "main_input_name", "input_ids")
        ids = cast("Mapping[str, Any]", inputs).get(name) if isinstance(inputs, Mapping) else None  # GRPO has lists
        tokens = ids.numel() if isinstance(ids, Tensor) else 0
        if not tokens:
            return cast("int", cast("Any", super()).floating_point_ops(inputs))
        if not self._flops_of_token:
            self._flops_of_token = cast("int", cast("Any", super()).floating_point_ops(inputs)) // tokens
        return self._flops_of_token * tokens

    def _train(self, model: PeftModel, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        resume = resume_from_checkpoint or None
        if resume is True:
            resume = next(iter(checkpoints(Path(cast("str", self.args.output_dir)))), None)
        if resume is not None and Path(resume).is_dir():
            self.create_optimizer()
            _check_state(Path(resume), model, cast("Optimizer", self.optimizer))
        if not gradients.distributed():
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self._rank_liveness = RankLiveness()
        with together(self._rank_liveness, self.args.output_dir):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any) -> Any:
        """Return the micro-batches of an optimizer step. The processes count their tokens together."""
        self._barrier()
        if self._ahead is not None:
            epoch_iterator = self._ahead.iterator(epoch_iterator, num_batches)
        return cast("Any", super()).get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)

    def while_computing(self) -> None:
        """Log the step before, and fetch the micro-batches of the next one. The GPU computes those of this one."""
        self.log_now()
        if self._ahead is not None:
            with nullcontext() if self.phase_clock is None else self.phase_clock.fetching_ahead():
                self._ahead.fetch(self.args.device)

    def on_model_prepared(self) -> None:
        """Note the parameters, and start every process from rank 0's adapter, what the optimizer has frozen included.

        Raises:
            InputRefused: T533.
        """
        model = cast("PeftModel", self.model)
        self._parameters = TrainedParameters(model)
        if not gradients.distributed():
            return
        of_optimizer = parameters_of(self.optimizer)
        named = [pair for pair in model.named_parameters() if pair[1].requires_grad or id(pair[1]) in of_optimizer]
        parameters = [parameter for _, parameter in named]
        self._groups = gradients.open_groups(parameters, timedelta(seconds=self.args.ddp_timeout))
        gradients.check_alike(named, self._groups)
        gradients.broadcast(parameters, self._groups)

    def norm_of_gradients(self) -> KnownNorm | None:
        """Return the norm of `training_step`, None if a subclass's may have changed gradients since."""
        return self._norm_of_step if self._step_is_last else None

    @property
    def _step_is_last(self) -> bool:
        """Whether no subclass has code behind `training_step`."""
        known = (KTrainerMixin.training_step, type(self).only_calls_step)
        return type(self).training_step in known and "training_step" not in vars(self)

    def trained_parameters(self) -> Sequence[Parameter]:
        """Return the parameters that train in this step: a callback may freeze some, or add an adapter."""
        return [] if self._parameters is None else self._parameters.trained(self.optimizer)

    def _clear_gradients(self) -> bool:
        if self._parameters is not None:
            self._parameters.clear(self.optimizer)
        return self._parameters is not None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the adapter, with a record of the experts that it was trained with (`ktc.model.loading.trained_beside`).

        Each file is replaced as a whole, unless it belongs to a checkpoint, which is whole or absent itself.
        """
        folder = Path(output_dir or cast("str", self.args.output_dir))
        beside = self._writes and not _internal_call and not self.args.push_to_hub
        with files_into(folder) if beside else nullcontext(folder) as draft:
            super().save_model(str(draft), _internal_call)
            if self._writes and draft.is_dir():
                write_record(draft, cast("nn.Module", self.model))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the README.md of TRL's trainers as a whole; they write it before every checkpoint."""
        run = cast("str", self.args.output_dir)
        beside = files_into(Path(run)) if self._writes else nullcontext(Path(run))
        with beside as draft, attributes(self.args, output_dir=str(draft)):
            cast("Any", super()).create_model_card(*args, **kwargs)

    def save_checkpoint(self, run: Path, save: Callable[[Path], None]) -> None:
        """Write a checkpoint that is whole or absent, with all processes.

        Raises:
            HostLacks: T529 where the machine fails; the earlier checkpoints remain.
        """
        write_checkpoint(run, self.state, save, self._barrier, writes=self._writes, keep=self.args.save_total_limit)

    @property
    def _writes(self) -> bool:
        """Whether this process is the one that writes for its machine or for the run."""
        return cast("bool", self.args.should_save)

    def _barrier(self) -> None:
        if self._rank_liveness is not None:
            self._rank_liveness.arrive()
            gradients.barrier(self._groups)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of one micro-batch. The last one of an optimizer step averages the gradients.

        Raises:
            KtcError: T548 for a gradient that is not finite.
        """
        with in_step(self._sharing):
            loss = self.stacker.training_step(super().training_step, *args, **kwargs)
        ends_step = cast("bool", self.accelerator.sync_gradients)
        self._norm_of_step = None
        if ends_step:  # of the step before, where this one was not stacked
            self.read_now()
            self.log_now()
        waits = not (ends_step and self._runs_ahead())
        if self._rank_liveness is not None and ends_step:  # before the check, for which the host waits for the GPU
            self._rank_liveness.arrive()
            waits = gradients.average_gradients(self.trained_parameters(), self._groups, waits=waits)
        if ends_step and self.accelerator.scaler is None:  # which leaves such steps out itself
            known = package_of(super().training_step) in _KNOWN_STEPS
            self._begin_check(as_written=known and self._rank_liveness is None)
            self._reads_later = not waits and self._unread is not None
        if ends_step and self._step_is_last and self._parameters is not None:  # which `train` sets back
            self.stacker.leave_check_out()
        return loss.to(self.args.device)

    def _begin_check(self, *, as_written: bool) -> None:
        """Compute the norm of the gradients. The host reads it now, or behind the update where nothing can notice.

        Raises:
            KtcError: T548.
        """
        trained, run = self.trained_parameters(), Path(cast("str", self.args.output_dir))
        if not any(parameter.grad is not None for parameter in trained):
            return
        model, step = cast("nn.Module", self.model), self.state.global_step + 1
        check = GradientCheck(model, trained, step, run, as_written=as_written)
        if not (self._is_unnoticed() and skips_alone(self.optimizer, trained)):
            self._norm_of_step = known_norm(check.norm, check.read(), trained)
            return
        spoilt = skip_unless_finite(self.optimizer, trained, check.norm)
        check.send(spoilt)
        self._unread, self._norm_of_step = check, known_norm(check.norm, None, trained, spoilt)

    def _is_unnoticed(self) -> bool:
        """Return whether no code of others can see gradients that are not finite."""
        return self._step_is_last and self.clips_as_stock and has_known_callbacks(self)

    def _runs_ahead(self) -> bool:
        """Return whether the host may begin the next step before the GPU has ended this one.

        The gradients wait in the memory of graphs for that, which holds them in any case.
        """
        alone = self.stacker.replays and self._is_unnoticed() and self.logs_as_stock
        return alone and skips_alone(self.optimizer, self.trained_parameters())

    def on_update_issued(self) -> None:
        """Read the norm of a step whose update has been issued, here or later.

        Raises:
            KtcError: T548.
        """
        if self._unread is not None:
            skip_nothing(self.optimizer)
            if not self._reads_later:
                self.read_now()

    def read_now(self) -> None:
        """Read the norm of the step before, if it is not read yet.

        Raises:
            KtcError: T548.
        """
        check, self._unread = self._unread, None
        if check is not None:
            check.read()

    @property
    def logs_later(self) -> bool:
        """Whether a step that has ended is logged in the next one: no evaluation, checkpoint or end is due."""
        control, epoch = cast("Any", self.control), cast("float | None", cast("Any", self.state).epoch)
        due = control.should_evaluate or control.should_save or control.should_epoch_stop
        ends = control.should_training_stop or (epoch is not None and float(epoch).is_integer())
        return self._reads_later and not due and not ends


class KTrainer(KTrainerMixin, Trainer):
    """`transformers.Trainer` for a compiled model."""


def _check_compiled(model: nn.Module) -> None:
    if not any(isinstance(module, CompiledModel) for module in model.modules()):
        message = f"ktc's trainers need a model that ktc has compiled, found a `{type(model).__name__}`"
        hint = "load the compiled folder (`ktc.load(OUT)`), or use the stock trainer for this model"
        raise InputRefused(Diagnostic("T530", message, hint=hint))


def _checked_adapter(model: nn.Module) -> PeftModel:
    if not isinstance(model, PeftModel):
        message = "the model has no adapter to train: a compiled base is neither trained nor saved"
        hint = "`get_peft_model(model, package.lora_config())`, or another `LoraConfig`"
        raise InputRefused(Diagnostic("T531", message, hint=hint))
    return model


def _check_state(checkpoint: Path, model: PeftModel, optimizer: Optimizer) -> None:
    """Refuse a checkpoint that does not fit this model and optimizer; the Trainer itself checks nothing."""
    if fault := next(filter(None, checkpoint_state.faults(checkpoint, complete=False)), ""):
        hint = "resume from an earlier checkpoint, or start again without one (`ktc train --force`)"
        raise InputRefused(Diagnostic("T524", f"checkpoint `{checkpoint}` is damaged: {fault}", hint=hint))
    misfits: list[str] = []
    for name in cast("Mapping[str, object]", model.peft_config):
        folder = checkpoint if name == "default" else checkpoint / name  # where PEFT saves an adapter of that name
        tensors: Mapping[str, Tensor] = get_peft_model_state_dict(model, adapter_name=name)
        shapes = {tensor: tuple(value.shape) for tensor, value in tensors.items()}
        misfits.append(checkpoint_state.adapter_fault(folder, shapes))
    if fault := next(filter(None, misfits), "") or checkpoint_state.optimizer_fault(checkpoint, optimizer):
        hint = "resume with the adapter and the optimizer that it was saved with, or start again without it"
        raise InputRefused(Diagnostic("T524", f"checkpoint `{checkpoint}` does not fit this run: {fault}", hint=hint))


def _check_sharding(args: TrainingArguments) -> None:
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            message = f"`{name}` would place the weights of a compiled model, which its compilation has placed"
            hint = f"leave `{name}` out; several processes need only torchrun"
            raise InputRefused(Diagnostic("T532", message, hint=hint))


def _check_liger(args: TrainingArguments) -> None:
    # Liger binds its own `forward`, which reads stock weights, to the module of experts.
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("swiglu", True):
        message = "`use_liger_kernel` would compute the experts by Liger's code, and a compiled model has packed them"
        hint = 'keep the compiled experts: `liger_kernel_config={"swiglu": False}`'
        raise InputRefused(Diagnostic("T537", message, hint=hint))
