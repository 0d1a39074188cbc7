"""`Stacker`: the micro-batches of one optimizer step share one pass over each layer's experts.

In: the arguments of `Trainer.training_step`, call by call. Out: the loss of each call, which is zero until the last
micro-batch of a step arrives. Then the whole stack runs and the sum of its losses is returned. The trainer's own code
computes every micro-batch's loss, so that weights, masks, logging and metrics are those of separate micro-batches.
Refused (T540): stacking that was requested but is impossible.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.experts.gpu.compiled_functions import has_compiler
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.trained import host_factors
from ktc.model.hf.stock_model import finds_positions
from ktc.model.kernels.sent_values import SentValues
from ktc.training.trainers.chunked_loss import causal_model, loss_bytes, reason_for_whole_logits, tokens_of_losses
from ktc.training.trainers.compiled_parts import CompiledParts
from ktc.training.trainers.embed_and_head import EmbedAndHead, TrainingStep
from ktc.training.trainers.finite_filter import FiniteFilter
from ktc.training.trainers.joined_inputs import Batch, Inputs, sums_over_rows
from ktc.training.trainers.layer_calls import ModelCall, divided, in_chunks, is_divisible
from ktc.training.trainers.layer_pass import through_layers
from ktc.training.trainers.own_losses import own_losses_of
from ktc.training.trainers.part_clock import span
from ktc.training.trainers.pass_graphs import PassGraphs
from ktc.training.trainers.phases import PhaseClock
from ktc.training.trainers.private_api import prepares_inputs_itself, send_to_log, sum_as_logged
from ktc.training.trainers.random_state import states_of_all
from ktc.training.trainers.recorded_step import RecordedStep, Recorder
from ktc.training.trainers.several_lengths import HiddenPadding, as_batch
from ktc.training.trainers.split_layer import CannotStack, SplitLayer, fused_in, split_layers
from ktc.training.trainers.stack_size import (
    CHUNKS,
    MANY,
    bytes_per_pair,
    coming_bytes,
    expert_bytes,
    free_bytes,
    prepare_experts,
)
from ktc.training.trainers.step_passes import PassMemory, Stacking, StepSizes, fewest_passes, passes, with_padding

log = logging.getLogger(__name__)

StackMode = Literal["auto", "on", "off"]


class Stacker(TrainerCallback):
    """The micro-batches of a step, and a callback of their trainer. `trainer` is a `transformers.Trainer`.

    `mode` is the user's setting: `auto` stacks if possible and memory allows, `on` refuses (T540) if it is impossible.
    Without `chunk_tokens` a step decides them from the free memory, again where its sizes are not those of the step
    before. With `compiled`, parts of layers are compiled on the devices that it names.
    """

    def __init__(
        self,
        trainer: Any,
        mode: StackMode = "auto",
        chunk_tokens: int | None = None,
        compiled: CompiledParts | None = None,
    ) -> None:
        if mode not in ("auto", "on", "off"):
            message = f"`stack_micro_batches` is `auto`, `on` or `off`, not `{mode}`"
            raise InputRefused(Diagnostic("T541", message, hint="leave it out: `auto` stacks if possible"))
        self._trainer, self._mode, self._chunk_tokens, self._compiled = trainer, mode, chunk_tokens, compiled
        self._waiting: list[Inputs] = []
        self._layers: tuple[SplitLayer, ...] = ()
        self._recorder: Recorder | None = None  # of the model's code around its layers
        self._around: EmbedAndHead | None = None  # that code
        # None before the first step. Stacking ends only if the first stack shows that it is impossible.
        self.decision: Stacking | None = None
        self._decided_for: StepSizes | None = None
        self._padding: HiddenPadding | None = None  # of the layers
        self._pads = False  # whether layers have padded a batch of the step
        self._in_one_run = 0  # the tokens of several micro-batches that may have their losses together
        self._told: set[Stacking] = set()
        self._graphs = PassGraphs()
        self._finite = FiniteFilter(trainer.args)
        self._is_finite = False  # the loss of the step
        self._sent: tuple[int, SentValues] | None = None  # losses of the step, and their number
        trainer.add_callback(self)

    def compiles(self, model: nn.Module) -> bool:
        """Return whether the first step compiles layers, which takes about a minute."""
        on_gpu = any(parameter.is_cuda for parameter in model.parameters())
        stacks = self._mode != "off" and not reason_against(self._trainer, model)
        return self._compiled is not None and stacks and on_gpu and has_compiler()

    @property
    def is_on(self) -> bool:
        """Whether micro-batches are stacked, as far as is known."""
        return self.decision is not None and self.decision.on

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin without what graphs and masks of an earlier run have shown."""
        self._graphs.begin_run()
        if self._padding is not None:
            self._padding.forget()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Drop the micro-batches of a step that was not finished, because the epoch was stopped."""
        self._waiting = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Free the memory of graphs for an evaluation."""
        if control.should_evaluate:
            self.drop_graphs()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the trainer read and log what it has not waited for; `eval_strategy="epoch"` decides here."""
        self._tell_trainer("read_now")
        self._tell_trainer("log_now")
        self.on_step_end(args, state, control)

    def drop_graphs(self) -> None:
        """Free the memory of graphs, which passes that repeat capture again."""
        self._graphs.drop()

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """Set the trainer's arguments back: the loss of a waiting micro-batch has been passed over."""
        self._finite.restore()

    on_pre_optimizer_step = on_substep_end  # the loss of a whole step

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Let the trainer read what it has not waited for."""
        self._tell_trainer("on_update_issued")

    def _tell_trainer(self, name: str) -> None:
        """Call a method of KTrainer; other trainers do not have it."""
        method: Callable[[], None] | None = getattr(self._trainer, name, None)
        if method is not None:
            method()

    @property
    def replays(self) -> bool:
        """Whether layers are replayed as CUDA graphs, which keep the memory of gradients."""
        return self._graphs.captured

    def leave_check_out(self) -> None:
        """Leave the trainer's check of the step's loss out, of which the host knows that it is finite."""
        if self._is_finite:
            self._finite.leave_out()

    def training_step(
        self, stock_step: TrainingStep, model: nn.Module, inputs: Inputs, num_items: Any = None
    ) -> Tensor:
        """Return the loss of this call. `stock_step(model, inputs, num_items)` computes one micro-batch."""
        self._is_finite = False
        if self.decision is None:
            self._decide(model)
        if self.decision is not None and not self.decision.on:
            return stock_step(model, inputs, num_items)
        self._waiting.append(inputs)
        if not self._trainer.accelerator.sync_gradients:
            self._finite.leave_out()
            return torch.zeros((), device=self._trainer.args.device)
        waiting, self._waiting = self._waiting, []
        return self._step(stock_step, model, waiting, num_items)

    def _decide(self, model: nn.Module) -> None:
        """Decide as far as possible before the first step; the rest follows when its micro-batches are known."""
        if self._layers:
            return
        try:
            against = "it was turned off" if self._mode == "off" else reason_against(self._trainer, model)
            if against:
                raise CannotStack(against)
            self._layers = split_layers(model)
            self._recorder = Recorder(self._trainer, model, self._layers)
            self._around = EmbedAndHead(self._trainer, model, self._layers)
            self._padding = HiddenPadding(self._layers)
        except CannotStack as why:
            self._give_up(why)

    def _give_up(self, why: CannotStack) -> None:
        if self._mode == "on":
            message = f"micro-batches cannot be stacked: {why}"
            raise InputRefused(Diagnostic("T540", message, hint="`stack_micro_batches='auto'` trains without it"))
        self._tell_trainer("read_now")
        self._tell_trainer("log_now")
        self.drop_graphs()
        self._settle(Stacking(False, str(why), 0))

    def _settle(self, decision: Stacking) -> None:
        told = decision.without_sizes()
        level = logging.DEBUG if decision.on and told in self._told else logging.INFO
        self._told.add(told)
        self.decision = decision
        log.log(level, "micro-batches are computed %s", decision)

    def _step(self, stock_step: TrainingStep, model: nn.Module, waiting: Sequence[Inputs], num_items: Any) -> Tensor:
        losses: list[Tensor] = []
        self._sent = None
        before = states_of_all()
        embed_and_head = self._around
        assert embed_and_head is not None, "it is made with the layers"
        try:
            with embed_and_head.in_training():
                inputs = embed_and_head.prepared(waiting)
                recorded, sizes = self._recorded(embed_and_head, stock_step, model, inputs, num_items)
                assert self.decision is not None
                embed_and_head.whole_loss = self.decision.whole_loss
                runs = passes(sizes.tokens, self.decision.tokens)
                batches = recorded.batches(runs, min(self.decision.chunk_tokens, self._in_one_run))
                self._note(
                    one_by_one=recorded.one_by_one, joins_some=recorded.joins_some, told_of_rows=recorded.told_of_rows
                )
                self._pads = False
                for of_pass, calls in batches:
                    with host_factors.one_pass():
                        self._pass(embed_and_head, stock_step, of_pass, calls, num_items, losses)
                if not self._pads:
                    self._note(padded=False)
                self._tell_trainer("while_computing")  # before anything that waits for a GPU
                embed_and_head.check_unchanged()
        except CannotStack as why:
            if losses:  # gradients have been accumulated, which cannot be undone
                message = f"stacking became impossible in the middle of a step: {why}"
                raise InputRefused(Diagnostic("T542", message, hint="use `stack_micro_batches='off'`")) from why
            self._give_up(why)
            for state in before:  # the attempt has drawn noise and dropout masks
                state.restore()
            losses = [stock_step(model, micro_batch, num_items) for micro_batch in waiting]
        (count, sent), self._sent = self._sent or (0, None), None
        on_device = [loss.to(self._trainer.args.device) for loss in losses]
        value = sum_as_logged(self._trainer, on_device, sent if count == len(losses) else None)
        self._is_finite = abs(value) <= torch.finfo(on_device[0].dtype).max
        return on_device[0].new_full((), value)  # a copy from the host would wait for the device

    def _recorded(
        self,
        embed_and_head: EmbedAndHead,
        stock_step: TrainingStep,
        model: nn.Module,
        inputs: Sequence[Inputs],
        num_items: Any,
    ) -> tuple[RecordedStep, StepSizes]:
        """Record how micro-batches enter the layers, and decide by their sizes.

        One that is larger than a pass is divided into its rows, where its loss is their sum.

        Raises:
            CannotStack: the model cannot be run layer by layer, or memory is scarce (`_sized`).
        """
        assert self._recorder is not None and self._padding is not None, "they are made with the layers"
        recorded = self._recorder.step(embed_and_head, stock_step, inputs, num_items)
        sizes = self._sizes(recorded)
        if self.decision is not None:  # the loss may be another one since the step before
            self._note(whole_loss=embed_and_head.whole_loss)
        if self._decided_for is None or sizes.changes != self._decided_for.changes:
            self._padding.forget()  # other code may make other masks
        if sizes != self._decided_for:
            self._tell_trainer("read_now")
            self._graphs.drop(changed=True)  # whose memory is free then
            pads = self._padding.is_causal and self._recorder.joins_lengths and not recorded.one_by_one
            self._settle(self._sized(sizes, recorded.enters, model, pads))
            self._decided_for = sizes
        assert self.decision is not None
        limit = self.decision.tokens
        if sizes.largest <= limit or self._shares:
            return recorded, sizes
        recorded = recorded.divided(limit, sums=sums_over_rows(self._trainer, num_items))
        return recorded, self._sizes(recorded)

    def _pass(
        self,
        embed_and_head: EmbedAndHead,
        stock_step: TrainingStep,
        batches: Sequence[Batch],
        calls: Sequence[ModelCall],
        num_items: Any,
        losses: list[Tensor],
    ) -> None:
        """Run forward and backward of batches that share each layer's experts. Add their losses to `losses`."""
        assert self.decision is not None
        assert self._padding is not None, "it is made with the layers"
        pads = self.decision.padded
        is_padded = [
            pads and bool(batch.lengths) and self._padding.of(call) for batch, call in zip(batches, calls, strict=True)
        ]
        self._pads = self._pads or any(is_padded)
        of_batches = [
            batch.calls(call, padded=padded) for batch, call, padded in zip(batches, calls, is_padded, strict=True)
        ]
        pieces = [divided(call, self.decision.chunk_tokens) for of_batch in of_batches for call in of_batch]
        chunks = in_chunks([piece for of_call in pieces for piece in of_call], self.decision.chunk_tokens)
        self._tell_trainer("read_now")  # the step before, whose gradients are in memory that both graphs write
        outs = self._through_layers([chunk for chunk, _ in chunks])
        of_calls = iter(_by_micro_batch(outs, [[piece.hidden.shape[0] for piece in of_call] for of_call in pieces]))
        finals = [
            as_batch([next(of_calls) for _ in of_batch], call.hidden.shape[1])
            for of_batch, call in zip(of_batches, calls, strict=True)
        ]
        leaves = [final.detach().requires_grad_() for final in finals]
        for batch, call, leaf in zip(batches, calls, leaves, strict=True):
            with span("lm_head", leaf.device):
                losses += embed_and_head.losses(stock_step, batch, num_items, call, leaf)
        if embed_and_head.checks_at_once:
            embed_and_head.check_unchanged()
        shown = {
            "whole_loss": embed_and_head.whole_loss, "not_compiled": str(self._compiled or ""),
            "graphs": self._graphs.told,
        }  # fmt: skip
        self._note(**{name: fact for name, fact in shown.items() if fact})
        trained = [(final, leaf.grad) for final, leaf in zip(finals, leaves, strict=True) if final.requires_grad]
        del outs, pieces, chunks, leaves, finals, of_batches
        if self._shares:  # a process without a loss takes part in the backward of the others
            trained = [(final, torch.zeros_like(final) if grad is None else grad) for final, grad in trained]
        with_loss = [(final, grad) for final, grad in trained if grad is not None]
        if with_loss:
            clock: PhaseClock | None = getattr(self._trainer, "phase_clock", None)
            embed_and_head.begin_check()
            self._send(losses)
            with nullcontext() if clock is None else clock.backward():
                torch.autograd.backward([final for final, _ in with_loss], [grad for _, grad in with_loss])

    def _send(self, losses: Sequence[Tensor]) -> None:
        """Send the losses to the host before a GPU gets the backward, for which reading them would wait."""
        device = self._trainer.args.device
        if losses and device.type == "cuda" and all(loss.is_cuda for loss in losses):
            self._sent = len(losses), send_to_log(self._trainer, [loss.to(device) for loss in losses])

    def _through_layers(self, chunks: Sequence[ModelCall]) -> list[Tensor]:
        """Return the last layer's outputs; layers that are compiled and keep everything may be replayed as graphs."""
        assert self.decision is not None
        kept = self.decision.kept
        run = partial(
            through_layers, self._layers, compiled=self._compiled, offloaded=self.decision.offloaded, kept=kept
        )
        compiled = self._compiled is not None and not self._compiled.refused
        if compiled and kept.replays:
            return self._graphs.through(self._layers, chunks, run)
        self._graphs.drop(changed=True)
        return run(chunks)

    def _sizes(self, step: RecordedStep) -> StepSizes:
        rows, lengths = zip(*step.sizes, strict=True)
        changes = self._recorder.changes - 1 if self._recorder is not None else 0
        tokens = [count * length for count, length in step.sizes]
        *most, length, changes = self._most([*tokens, *rows, max(lengths), changes])
        return StepSizes(tuple(most[: len(tokens)]), length, changes=changes, rows=tuple(most[len(tokens) :]))

    def _most(self, values: Sequence[int]) -> list[int]:
        agree: Callable[[Sequence[int]], list[int]] = getattr(self._trainer, "most_of_processes", list)
        return agree(values)

    @property
    def _shares(self) -> bool:
        return bool(getattr(self._trainer, "shares_experts", False))

    def _note(self, **facts: Any) -> None:
        """Settle facts that only a step has shown: whole logits, layers that are not compiled, single micro-batches."""
        assert self.decision is not None
        shown = replace(self.decision, **facts)
        if shown != self.decision:
            self._settle(shown)

    def _sized(self, sizes: StepSizes, call: ModelCall, model: nn.Module, pads: bool = False) -> Stacking:
        """Return the number of tokens that share a pass. `call` is that of a micro-batch of any size.

        `pads` is whether layers could pad micro-batches of several lengths, as far as is known.

        Raises:
            CannotStack: not even two micro-batches fit, of a step that has several, and no GPU multiplies experts.
        """
        prepare_experts(self._layers)  # their memory is not free any more
        whole = reason_for_whole_logits(self._trainer) if self.decision is None else self.decision.whole_loss
        vocabulary = int(getattr(cast("Any", model).config.get_text_config(), "vocab_size", 0))
        # The loss has logits of neighbouring micro-batches together, at most those of a chunk, padded to one length.
        chunk = self._chunk_tokens or (CHUNKS[0] if any(at.type == "cpu" for at in call.devices) else CHUNKS[-1])
        # a model that is known saves a walk through all modules in each step
        causal = causal_model(self._trainer) if self._around is None else self._around.causal
        head = causal.get_output_embeddings()
        self._in_one_run = tokens_of_losses(self._trainer, head, chunk, vocabulary)
        joins = not whole or own_losses_of(self._trainer) is not None
        together = min(sizes.padded, max(self._in_one_run, sizes.largest)) if joins else sizes.largest
        loss = loss_bytes(self._trainer, head, together, vocabulary, whole=bool(whole))
        coming = coming_bytes(model, self._trainer.optimizer)
        devices = {"cpu", *map(str, call.devices), *expert_bytes(self._layers)}
        free = {device: max(0, free_bytes(device) - coming.get(device, 0)) for device in devices}
        longest = replace(call, hidden=call.hidden.new_empty((1, sizes.length, call.hidden.shape[-1]), device="meta"))
        if not is_divisible(call) or sizes.largest == sizes.length**2:
            sizes = replace(sizes, undivided=sizes.largest)
        memory = PassMemory(free, loss, bytes_per_pair(model))
        way = with_padding if pads and self._launches(sizes.whole, call) else fewest_passes
        size = way(self._layers, longest, sizes, memory, self._chunk_tokens)
        (most,) = self._most([-size.tokens])
        known = Stacking(False, "", 0) if self.decision is None else self.decision
        decision = replace(
            size,
            tokens=-most,
            whole_loss=whole or known.whole_loss,
            not_compiled=known.not_compiled,
            one_by_one=known.one_by_one,
        )
        least = sizes.largest * min(2, len(sizes.tokens))
        if decision.tokens < least and self._gives_up_for_memory(model):
            raise CannotStack(f"the free memory on `{size.scarce}` holds {decision.tokens} tokens of a pass")
        if decision.tokens < sizes.whole:
            bounded = f"the free memory on `{size.scarce}` bounds a pass"
            return replace(decision, reason=bounded, tokens=max(decision.tokens, sizes.length))
        return decision

    def _launches(self, tokens: int, call: ModelCall) -> bool:
        """Return whether GPUs compute a pass: launches for each length cost more than computing some padding."""
        experts = (fused_in(split.experts) for split in self._layers if split.experts is not None)
        computing = {*call.devices, *(fused.backend(tokens).device for fused in experts)}
        return all(device.type != "cpu" for device in computing)

    def _gives_up_for_memory(self, model: nn.Module) -> bool:
        """Return whether micro-batches are computed one by one where a pass holds less than two, from the first step.

        On a GPU that would keep everything for backward, of which a pass keeps the least.
        """
        return self.decision is None and self._mode != "on" and not _multiplied_on_a_gpu(model)


def reason_against(trainer: Any, model: nn.Module) -> str:
    """Return why this trainer's micro-batches are computed one by one, "" if they can be stacked."""
    args = trainer.args
    config = cast("Any", model).config.get_text_config()
    reasons = {
        "a step has one micro-batch": args.gradient_accumulation_steps == 1 and not _multiplied_on_a_gpu(model),
        "the router's auxiliary loss is on": getattr(trainer, "aux_loss_enabled", False)
        or getattr(config, "output_router_logits", False),
        "rows have images": getattr(trainer.data_collator, "with_images", False),
        "the model finds the positions behind images itself": finds_positions(model),
        "the model is compiled by torch": bool(args.torch_compile),
        "the trainer makes its inputs itself": prepares_inputs_itself(trainer),
        "activations are offloaded": getattr(args, "activation_offloading", False),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _multiplied_on_a_gpu(model: nn.Module) -> bool:
    """Return whether a GPU multiplies routed experts: then one micro-batch gains too, by compiled layers."""
    experts = (module for module in model.modules() if isinstance(module, FusedMoe))
    return any(fused.backend(MANY).device.type != "cpu" for fused in experts)


def _by_micro_batch(outs: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the outputs (B, T, H) of micro-batches from those of chunks; `rows` has B of each one's pieces."""
    left = [size for of_call in rows for size in of_call]
    pieces = iter([piece for out in outs for piece in _split_chunk(out, left)])
    finals = [[next(pieces) for _ in of_call] for of_call in rows]
    return [of_call[0] if len(of_call) == 1 else torch.cat(of_call) for of_call in finals]


def _split_chunk(out: Tensor, rows: list[int]) -> list[Tensor]:
    """Split a chunk into its pieces, and remove their sizes from the front of `rows`."""
    sizes: list[int] = []
    while sum(sizes) < out.shape[0]:
        sizes.append(rows.pop(0))
    return list(torch.split(out, sizes))
