"""The manifest of a compiled model (`ktc.json`): what it was made of, for which versions and machine, and its recipe.

In: the text of the file. Out: a frozen `Manifest`. Refused: a folder that is no compiled model, another schema, a file
that says less than the schema asks for.
"""

from __future__ import annotations

import json
import shlex
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import ktc
from ktc.diagnostics import Diagnostic, InputRefused

FILE = "ktc.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Versions:
    """What the compiled model was made with; `python_abi` names the interpreter that can load its library."""

    ktc: str
    torch: str
    transformers: str
    peft: str
    python_abi: str

    @classmethod
    def installed(cls) -> Versions:
        """Those of this environment."""
        return cls(
            ktc=ktc.__version__,
            torch=metadata.version("torch"),
            transformers=metadata.version("transformers"),
            peft=metadata.version("peft"),
            python_abi=str(sysconfig.get_config_var("SOABI")),
        )


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The source model: `name` as adapters name it, `class_name` the stock class, `dtype` as torch spells it."""

    name: str
    folder: str
    class_name: str
    dtype: str
    config_sha256: str


@dataclass(frozen=True, slots=True)
class RulesRecord:
    """The rule program: its entry file below `rules`, its settings, its whole text and the hash of that."""

    name: str
    settings: Mapping[str, str]
    text: str
    sha256: str


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One entry of the library: its spec, the file of its source within the folder, and the source's sha256."""

    entry: str
    spec: Mapping[str, Any]
    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class LibraryRecord:
    file: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One module to be put in place at `fqn`: a step of the realisation recipe. `kernel` is an entry of the library."""

    fqn: str
    module: str
    kernel: str | None
    device: str
    args: Mapping[str, Any]
    rule: str
    span: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole record. `placement` maps module names to devices; the nearest ancestor's entry counts."""

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
    placement: Mapping[str, str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def renewal(self, folder: Path) -> str:
        """The command that compiles this model again into `folder`, by the rules that the folder holds."""
        settings = (part for key, value in self.rules.settings.items() for part in ("--set", f"{key}={value}"))
        rules = str(folder / "rules" / self.rules.name)
        return shlex.join(["ktc", "compile", self.model.name, rules, "-o", str(folder), *settings, "--force"])


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the compiled model in `folder`. Raises `InputRefused` (L400 none, L401 schema, L402 damaged)."""
    try:
        content: object = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        hint = "name the folder that `ktc compile ... -o OUT` wrote"
        raise InputRefused(
            Diagnostic("L400", f"`{folder}` is no compiled model: it has no `{FILE}`", hint=hint)
        ) from error
    except (OSError, ValueError) as error:
        raise InputRefused(_damaged(folder, str(error))) from error
    if not isinstance(content, dict):
        raise InputRefused(_damaged(folder, "it holds no JSON object"))
    fields = cast("dict[str, Any]", content)
    if fields.get("schema") != SCHEMA:
        message = f"`{folder / FILE}` has schema {fields.get('schema')}, this ktc reads schema {SCHEMA}"
        raise InputRefused(
            Diagnostic("L401", message, hint=f"compile it again: `ktc compile MODEL RULES -o {folder} --force`")
        )
    try:
        return _manifest(fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputRefused(_damaged(folder, f"{type(error).__name__}: {error}")) from error


def _damaged(folder: Path, what: str) -> Diagnostic:
    hint = f"compile it again: `ktc compile MODEL RULES -o {folder} --force`"
    return Diagnostic("L402", f"`{folder / FILE}` is damaged: {what}", hint=hint)


def _manifest(fields: Mapping[str, Any]) -> Manifest:
    library = fields["library"]
    read: dict[str, Any] = {
        **fields,
        "versions": Versions(**fields["versions"]),
        "model": ModelRecord(**fields["model"]),
        "rules": RulesRecord(**fields["rules"]),
        "kernels": tuple(KernelRecord(**kernel) for kernel in fields["kernels"]),
        "library": None if library is None else LibraryRecord(**library),
        "rewrites": tuple(Rewrite(**rewrite) for rewrite in fields["rewrites"]),
    }
    return Manifest(**read)
