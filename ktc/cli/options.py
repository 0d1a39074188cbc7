"""Options that many commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, everything else on stderr.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more: traces of internal errors, every rewrite.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
LogFile = Annotated[
    Path | None, typer.Option("--log-file", help="Write what happens, with traces, to this file as well.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of stdout.")]
Model = Annotated[str, typer.Argument(help="A model folder, a hub id, or tiny:NAME (a small twin of a family).")]
OptionalModel = Annotated[
    str | None, typer.Argument(help="A model folder (config.json is enough), a hub id, or tiny:NAME.")
]
CompiledModel = Annotated[Path, typer.Argument(metavar="OUT", help="A compiled model.")]
Weights = Annotated[
    Path | None, typer.Option("--weights", help="The checkpoint's folder, if it is no longer where it was compiled.")
]
Rules = Annotated[str, typer.Argument(help="A rule file, or the name of a bundled one (moe-lora).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A parameter of the rule file.")
]
IsaName = Annotated[
    str | None, typer.Option("--isa", help="The kernels' instruction set; the default is the best one here.")
]
HostFile = Annotated[Path | None, typer.Option("--host", help="Plan for the machine that this TOML file describes.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run the code that the model's folder brings along.")]
AdapterFolder = Annotated[
    Path | None, typer.Option("--adapter", metavar="A", help="Answer with this adapter: a folder that PEFT saved.")
]
Reference = Annotated[
    bool, typer.Option("--reference", help="Run every operator of ktc as its PyTorch reference, in fp32.")
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**32 - 1, help="What draws follow; the same seed gives the same run.")
]
SystemPrompt = Annotated[str, typer.Option("--system", metavar="TEXT", help="The system's turn before each prompt.")]
Raw = Annotated[bool, typer.Option("--raw", help="Leave the tokenizer's chat template out.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows that are generated at once.")]
