"""Options that many commands share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from ktc.cli import completion

# The titles of groups of options in `--help`.
OUTPUT_GROUP: Final = "Output and help"
_output_option: Final = partial(typer.Option, rich_help_panel=OUTPUT_GROUP)
_compiling_option: Final = partial(typer.Option, rich_help_panel="How it is compiled")
loading_option: Final = partial(typer.Option, rich_help_panel="How it is loaded")
answers_option: Final = partial(typer.Option, rich_help_panel="Answers")

ExpertCounts = Annotated[
    Path | None,
    loading_option(
        "--expert-counts", metavar="FILE",
        help="Place experts on the GPU by the counts in this file, if it exists, and add those of this run.",
    ),
]  # fmt: skip
Json = Annotated[
    bool,
    _output_option("--json", help="Print one JSON object on stdout, and everything else on stderr."),
]
Verbose = Annotated[
    bool,
    _output_option("--verbose", "-v", help="Print more: traces of internal errors, every rewrite."),
]
Quiet = Annotated[
    bool,
    _output_option("--quiet", "-q", help="No progress and no notes: results, warnings, errors."),
]
LogFile = Annotated[
    Path | None,
    _output_option("--log-file", help="Also write progress, messages and traces to this file."),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model folder, a hub id, or tiny:NAME (a small model of a family).",
        autocompletion=completion.models,
    ),
]
OriginalModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The original: a folder, a hub id, tiny:NAME, or a compiled model of it (OUT).",
        autocompletion=completion.models,
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model folder (config.json is enough), a hub id, or tiny:NAME.",
        autocompletion=completion.models,
    ),
]
CompiledModel = Annotated[
    Path, typer.Argument(metavar="OUT", help="A compiled model.", autocompletion=completion.compiled_models)
]
Weights = Annotated[
    Path | None,
    loading_option("--weights", help="The checkpoint's folder, if it was moved after the compilation."),
]
AUTO: Final = "auto"  # the bundled program for any model
Use = Literal["train", "generate", "serve"]
Rules = Annotated[
    str,
    typer.Argument(
        metavar="RULES",
        help="A rule file, or the name of a bundled one (auto, moe-lora).",
        autocompletion=completion.programs,
    ),
]
OptionalRules = Annotated[
    str,
    typer.Argument(
        metavar="RULES",
        help="A rule file, or the name of a bundled one (auto: for any model).",
        autocompletion=completion.programs,
    ),
]
ForUse = Annotated[
    Use | None,
    _compiling_option("--for", help="The use of the compiled model: `--set use=USE` of the rules."),
]
Experts = Annotated[
    bool,
    _compiling_option("--experts", help="Adapters on the routed experts too: `--set experts=true` of the rules."),
]
ResultsFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE.json", help="Write the results as JSON to this file.")
]
RuleName = Annotated[str, typer.Option("--rule", help="A rule file, or the name of a bundled one.")]
ConfigModel = Annotated[
    str, typer.Option("--config", metavar="MODEL", help="A model folder (config.json is enough) or a hub id.")
]
ExpertsFormat = Annotated[
    str | None,
    _compiling_option("--format", help="The experts' weight format: `--set format=FORMAT` of the rules."),
]
Settings = Annotated[
    list[str] | None,
    _compiling_option("--set", metavar="NAME=VALUE", help="A parameter of the rule file."),
]
IsaName = Annotated[
    str | None,
    _compiling_option("--isa", help="The kernels' instruction set. Default: the best one of the host."),
]
HostFile = Annotated[
    str | None,
    _compiling_option(
        "--host",
        metavar="HOST",
        help="Plan for the machine in this TOML file, or a bundled one (h100).",
        autocompletion=completion.machines,
    ),
]
Trust = Annotated[
    bool,
    loading_option("--trust-remote-code", help="Run the Python code in the model's folder."),
]
TextOnly = Annotated[
    bool,
    _compiling_option("--text-only", help="Leave out the towers for images and sound: the model reads text alone."),
]
AdapterFolder = Annotated[
    Path | None, typer.Option("--adapter", metavar="A", help="Use this adapter: a folder that PEFT saved.")
]
Reference = Annotated[
    bool,
    loading_option("--reference", help="Run the PyTorch reference of every ktc operator, in fp32."),
]
Seed = Annotated[
    int,
    typer.Option("--seed", min=0, max=2**32 - 1, help="Seed of random draws: the same seed gives the same draws."),
]
SystemPrompt = Annotated[
    str,
    answers_option("--system", metavar="TEXT", help="The system message before each prompt."),
]
ForceOutput = Annotated[
    bool, typer.Option("--force", help="Replace what an earlier export, merge or quantize wrote there.")
]
Raw = Annotated[bool, answers_option("--raw", help="Do not use the tokenizer's chat template.")]
Temperature = Annotated[
    float,
    answers_option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy."),
]
ReportFile = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="F.json", help="Also write the report to this file.")
]
CompareImages = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE", help="An image before the tokens, for a model with towers; repeatable."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows per batch.")]
