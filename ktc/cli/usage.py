"""Messages for a command line that cannot be read: each is one diagnostic (U001) with one hint.

In: typer's exception. Out: a `Diagnostic`. An option or a command by the name that other programs have for it is
answered with the name in ktc.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ktc.diagnostics import Diagnostic, suggest

# Names of options in other programs of the field, and those in ktc, the first that the command has.
FIELD_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "adapter-name-or-path": ("adapter",),
    "adapter-path": ("adapter",),
    "batch": ("batch-size", "max-batch"),
    "batch-size": ("batch", "max-batch"),
    "bs": ("batch", "batch-size"),
    "config-file": ("config",),
    "context-length": ("length", "context"),
    "ctx-size": ("length", "context"),
    "cutoff-len": ("length",),
    "data-path": ("data",),
    "dataset": ("data",),
    "eval-dataset": ("eval-data",),
    "grad-accum": ("accumulation",),
    "gradient-accumulation": ("accumulation",),
    "gradient-accumulation-steps": ("accumulation",),
    "learning-rate-scheduler": ("scheduler",),
    "lora": ("adapter",),
    "lora-alpha": ("alpha",),
    "lora-dropout": ("dropout",),
    "lora-path": ("adapter",),
    "lora-r": ("rank",),
    "lora-rank": ("rank",),
    "lora-target": ("targets",),
    "lora-target-modules": ("targets",),
    "lr": ("learning-rate",),
    "lr-scheduler": ("scheduler",),
    "lr-scheduler-type": ("scheduler",),
    "max-batch-size": ("max-batch", "batch-size"),
    "max-len": ("length", "max-new-tokens"),
    "max-length": ("length", "max-new-tokens"),
    "max-num-seqs": ("max-batch",),
    "max-seq-len": ("length",),
    "max-seq-length": ("length",),
    "max-tokens": ("max-new-tokens",),
    "micro-batch-size": ("batch",),
    "n-predict": ("max-new-tokens",),
    "num-epochs": ("epochs",),
    "num-train-epochs": ("epochs",),
    "out": ("output",),
    "out-dir": ("output", "out"),
    "outfile": ("output", "out"),
    "output": ("out",),
    "output-dir": ("output", "out"),
    "output-path": ("output", "out"),
    "overwrite": ("force",),
    "overwrite-output-dir": ("force",),
    "per-device-train-batch-size": ("batch",),
    "quantization": ("scheme", "format"),
    "r": ("rank",),
    "resume-from-checkpoint": ("resume",),
    "sequence-length": ("length",),
    "system-prompt": ("system",),
    "target-modules": ("targets",),
    "temp": ("temperature",),
    "train-data": ("data",),
    "train-file": ("data",),
    "val-size": ("eval-split",),
    "warmup-ratio": ("warmup",),
    "warmup-steps": ("warmup",),
}
_TOO_MANY: Final = re.compile(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)")
_MODEL_OPTIONS: Final = ("model", "model-id", "model-name", "model-name-or-path", "model-path")
_COMMANDS: Final[Mapping[str, str]] = {
    "api": "serve", "ask": "generate", "build": "compile", "convert": "export", "evaluate": "eval",
    "finetune": "train", "format": "fmt", "infer": "generate", "ls": "list", "lint": "check", "models": "list",
    "new": "init", "predict": "generate", "quantise": "quantize", "run": "chat", "server": "serve", "sft": "train",
    "tune": "train", "validate": "check",
}  # fmt: skip


def is_usage_error(error: Exception) -> bool:
    """Return whether typer raised `error` for a command line that it cannot read; its classes are not public."""
    return getattr(error, "exit_code", None) == 2 and hasattr(error, "format_message")


def usage_fault(error: Any) -> Diagnostic:
    """Return the message (U001) for typer's exception."""
    command, path = getattr(error, "cmd", None), getattr(getattr(error, "ctx", None), "command_path", "ktc")
    option = getattr(error, "option_name", None)
    if option is not None and getattr(error, "possibilities", option) is not option:
        hint = _option_hint(option, command, path)
        return Diagnostic("U001", f"`{path}` has no option `{option}`", hint=hint)
    message: str = error.format_message()
    if (unknown := re.match(r"No such command '(.*?)'", message)) is not None:
        names = tuple(getattr(command, "commands", {}))
        known = _COMMANDS.get(unknown[1], "")
        hint = f"in ktc it is `{path} {known}`" if known in names else suggest(unknown[1], names)
        hint = hint or f"`{path} --help` lists the commands"
        return Diagnostic("U001", f"`{path}` has no command `{unknown[1]}`", hint=hint)
    return Diagnostic("U001", _in_our_words(message), hint=_usage(error) or f"`{path} --help` shows how it is used")


def _option_hint(option: str, command: Any, path: str) -> str:
    """Return the name that ktc has for the option, a similar one, or where the options are listed."""
    names = sorted(_names(command))
    typed = option.lstrip("-").replace("_", "-")
    for name in (typed, *FIELD_OPTIONS.get(typed, ())):
        if f"--{name}" in names and f"--{name}" != option:
            return f"in ktc it is `--{name}`"
    if typed in _MODEL_OPTIONS and (argument := _first_argument(command)):
        return f"the model is the argument {argument}: `{path} {argument} ...`"
    return suggest(option, [name for name in names if name != "--help"]) or f"`{path} --help` lists the options"


def _names(command: Any) -> Iterator[str]:
    for parameter in getattr(command, "params", ()):
        if parameter.param_type_name == "option":
            yield from (*parameter.opts, *parameter.secondary_opts)


def _first_argument(command: Any) -> str:
    parameters = getattr(command, "params", ())
    return next((one.metavar or one.name.upper() for one in parameters if one.param_type_name == "argument"), "")


def _in_our_words(message: str) -> str:
    """Convert typer's `Missing argument 'MODEL'.` to ``missing argument `MODEL` ``."""
    quoted = re.sub(r"'([^']*)'", r"`\1`", message).rstrip(".")
    quoted = _TOO_MANY.sub(r"there are more arguments than it takes: `\1`", quoted)
    return (quoted[:1].lower() + quoted[1:]).replace("Value error, ", "").replace("Input should", "it should")


def _usage(error: Any) -> str:
    """Return the usage line of the command, or an empty text."""
    context = getattr(error, "ctx", None)
    return "" if context is None else " ".join(str(context.get_usage()).split()).replace("Usage: ", "usage: `", 1) + "`"
