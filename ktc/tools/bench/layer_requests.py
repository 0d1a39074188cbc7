"""The requests of benchmarks of one layer: routed experts, the stream that sends them to a GPU, and attention.

Lists are comma-separated on the command line. Refused: invalid options (U030, G725), unknown instruction sets (H211),
and a missing GPU (H244). This module imports no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, cast

from ktc.diagnostics import listing
from ktc.tools.bench.options import MOST_TOKENS, THREADS, Request, numbers, one_of, option, require_threads, words

if TYPE_CHECKING:
    from ktc.foundation.isa import Isa

Pass = Literal["forward", "train"]
KTC: Final = "ktc_"  # ktc's own kernels: `ktc_FORMAT`
HF: Final = ("hf_eager", "hf_grouped_mm", "hf_batched_mm")
DENSE: Final = "onednn_dense"
KT: Final = ("kt_kernel", "kt_kernel_int8", "kt_kernel_int4")
PEERS: Final = (*HF, "compile", DENSE, *KT)
DEFAULT_IMPLS: Final = ("ktc_bf16", *HF, DENSE, KT[0])
MAX_RANK: Final = 128  # of LoRA in the kernels
_CUSTOM: Final = "custom"


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of one layer: H, I, E, k."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int

    def __str__(self) -> str:
        return f"{self.name} H{self.hidden} I{self.intermediate} E{self.num_experts} k{self.top_k}"

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.intermediate

    def flops(self, tokens: int, passes: Pass) -> int:
        """Count two FLOPs per multiply-add. Training adds the gradients of hidden states and routing weights."""
        forward = 2 * tokens * self.top_k * self.expert_weights
        return forward if passes == "forward" else 2 * forward


SHAPES: Final = (
    Shape("v2lite", 2048, 1408, 64, 6),
    Shape("qwen3_30b", 2048, 768, 128, 8),
    Shape("v3", 7168, 2048, 256, 8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfLayer(Request):
    """The options of a layer's sizes."""

    shape_name: str = option("v2lite", "The sizes of the layer: v2lite, qwen3_30b, v3, or custom.", flag="--shape")
    hidden: int | None = option(None, "Hidden size of a custom shape.", least=1)
    intermediate: int | None = option(None, "Intermediate size of a custom shape.", least=1)
    experts: int | None = option(None, "Number of experts; a named shape may have fewer than its own.", least=1)
    top_k: int | None = option(None, "Experts per token of a custom shape.", least=1)

    @property
    def shape(self) -> Shape:
        """The sizes. Raise InputRefused (U030)."""
        sizes = {"--hidden": self.hidden, "--intermediate": self.intermediate, "--top-k": self.top_k}
        if self.shape_name == _CUSTOM:
            missing = [name for name, size in {**sizes, "--experts": self.experts}.items() if size is None]
            if missing:
                raise self.refused(f"`--shape {_CUSTOM}` needs {', '.join(f'`{name}`' for name in missing)}")
            hidden, intermediate, top_k = (size or 0 for size in sizes.values())
            return self._possible(Shape(_CUSTOM, hidden, intermediate, self.experts or 0, top_k))
        known = {shape.name: shape for shape in SHAPES}
        shape = known.get(one_of("--shape", self.shape_name, (*known, _CUSTOM)))
        assert shape is not None
        given = [name for name, size in sizes.items() if size is not None]
        if given:
            raise self.refused(f"`{given[0]}` is for `--shape {_CUSTOM}`; `{shape.name}` has its own")
        if self.experts is not None and self.experts > shape.num_experts:
            raise self.refused(f"`{shape.name}` has {shape.num_experts} experts; more are for `--shape {_CUSTOM}`")
        return self._possible(replace(shape, num_experts=self.experts or shape.num_experts))

    def _possible(self, shape: Shape) -> Shape:
        if shape.top_k > shape.num_experts:
            raise self.refused(f"a token cannot choose {shape.top_k} of {shape.num_experts} experts")
        return shape

    def require_even(self, weight_format: str) -> None:
        """Raise InputRefused for a format that cannot hold the shape."""
        if not even_rows(self.shape, weight_format):
            raise self.refused(
                f"`{weight_format}` cuts rows into groups or blocks, of which {self.shape} has no whole number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe(_OfLayer):
    """Measure the routed experts of one layer, ktc's and others', in one process and in interleaved rounds."""

    command: ClassVar[str] = "moe"
    module: ClassVar[str] = "ktc.tools.bench.moe"
    picture: ClassVar[str] = "a roofline"
    tokens: tuple[int, ...] = numbers(
        (1, 32, 512), "Numbers of tokens per call.", "--tokens", least=1, most=MOST_TOKENS
    )
    passes: tuple[Pass, ...] = words(
        ("forward",), "forward, train (forward and backward), or both.", "--pass", ("forward", "train"), "PASS,..."
    )
    impls: tuple[str, ...] = words(
        (),
        "Implementations: ktc_FORMAT, hf_eager, hf_grouped_mm, hf_batched_mm, compile, onednn_dense, "
        "kt_kernel, kt_kernel_int8, kt_kernel_int4; or the groups ktc, hf, kt, all.",
        "--impl",
    )
    lora_ranks: tuple[int, ...] = numbers(
        (0,), "LoRA ranks on the experts; 0: without LoRA.", "--lora-rank", least=0, most=MAX_RANK
    )
    lora_dropout: float = option(0.0, "Dropout of LoRA, which only ktc has on experts.", least=0, most=1)
    threads: int = option(1, THREADS, least=1)
    rounds: int = option(0, "Measured rounds; the median is reported. 0 chooses by the cost.", least=0)
    isas: tuple[Isa, ...] = words((), "Instruction sets of ktc's kernels. Default: the best.", "--isa", (), "ISA,...")
    kt_python: Path | None = option(None, "The Python interpreter of kt-kernel's environment.", metavar="PATH")
    plot: Path | None = option(None, "Draw a roofline: a .png or .svg file.", metavar="FILE")
    required: frozenset[str] = frozenset()  # the words of `--impl`: without them the run ends

    def checked(self) -> Self:
        """Return the request with the members of groups, and the instruction sets of this machine."""
        from ktc.foundation import host
        from ktc.model.kernels.fused_moe_spec import KERNELS

        here = host.detect()
        named: tuple[Isa, ...] = tuple(dict.fromkeys(host.restrict(here, word).isas[0] for word in self.isas))
        isas = named or here.isas[:1]
        require_threads(self.threads)
        kernels = kernels_of(isas)
        groups = {"ktc": kernels, "hf": HF, "kt": KT, "all": (*kernels, *PEERS)}
        known, members = (*groups, *kernels_of(KERNELS), *PEERS), list[str]()
        for word in self.impls:
            members += groups.get(word) or (one_of("--impl", word, known),)
            if word.startswith(KTC) and word not in kernels:
                message = f"`{word}` has no kernel for {listing(isas)}"
                raise self.refused(message, f"these have: {listing(kernels)}")
            if word.startswith(KTC):
                self.require_even(word.removeprefix(KTC))
        impls = tuple(dict.fromkeys(members)) or DEFAULT_IMPLS
        if self.kt_python is not None and not {*impls} & {*KT}:
            raise self.refused("`--kt-python` is for kt_kernel, which `--impl` leaves out")
        assert self.shape and self.passes
        return replace(self, impls=impls, isas=isas, required=frozenset(self.impls))

    @property
    def has_kt(self) -> bool:
        """Whether kt-kernel is here."""
        return self.kt_python is not None or importlib.util.find_spec("kt_kernel") is not None

    @property
    def requires_kt(self) -> bool:
        """Whether the run ends without kt-kernel: it was named, or its Python was."""
        return self.kt_python is not None or not self.required.isdisjoint((*KT, "kt", "all"))

    @property
    def files(self) -> Mapping[str, Path | None]:
        """The picture."""
        return {"--plot": self.plot}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream(_OfLayer):
    """Measure one layer's experts streamed to a GPU: forward, backward, and the time that the bus alone needs."""

    command: ClassVar[str] = "stream"
    module: ClassVar[str] = "ktc.tools.bench.stream"
    weight_format: str = option("bf16", "The experts' weight format.", flag="--format")
    tokens: tuple[int, ...] = numbers(
        (2048, 8192), "Numbers of tokens per call.", "--tokens", least=1, most=MOST_TOKENS
    )
    rounds: int = option(5, "Measured rounds; the median is reported.", least=0)

    def checked(self) -> Self:
        """Check the shape and the format."""
        from ktc.foundation import host

        formats = [name.removeprefix(KTC) for name in kernels_of(host.detect().isas[:1])]
        one_of("--format", self.weight_format, formats)
        self.require_even(self.weight_format)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Request):
    """Measure attention of one new token over caches on a GPU, ktc's kernels beside PyTorch's products."""

    command: ClassVar[str] = "attention"
    module: ClassVar[str] = "ktc.tools.bench.attention"
    models: tuple[str, ...] = words(
        ("v2lite", "qwen3_30b"),
        "The sizes of models: v2lite and v3 (latents), qwen3_30b (grouped queries).",
        "--model",
        ("v2lite", "qwen3_30b", "v3"),
    )
    batches: tuple[int, ...] = numbers((1,), "Numbers of sequences.", "--batch", least=1, most=MOST_TOKENS)
    contexts: tuple[int, ...] = numbers(
        (4096, 32768, 131072), "Tokens that each sequence has.", "--context", least=1, most=MOST_TOKENS
    )
    rounds: int = option(5, "Measured rounds; the median is reported.", least=1)


def kernels_of(isas: Iterable[Isa]) -> tuple[str, ...]:
    """Return `ktc_FORMAT` of each format that one of the instruction sets multiplies."""
    from ktc.model.kernels.fused_moe_spec import KERNELS

    return tuple(dict.fromkeys(f"{KTC}{name}" for isa in isas for name in KERNELS[isa]))


def even_rows(shape: Shape, weight_format: str) -> bool:
    """Return whether the format can hold matrices of this shape: some cut rows into whole groups or blocks."""
    from ktc.foundation.formats import FORMATS

    whole = FORMATS[cast("Any", weight_format)].whole
    return not any(columns % whole for columns in (shape.hidden, shape.intermediate))
