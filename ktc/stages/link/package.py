"""`Package` -> OUT: the compiled model as a Python package, a Hugging Face model folder and a record, in one folder.

In: the results of the stages, as text and plain values. Out: the folder, written as a whole or not at all. The weights
and the code of the checkpoint are not copied. Refused: all refusals of `check_out`, a full disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jinja2
from transformers import CONFIG_MAPPING

from ktc.diagnostics import render
from ktc.foundation import resources, versions
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint import WeightSource, write_sources
from ktc.model.loading import peft_glue
from ktc.model.manifest import manifest
from ktc.model.manifest.assumptions import NO_ASSUMPTIONS, Assumptions
from ktc.model.manifest.manifest import (
    KernelRecord,
    LibraryRecord,
    Manifest,
    ModelRecord,
    Rewrite,
    RulesRecord,
    Versions,
)
from ktc.stages.link.data_files import copy_data_files, without_code_references
from ktc.stages.link.folder import write_folder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelFile:
    """The rendered source of one kernel and its spec as plain values (`dtype` among them).

    `build` is the digest of everything that its code was built from.
    """

    entry: str
    spec: Mapping[str, Any]
    text: str
    build: str


@dataclass(frozen=True, slots=True)
class Package:
    """The content of OUT.

    `name` is the base name in adapters (a hub id or the checkpoint's path). `checkpoint` is the folder with config.json
    and the weights. `class_name` and `dtype` are the stock class and its dtype under torch's name ("bfloat16"). `rules`
    is the entry among `rule_files`, which maps names to texts; `graphs` maps stage names to JSON. `plan` is any JSON
    value that differs between two plans, `bindings` the source of the Python bindings. `lora` is the arguments of
    `LoraConfig` or `None`. `proofs` are the reports of the rewrites, and `blocks` the code of blocks by its file.
    `assumptions` are the facts about the stock model on which the rewrites rest.
    `own_code` states whether the class is defined by the checkpoint's code, and `code` is the sha256 of those files.
    `memory` is the planned bytes of tensors per device, `cuda_graph` whether decoding steps are captured, and
    `processes` the number in which `ktc train` runs.
    `model_type` is the stock one: a checkpoint may use a name that transformers does not know. `has_towers` states
    whether the model reads images or sound beside text, and `left_out_bytes` the size of towers that it goes without.
    """

    name: str
    checkpoint: Path
    class_name: str
    dtype: str
    weights: tuple[WeightSource, ...]
    rules: str
    settings: Mapping[str, str]
    rule_files: Mapping[str, str]
    host: Mapping[str, Any]
    isa: str
    plan: Any
    kernels: tuple[KernelFile, ...]
    bindings: str
    library: Path | None
    rewrites: tuple[Rewrite, ...]
    placement: Mapping[str, str]
    lora: Mapping[str, Any] | None
    graphs: Mapping[str, str]
    proofs: tuple[Mapping[str, Any], ...] = ()
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    model_type: str = ""
    blocks: Mapping[str, str] = field(default_factory=dict[str, str])
    assumptions: Assumptions = NO_ASSUMPTIONS
    cuda_graph: bool = False
    processes: int = 1
    has_towers: bool = False
    left_out_bytes: int = 0
    own_code: bool = False
    code: Mapping[str, str] = field(default_factory=dict[str, str])


def link(package: Package, out: Path, force: bool = False, trial: Callable[[Path], None] | None = None) -> Path:
    """Write `package` to `out` and return its absolute path. Raises `InputRefused` as `check_out` does, and I145.

    `trial` gets the whole folder before it is put at `out`; if it raises, nothing is there.
    """
    out = out.absolute()

    def fill(folder: Path) -> None:
        _fill(folder, package, out.name)
        if trial is not None:
            trial(folder)

    write_folder(out, fill, force)
    return out


def _fill(folder: Path, package: Package, name: str) -> None:
    for file, text in _texts(package, name).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    if package.library is not None:
        shutil.copyfile(package.library, folder / _library_file(package.library))
    for warning in copy_data_files(package.checkpoint, folder):
        log.warning("%s", render([warning]))


def _texts(package: Package, name: str) -> dict[str, str]:
    """Return every text file, by its path within the folder."""
    facts = {
        "name": name,
        "model": _in_docstring(package.name),
        "rules": _in_docstring(package.rules),
        "version": versions.__version__,
        "stock": package.class_name,
    }
    texts = {
        "config.json": _config(package),
        peft_glue.FILE: _json(package.lora),
        "weights.json": write_sources(package.weights),
        "proofs.json": _json(package.proofs),
        "__init__.py": _rendered("__init__.py.j2", facts),
        "modeling_ktc.py": _rendered("own_code.py.j2" if package.own_code else "modeling_ktc.py.j2", facts),
    }
    texts |= package.blocks
    sealed = {file: _sha256(texts[file].encode()) for file in (*manifest.SEALED, *package.blocks)}
    texts[manifest.FILE] = _manifest(package, sealed).to_json()
    texts |= {f"rules/{file}": text for file, text in package.rule_files.items()}
    texts |= {f"graph/{stage}.json": text for stage, text in package.graphs.items()}
    texts |= {_kernel_file(kernel): kernel.text for kernel in package.kernels}
    if package.bindings:
        texts["kernels/bindings.cpp"] = package.bindings
    return texts


def _in_docstring(text: str) -> str:
    """Escape a path or name with arbitrary characters for a docstring of generated Python."""
    return text.encode("unicode_escape").decode("ascii").replace('"', "'")


def _config(package: Package) -> str:
    """Return the stock config with ktc's class; model type and config class stay, so that other tools know it.

    The quantisation config is removed: the model that is loaded from OUT is not quantised.
    """
    content = read_json(read_regular(package.checkpoint / "config.json"))
    config = without_code_references(cast("dict[str, Any]", content))
    for part in (config, *config.values()):
        if isinstance(part, dict):
            cast("dict[str, Any]", part).pop("quantization_config", None)
    if config.get("model_type") not in CONFIG_MAPPING:  # the config of an object may be a part of the file's
        config["model_type"] = package.model_type or config.get("model_type")
    config["architectures"] = [f"Ktc{package.class_name}"]
    if not package.own_code:  # only ktc loads a model defined by its own code
        readers = ("AutoModelForCausalLM", *(("AutoModelForImageTextToText",) if package.has_towers else ()))
        config["auto_map"] = dict.fromkeys(readers, f"modeling_ktc.Ktc{package.class_name}")
    return _json(config)


def _manifest(package: Package, files: Mapping[str, str]) -> Manifest:
    rule_text = "".join(f"# {file}\n{text}" for file, text in sorted(package.rule_files.items()))
    library = package.library
    return Manifest(
        schema=manifest.SCHEMA,
        versions=Versions.installed(),
        isa=package.isa,
        host=package.host,
        model=ModelRecord(
            name=package.name,
            folder=str(package.checkpoint.resolve()),
            class_name=package.class_name,
            dtype=package.dtype,
            config_sha256=_sha256(read_regular(package.checkpoint / "config.json")),
            own_code=package.own_code,
            code=dict(package.code),
            left_out_bytes=package.left_out_bytes,
        ),
        rules=RulesRecord(package.rules, dict(package.settings), rule_text, _sha256(rule_text.encode())),
        plan_sha256=_sha256(json.dumps(package.plan, sort_keys=True).encode()),
        kernels=tuple(
            KernelRecord(k.entry, dict(k.spec), _kernel_file(k), _sha256(k.text.encode()), k.build)
            for k in package.kernels
        ),
        library=None if library is None else LibraryRecord(_library_file(library), _sha256(library.read_bytes())),
        rewrites=package.rewrites,
        assumptions=package.assumptions,
        placement=dict(package.placement),
        memory=dict(package.memory),
        cuda_graph=package.cuda_graph,
        processes=package.processes,
        files=files,
    )


def _kernel_file(kernel: KernelFile) -> str:
    return f"kernels/{kernel.entry}.cpp"


def _library_file(library: Path) -> str:
    return f"lib{library.name.removeprefix('lib')}"


def _rendered(template: str, facts: Mapping[str, str]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(resources.templates() / "package"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(facts)


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
