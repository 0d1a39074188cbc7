"""The requests of all benchmarks: a frozen dataclass for each, whose fields are the options of its command.

Those of one layer are in `layer_requests`.

Lists are comma-separated on the command line. Refused: invalid options (U030, G725), unknown instruction sets (H211),
and a missing GPU (H244). This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused
from ktc.foundation import environment
from ktc.tools.bench.layer_requests import Attention, Moe, Stream
from ktc.tools.bench.options import MOST_TOKENS, THREADS, Request, numbers, one_of, option, require_threads, words

STREAMED_TO: Final = "prefill"  # the parameter of the bundled programs that names the device which experts stream to
LLAMA_PYTHON: Final = Path("build/llama/bin/python")
FILE_FORMATS: Final = ("q4_0", "q8_0", "bf16", "q4_k", "mxfp4")
_TRACED_STEP: Final = 3  # `ktc.training.trainers.step_trace.TRACED_STEP`


def _span(flag: str, text: str) -> tuple[int, int]:
    """Return `16-128` as two numbers. Raise InputRefused (G725)."""
    low, _, high = text.partition("-")
    if low.isdigit() and high.isdigit() and 0 < int(low) <= int(high):
        return int(low), int(high)
    raise InputRefused(Diagnostic("G725", f"`{flag}` is `{text}`, not two numbers", hint=f"`{flag} 16-128`"))


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement of a model. A decode step adds a token to each of `batch` sequences of `tokens` tokens.

    A prefill reads one prompt of `tokens` tokens.
    """

    kind: Literal["decode", "prefill"]
    batch: int
    tokens: int

    def __str__(self) -> str:
        if self.kind == "prefill":
            return f"prefill of {self.tokens}"
        return f"decode, batch {self.batch}, context {self.tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode(Request):
    """Measure decode steps and prompts of a GGUF model with random weights, beside peers on the same file."""

    command: ClassVar[str] = "decode"
    module: ClassVar[str] = "ktc.tools.bench.decode.run"
    model: str = option("olmoe", "The sizes of the model: olmoe, qwen3_30b or gpt_oss_20b.")
    layers: int | None = option(4, "Only the first N layers, and the head.", least=1)
    file_format: str = option("q8_0", "The format of the file's matrices: q4_0, q8_0, bf16, q4_k or mxfp4.", flag="--format")
    batches: tuple[int, ...] = numbers(
        (1, 8), "Numbers of sequences of a decode step.", "--batch", least=1, most=1 << 17, empty=True
    )
    contexts: tuple[int, ...] = numbers(
        (0, 512, 4096),
        "Tokens that each sequence of a decode step has.",
        "--context",
        least=0,
        most=1 << 17,
        empty=True,
    )
    prefill: tuple[int, ...] = numbers(
        (512, 2048), "Lengths of prompts that are read at once.", "--prefill", least=1, most=1 << 17, empty=True
    )
    impls: tuple[str, ...] = words(("ktc",), "ktc, and hf: the stock model in bf16.", "--impl", ("ktc", "hf"))
    peers: tuple[str, ...] = words((), "Peers that run in a process of their own: llama.cpp.", "--peer", ("llama.cpp",))
    peer_python: Path | None = option(
        None, "The Python of llama.cpp's environment. Default: build/llama's.", metavar="PATH"
    )
    rule: str = "moe-inference"
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    isa: str = option("", "The instruction set of ktc's kernels. Default: the best.")
    threads: int = option(1, THREADS, least=1)
    rounds: int = option(5, "Measured rounds; the median is reported.", least=1)
    profile: bool = option(False, "Also show where a decode step of ktc goes, by part of the model.")
    folder: Path | None = option(None, "Write the model there and keep it for the next run.", metavar="DIR")

    def checked(self) -> Self:
        """Check words, threads, and that anything is left to be measured."""
        from ktc.tools.bench.sizes import SIZES

        one_of("--model", self.model, SIZES)
        one_of("--format", self.file_format, FILE_FORMATS)
        if self.peer_python is not None and not self.peers:
            raise self.refused("`--peer-python` is for a `--peer`, and none is named")
        require_threads(self.threads)
        if not self.cases or not (self.impls or self.peers):
            raise self.refused("nothing is left to be measured")
        if self.profile and "ktc" not in self.impls:
            raise self.refused("`--profile` is of ktc's steps, which `--impl` leaves out")
        return replace(self, peer_python=(self.peer_python or LLAMA_PYTHON).absolute())

    @property
    def cases(self) -> tuple[Case, ...]:
        """Every batch with every context, then the prompts."""
        decodes = [Case("decode", batch, tokens) for batch in self.batches for tokens in self.contexts]
        return (*decodes, *(Case("prefill", 1, tokens) for tokens in self.prefill))

    @property
    def following(self) -> tuple[object, ...]:
        """The check of the rules."""
        return ("ktc", "check", self.rule, "tiny:qwen3_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfModel(Request):
    """The options of a model that is compiled for the run. `layers` None is the whole depth."""

    model: str = option("", "A model folder (config.json is enough) or a hub id.", flag="--config", metavar="MODEL")
    rule: str = ""
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    weight_format: str | None = None
    layers: int | None = None
    seed: int = 0  # of weights, tokens and adapter

    @property
    def following(self) -> tuple[object, ...]:
        """The check of the rules on the model."""
        return ("ktc", "check", self.rule, self.model)

    def chosen(self) -> dict[str, str]:
        """Return the settings with the format. Raise InputRefused (U030) for two formats."""
        flags = {} if self.weight_format is None else {"format": self.weight_format}
        settings = {**flags, **self.settings}
        if not flags.items() <= settings.items():
            raise self.refused("`--format` and `--set format=` name two formats")
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetune(_OfModel):
    """Run optimizer steps of LoRA on a model of real sizes, and show token/s, memory and the phases of a step."""

    command: ClassVar[str] = "finetune"
    module: ClassVar[str] = "ktc.tools.bench.finetune.run"
    picture: ClassVar[str] = "a plot"
    rule: str = "moe-lora"
    random_weights: bool = option(False, "Make random weights in memory instead of reading a checkpoint.")
    layers: int | None = option(None, "Only the first N layers, with random weights.", least=1)
    length: int = option(512, "Tokens per sequence.", least=2)
    accumulation: int = option(16, "Sequences per optimizer step.", least=1)
    steps: int = option(4, "Optimizer steps. The first is not counted.", least=2)
    experts: tuple[str, ...] = words(
        (),
        "Where ktc multiplies experts: gpu (streamed to it), cpu; reference: all in fp32 as plain PyTorch. "
        "Default: the GPU if there is one.",
        "--experts",
        ("gpu", "cpu", "reference"),
        "PLACE,...",
    )
    impls: tuple[str, ...] = words(
        ("ktc",), "ktc, and hf: stock Hugging Face and PEFT, all on one GPU.", "--impl", ("ktc", "hf")
    )
    trace: Path | None = option(
        None,
        "Write the timeline of one step of ktc as a Chrome trace; of several places FILE-PLACE.json.",
        metavar="FILE.json",
    )
    plot: Path | None = option(None, "Draw loss and gradient norm of every step: a .png or .svg file.", metavar="FILE")

    def checked(self) -> Self:
        """Check the options on this machine."""
        import torch

        return self.on(torch.cuda.device_count())

    def on(self, gpus: int) -> Self:
        """Return the request with its places, on a machine with this number of GPUs. Raise HostLacks (H244)."""
        if self.layers is not None and not self.random_weights:
            raise self.refused("`--layers` is for `--random-weights`: a checkpoint has its own depth")
        if self.steps < 2:
            raise self.refused("`--steps` is at least 2: the first step is not counted")
        if self.accumulation % environment.world_size():
            processes = environment.world_size()
            raise self.refused(f"`--accumulation {self.accumulation}` is not a multiple of {processes} processes")
        if self.trace is not None and self.steps < _TRACED_STEP:
            raise self.refused(
                f"`--trace` needs `--steps {_TRACED_STEP}`: neither the first nor the traced step is counted"
            )
        settings = self.chosen()
        experts = self.experts or (self._default_place(settings, gpus),)
        if "gpu" in experts:
            if gpus == 0:
                message = "experts cannot be streamed to a GPU: this process sees none"
                raise HostLacks(Diagnostic("H244", message, hint="`--experts cpu` multiplies them on the host"))
            settings.setdefault(STREAMED_TO, "auto")
        return replace(self, settings=settings, experts=experts, impls=self.impls or ("ktc",))

    def _default_place(self, settings: Mapping[str, str], gpus: int) -> str:
        """Return the GPU if there is one and the program can stream experts to it."""
        if gpus == 0 or settings.get(STREAMED_TO) == "cpu":
            return "cpu"
        from ktc.language import dsl

        return "gpu" if STREAMED_TO in dsl.load(self.rule, settings).units[0].params else "cpu"

    @property
    def compared(self) -> bool:
        """Whether the losses of rows are compared, hence dropout is 0."""
        return self.plot is not None or "reference" in self.experts

    @property
    def tokens(self) -> int:
        """Tokens of a step: `accumulation` sequences of `length`."""
        return self.accumulation * self.length

    def trace_of(self, place: str) -> Path | None:
        """Return the file of the timeline of a place: with several places its stem ends in the place's name."""
        if self.trace is None or len(self.experts) < 2:
            return self.trace
        return self.trace.with_stem(f"{self.trace.stem}-{place}")

    @property
    def files(self) -> Mapping[str, Path | None]:
        """The timelines and the picture."""
        return {**{f"--trace ({place})": self.trace_of(place) for place in self.experts}, "--plot": self.plot}


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(_OfModel):
    """Generate with a model of real sizes and random weights, and show token/s and the limit of the experts.

    A row generates `steps` tokens for each of `batch` sequences after a prompt of `context` tokens.
    """

    command: ClassVar[str] = "generate"
    module: ClassVar[str] = "ktc.tools.bench.generate"
    rule: str = "moe-inference"
    layers: int | None = option(None, "Only the first N layers.", least=1)
    batches: tuple[int, ...] = numbers((1,), "Numbers of sequences.", "--batch", least=1, most=MOST_TOKENS)
    contexts: tuple[int, ...] = numbers((64, 4096), "Lengths of the prompts.", "--context", least=1, most=MOST_TOKENS)
    steps: int = option(64, "New tokens of each sequence.", least=8)
    impls: tuple[str, ...] = words(
        ("ktc",),
        "ktc; eager: the same without CUDA graphs; hf: stock Hugging Face, all on one GPU.",
        "--impl",
        ("ktc", "eager", "hf"),
    )

    def checked(self) -> Self:
        """Return the request with all settings; ktc's own ways to compute come first."""
        ordered = tuple(impl for impl in ("ktc", "eager", "hf") if impl in self.impls)
        return replace(self, settings=self.chosen(), impls=ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans(_OfModel):
    """Measure every plan that `ktc plan` shows for a model, beside its prediction, with random weights."""

    command: ClassVar[str] = "plans"
    module: ClassVar[str] = "ktc.tools.bench.plans.run"
    rule: str = "auto"
    layers: int | None = option(None, "Only the first N layers.", least=1)
    batch: int = option(0, "Sequences per batch. 0: the planner's own.", least=0)
    length: int = option(0, "Tokens per sequence. 0: the planner's own.", least=0)
    steps: int = option(16, "Optimizer steps, or new tokens of each of three answers.", least=4)
    longest: float = option(120.0, "Plans whose call is predicted to take more seconds are left out.", least=0)

    def checked(self) -> Self:
        """Return the request with all settings."""
        return replace(self, settings=self.chosen())


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve(Request):
    """Load a server of `ktc serve` with one client and then many, streaming or not, some of which cancel."""

    command: ClassVar[str] = "serve"
    module: ClassVar[str] = "ktc.tools.bench.serve"
    out: Path = Path()
    clients: int = option(64, "Clients that send requests at once.", least=1)
    seconds: float = option(600, "How long they send requests.", least=1)
    one_seconds: float = option(60, "How long one client sends requests before.", least=1)
    max_batch: int = option(64, "The option of `ktc serve`.", least=1)
    prompt: tuple[int, int] = option((16, 128), "Words of a prompt, drawn evenly.", metavar="A-B", read=_span)
    new_tokens: tuple[int, int] = option((16, 128), "Tokens of an answer, drawn evenly.", metavar="A-B", read=_span)
    cancelled: float = option(0.1, "The share of streamed answers that clients end early.", least=0, most=1)

    @property
    def following(self) -> tuple[object, ...]:
        """The server itself."""
        return ("ktc", "serve", self.out)


REQUESTS: Final[tuple[type[Request], ...]] = (Attention, Moe, Decode, Finetune, Generate, Plans, Serve, Stream)
