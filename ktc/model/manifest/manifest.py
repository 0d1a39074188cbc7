"""The manifest of a compiled model (`ktc.json`): its sources, versions and machine, and its realisation recipe.

In: the text of the file. Out: a frozen `Manifest`. Refused: a folder that is not a compiled model, another schema,
values that violate the schema, and sealed files that have changed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from ktc.diagnostics import Diagnostic, InputRefused, nearest
from ktc.foundation import versions
from ktc.foundation.decode import Undecodable, decode, read_json, schema_fault
from ktc.foundation.isa import isa_of
from ktc.foundation.regular_files import read_regular
from ktc.model.manifest.assumptions import Assumptions
from ktc.model.manifest.configs import CONFIGS, GRAPH_BLOCK
from ktc.model.targets.config import read_config

FILE = "ktc.json"
SCHEMA = 17
SEALED = ("__init__.py", "config.json", "lora.json", "modeling_ktc.py", "weights.json")

_MOST_PROCESSES = 1024  # of a machine, each with a GPU: more is a damaged number
_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions at compilation; `python_abi` names the interpreter that can load the library."""

    ktc: str
    torch: str
    transformers: str
    peft: str
    python_abi: str

    @classmethod
    def installed(cls) -> Versions:
        """Return the versions of this environment."""
        return cls(
            ktc=versions.__version__,
            torch=metadata.version("torch"),
            transformers=metadata.version("transformers"),
            peft=metadata.version("peft"),
            python_abi=str(sysconfig.get_config_var("SOABI")),
        )


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The source model: `name` as in adapters, `class_name` of the stock class, `dtype` as torch names it.

    `own_code`: the class is defined by code in `folder` and not by transformers; `code` has the sha256 of its files,
    by relative path. `left_out_bytes` are those of the towers for images and sound that `--text-only` left out.
    """

    name: str
    folder: str
    class_name: str
    dtype: str
    config_sha256: str
    own_code: bool
    code: Mapping[str, str]
    left_out_bytes: int


@dataclass(frozen=True, slots=True)
class RulesRecord:
    """The rule program: its entry file below `rules`, its settings, its whole text and the hash of that."""

    name: str
    settings: Mapping[str, str]
    text: str
    sha256: str


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One entry of the library: its spec, the file of its source within the folder, and the source's sha256.

    `build` is the digest of everything that the code of the entry was built from: source, headers, compiler, flags.
    """

    entry: str
    spec: Mapping[str, Any]
    source: str
    digest: str
    build: str


@dataclass(frozen=True, slots=True)
class LibraryRecord:
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One module to be put in place at `fqn`: a step of the realisation recipe.

    `kernel` is an entry of the library, `args` the plain values of the module's config.
    """

    fqn: str
    module: str
    kernel: str | None
    device: str
    args: Mapping[str, Any]
    rule: str
    span: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole record.

    `placement` maps module names to devices; the nearest ancestor's entry counts. `memory` has the bytes of tensors
    that the plan puts on each device, nothing where there was no plan. With `cuda_graph` the loaded model captures its
    decoding steps. `ktc train` runs in `processes`, each with a GPU. `files` has the sha256 of the files in `SEALED`,
    and of the code of blocks.
    """

    schema: int
    versions: Versions
    isa: str
    host: Mapping[str, Any]
    model: ModelRecord
    rules: RulesRecord
    plan_sha256: str
    kernels: tuple[KernelRecord, ...]
    library: LibraryRecord | None
    rewrites: tuple[Rewrite, ...]
    assumptions: Assumptions
    placement: Mapping[str, str]
    memory: Mapping[str, int]
    cuda_graph: bool
    processes: int
    files: Mapping[str, str]

    @property
    def devices(self) -> frozenset[str]:
        """Return the devices of modules, and those on which routed experts stay: a call needs all of them."""
        staying = (step.args["prefill"] for step in self.rewrites if step.args.get("resident"))
        return frozenset(self.placement.values()).union(*staying)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def renewal(self, folder: Path) -> str:
        """Return the command that compiles this model again into `folder`, by the rules in the folder."""
        settings = (part for key, value in self.rules.settings.items() for part in ("--set", f"{key}={value}"))
        rules = str(folder / "rules" / self.rules.name)
        options = ["--trust-remote-code"] if self.model.own_code else []
        options += ["--text-only"] if self.model.left_out_bytes else []
        return shlex.join(["ktc", "compile", self.model.name, rules, "-o", str(folder), *settings, *options, "--force"])


def _no_compiled_model(folder: Path) -> Diagnostic:
    if folder.exists():
        hint = "name the folder that `ktc compile ... -o OUT` wrote"
        return Diagnostic("L400", f"`{folder}` is not a compiled model: it has no `{FILE}`", hint=hint)
    siblings = {path.parent.name: path.parent for path in folder.parent.glob(f"*/{FILE}")}
    near = nearest(folder.name, siblings)
    hint = "a model is a folder, a hub id `owner/name`, or `tiny:NAME`; `ktc list` shows compiled ones"
    hint = hint if near is None else f"did you mean `{siblings[near]}`?"
    return Diagnostic("L400", f"there is no folder `{folder}`", hint=hint)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the model in `folder`. Raise `InputRefused` (L400 missing, L401 schema, L402 damaged)."""
    try:
        content: object = read_json(read_regular(folder / FILE))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputRefused(_no_compiled_model(folder)) from error
    except (OSError, ValueError) as error:
        raise InputRefused(_damaged(folder, str(error))) from error
    if not isinstance(content, dict):
        raise InputRefused(_damaged(folder, "it holds no JSON object"))
    fields = cast("dict[str, Any]", content)
    if fault := schema_fault(fields.get("schema"), SCHEMA):
        hint = f"compile it again: `ktc compile MODEL RULES -o {folder} --force`"
        raise InputRefused(Diagnostic("L401", f"`{folder / FILE}` {fault}", hint=hint))
    try:
        manifest = decode(fields, Manifest)
    except Undecodable as error:
        raise InputRefused(_damaged(folder, str(error))) from error
    if faults := tuple(_faults(manifest)):
        raise InputRefused(*(_damaged(folder, fault) for fault in faults))
    return manifest


def check_sealed(manifest: Manifest, folder: Path) -> None:
    """Raise `InputRefused` (L404) with the sealed files that have changed."""
    hint = f"compile it again: `{manifest.renewal(folder)}`"
    problems: list[Diagnostic] = []
    for name in manifest.files:
        try:
            digest = hashlib.sha256(read_regular(folder / name)).hexdigest()
        except OSError as error:
            problems.append(Diagnostic("L404", f"`{folder / name}` cannot be read: {error.strerror}", hint=hint))
            continue
        if digest != manifest.files[name]:
            message = f"`{folder / name}` was altered after the model was compiled"
            problems.append(Diagnostic("L404", message, hint=hint))
    if problems:
        raise InputRefused(*problems)


def _damaged(folder: Path, what: str) -> Diagnostic:
    hint = f"compile it again: `ktc compile MODEL RULES -o {folder} --force`"
    return Diagnostic("L402", f"`{folder / FILE}` is damaged: {what}", hint=hint)


def _faults(manifest: Manifest) -> Iterator[str]:
    """Yield the values of a valid type that are meaningless."""
    if isa_of(manifest.isa) is None:
        yield f"`.isa` is `{manifest.isa}`"
    if manifest.model.dtype not in _DTYPES:
        yield f"`.model.dtype` is `{manifest.model.dtype}`"
    if manifest.model.own_code != bool(manifest.model.code):
        number = len(manifest.model.code)
        yield f"`.model.own_code` is {manifest.model.own_code}, and `.model.code` names {number} files"
    if not 1 <= manifest.processes <= _MOST_PROCESSES:
        yield f"`.processes` is {manifest.processes}"
    if manifest.model.left_out_bytes < 0:
        yield f"`.model.left_out_bytes` is {manifest.model.left_out_bytes}"
    for fqn, device in manifest.placement.items():
        if not re.fullmatch(r"cpu|cuda(:\d{1,4})?", device):
            yield f"`.placement` puts `{fqn}` on `{device}`"
    if strange := [name for name in manifest.files if not re.fullmatch(r"(blocks/)?\w+\.(py|json)", name)]:
        yield f"`.files` names `{strange[0]}`"
    if missing := sorted(set(SEALED) - manifest.files.keys()):
        yield f"`.files` lacks `{missing[0]}`"
    if manifest.library is not None and not re.fullmatch(r"lib[\w.+-]*", manifest.library.file):
        yield f"`.library.file` is `{manifest.library.file}`"
    for kernel in manifest.kernels:
        if type(kernel.spec.get("dtype")) is not str:
            yield f"the spec of kernel `{kernel.entry}` has no dtype"
    for step in manifest.rewrites:
        yield from _step_faults(step, {kernel.entry for kernel in manifest.kernels})
        if step.module == GRAPH_BLOCK and step.args.get("file") not in manifest.files:
            yield f"the code of `{step.fqn}` is not sealed"


def _step_faults(step: Rewrite, kernels: set[str]) -> Iterator[str]:
    if step.module not in CONFIGS:
        yield f"the rewrite of `{step.fqn}` puts an unknown module `{step.module}` there"
        return
    if step.kernel is not None and step.kernel not in kernels:
        yield f"the rewrite of `{step.fqn}` uses a kernel `{step.kernel}` that does not exist"
    try:
        config_of(step)
    except Undecodable as error:
        yield f"the rewrite of `{step.fqn}` has no proper config: {error}"


def config_of(step: Rewrite) -> Any:
    """Return the config of the module that a step puts, of its class in `CONFIGS`. Raises `Undecodable`."""
    return read_config(CONFIGS[step.module], step.args)
