"""`ktc export --gguf`: a model, with an adapter merged into it or not, as a GGUF file that llama.cpp and ktc load.

In: a checkpoint or a compiled model of one, an adapter, and the type of matrices. Out: a folder with the file, or its
shards, config.json and the tokenizer; or the file alone. It is renamed when it is whole. Memory holds a band of
rows; names follow GGUF's convention.
Refused: an existing target (A609), an unknown architecture (A606), an adapter that was trained beside rounded weights
(Q505), and the errors of the plan and the rows (Q504, Q510, Q511).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ktc.adapters.conversion import write_record
from ktc.adapters.gguf import architecture_of, require_gguf
from ktc.adapters.merge import copy_others
from ktc.adapters.save import EXPORT, WRITTEN_BY, require_new
from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.environment import small_model
from ktc.foundation.files import new_folder, refusing, replaced_file, write_file
from ktc.foundation.progress import Progress
from ktc.foundation.regular_files import read_regular
from ktc.inference.quantize.gguf_rows import codes_of, rows_of
from ktc.inference.quantize.gguf_settings import add_settings
from ktc.inference.quantize.gguf_tensors import Q4_0, FilePlan, FileTensor, parameters, plan_file
from ktc.inference.quantize.gguf_text import NOTE, text_config
from ktc.inference.quantize.gguf_tokenizer import add_tokenizer
from ktc.inference.quantize.original import Original, open_original
from ktc.inference.quantize.trained_grids import merged_grid, rounded_in_training
from ktc.model.checkpoint.gguf_file_name import file_name, label_of, name_of_model
from ktc.model.checkpoint.gguf_types import TYPE_NAMES
from ktc.model.checkpoint.index import INDEX_FILE
from ktc.model.checkpoint.reader import TensorReader

MatrixType = Literal["f32", "f16", "bf16", "q8_0"]
_NUMBERS: Final = {name: number for number, name in TYPE_NAMES.items()}
_FILE_TYPES: Final = {
    "f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", Q4_0: "MOSTLY_Q4_0",
}  # fmt: skip
_BESIDE: Final = "export the INT4 model and the adapter, each with `--gguf`: `llama-cli --lora` adds it beside"
_NOT_ROUNDED: Final = "training rounded weights to `{}`, and these are not: `ktc merge --int4` first, then `--gguf`"


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What was written: the files, the tensors by type, the kind of tokenizer, and weights that were left out.

    `notes` say what llama.cpp computes differently.
    """

    path: Path
    files: tuple[str, ...]
    tensors: int
    types: dict[str, int]
    bytes: int
    tokenizer: str
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def write_gguf_model(
    model: Path, out: Path, matrices: MatrixType = "bf16", progress: Progress | None = None, *,
    adapter: Path | None = None, shard_bytes: int = 0, force: bool = False,
) -> WrittenFile:  # fmt: skip
    """Write `model`, with `adapter` merged, to the folder `out`, or to a file if `out` ends in `.gguf`.

    `shard_bytes`: split into files of about so many bytes; 0: one file. `force` permits the replacement of a
    model at `out`. Raises InputRefused; nothing is at `out` then.
    """
    gguf = require_gguf()
    original = open_original(model, adapter)
    grid = merged_grid(rounded_in_training(model, adapter), _BESIDE) if adapter else ""
    architecture = architecture_of(original.base)
    text = text_config(original.base)
    plan = plan_file(original, architecture, matrices)
    require_new(out, force, (model, adapter))
    alone = out.suffix == ".gguf"
    if alone and shard_bytes:
        message = f"`{out.name}` is one file, and shards are several"
        raise InputRefused(Diagnostic("Q512", message, hint="name a folder: `-o FOLDER`"))
    with refusing(out), replaced_file(out) if alone else new_folder(out, replaces=force) as path:
        writer = gguf.GGUFWriter(path, architecture, split_max_size=shard_bytes)
        name = _describe(writer, gguf, original, plan, matrices)
        vocabulary = int(original.base.config.get_text_config().vocab_size)
        kind = add_tokenizer(writer, original.base.folder, original.base.model_type, vocabulary)
        notes = add_settings(writer, original.base, architecture)
        notes = notes if text is None else (*notes, NOTE)
        notes = (*notes, _NOT_ROUNDED.format(grid)) if grid else notes
        if not alone:
            called = file_name(name, label_of(*_counts(original, plan)), encoding=_main_type(plan, matrices))
            writer.path = path / called
        _write(writer, gguf, original, plan, progress or (lambda done, total: None))
        files = tuple(Path(file.name).name for file in writer.fout)
        size = sum(Path(file.name).stat().st_size for file in writer.fout)
        if not alone:
            copy_others(original.base.folder, path)
            (path / INDEX_FILE).unlink(missing_ok=True)
            _write_config(path, text)
            settings = {"type": matrices, "shard_bytes": str(shard_bytes)}
            write_record(path, "gguf", original.base.folder, adapter, settings, files)
    types = dict(Counter(tensor.type for tensor in plan.tensors))
    return WrittenFile(out, (out.name,) if alone else files, len(plan.tensors), types, size, kind, plan.left_out, notes)


def _write_config(folder: Path, text: Mapping[str, Any] | None) -> None:
    """Remove from config.json how the original's weights were quantised: the file's types say how its are.

    A file of the part for text has the config `text`.
    """
    path = folder / "config.json"
    config: dict[str, Any] = dict(text or json.loads(read_regular(path).decode()))
    if config.pop("quantization_config", None) is not None or text is not None:
        write_file(path, json.dumps(config, indent=2) + "\n")


def _main_type(plan: FilePlan, matrices: MatrixType) -> str:
    """Return the type by which the file is known: Q4_0 if most of its weights are."""
    sizes = Counter[str]()
    for tensor in plan.tensors:
        sizes[tensor.type] += tensor.nbytes
    return Q4_0 if sizes[Q4_0] > sizes[matrices] else matrices


def _counts(original: Original, plan: FilePlan) -> tuple[int, int, int]:
    """Return the weights outside of experts, those of one expert in all layers, and the number of experts."""
    shared, experts = parameters(plan.tensors)
    count = max((target.experts for target in original.base.targets.values()), default=0)
    return shared, experts // count if count else 0, count


def _describe(writer: Any, gguf: Any, original: Original, plan: FilePlan, matrices: MatrixType) -> str:
    """Add what says which model this is, and return its name."""
    folder = Path(original.base.name)
    name = name_of_model(small_model(folder) or folder.name)
    shared, expert, count = _counts(original, plan)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_string(WRITTEN_BY, EXPORT)
    writer.add_name(name)
    writer.add_basename(name)
    writer.add_size_label(label_of(shared, expert, count))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPES[_main_type(plan, matrices)]])
    return name


def _write(writer: Any, gguf: Any, original: Original, plan: FilePlan, progress: Progress) -> None:
    """Write the headers of all shards, then the tensors in order."""
    import numpy as np

    for tensor in plan.tensors:
        kind = gguf.GGMLQuantizationType(_NUMBERS[tensor.type])
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    total = sum(tensor.nbytes for tensor in plan.tensors)
    done = 0
    try:
        with original.reader({}) as (rows, _), TensorReader(original.stored.folder) as stored:
            for file, tensors in zip(writer.fout, writer.tensors, strict=True):
                for name in tensors:
                    file.write(b"\0" * (-file.tell() % writer.data_alignment))
                    done += _write_tensor(by_name[name], original, rows, stored, file)
                    progress(done, total)
                file.write(b"\0" * (-file.tell() % writer.data_alignment))
    finally:
        for file in writer.fout:
            file.close()


def _write_tensor(tensor: FileTensor, original: Original, rows: Any, stored: TensorReader, file: Any) -> int:
    if tensor.type == Q4_0:
        bands = codes_of(tensor, dict(original.weights.coded), original.stored, stored)
    else:
        bands = rows_of(tensor, rows)
    written = 0
    for band in bands:
        file.write(band.data if band.flags.c_contiguous else band.tobytes())
        written += band.nbytes
    assert written == tensor.nbytes, f"{tensor.name}: {written} bytes, not {tensor.nbytes}"
    return written
