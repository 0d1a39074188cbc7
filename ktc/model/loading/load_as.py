"""Loading a compiled model as a given class: from its folder to an HF-compatible causal LM on the planned devices.

The stock class is built on meta tensors, the recipe is realised in it, and the weights are read from the original
checkpoint straight into their places. Refused, before anything is read: a folder of another schema, other versions or
another interpreter, altered files, a library that is not the one that was built, a changed source model, an instruction
set that this machine lacks.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused, render
from ktc.foundation import environment, host
from ktc.foundation.files import file_digest
from ktc.foundation.progress import Progress, progress_bar
from ktc.foundation.regular_files import read_regular
from ktc.model.attention.absorbed import AbsorbedAttention
from ktc.model.attention.decoding import fuse_sink_prompts
from ktc.model.attention.joined_keys import check_joined_keys
from ktc.model.attention.sparse import Sparse
from ktc.model.attention.sparse_check import check_sparse_steps
from ktc.model.attention.split_decode import SplitDecode, check_split_decode
from ktc.model.checkpoint import WeightSource, open_index, read_sources
from ktc.model.decode_steps.cuda_graph import DecodeGraphs
from ktc.model.decode_steps.gpu_linears import join_siblings, multiply_few_rows
from ktc.model.decode_steps.gpu_norms import fuse_norms
from ktc.model.decode_steps.gpu_rotary import fuse_rotary
from ktc.model.decode_steps.native_step import native_steps
from ktc.model.experts.module import FusedMoe
from ktc.model.experts.products.coded_check import check_products
from ktc.model.hf import generation_config, remote_code, stock_model
from ktc.model.hf.patching import stock_class
from ktc.model.hf.private_api import kept_in_fp32
from ktc.model.hf.router import FusedRouter, check_gpu_routing
from ktc.model.kernels.kernel_library import KernelLibrary, on_torch_threads
from ktc.model.kernels.step_context import StepContext
from ktc.model.linears.coded_weight import check_linear
from ktc.model.linears.lora_linear import FusedLinear
from ktc.model.linears.stored_linear import StoredLinear
from ktc.model.linears.streamed_linear import StreamedLinear
from ktc.model.loading import peft_glue
from ktc.model.loading.buffers import compute_buffers
from ktc.model.loading.kept import keep_experts
from ktc.model.loading.realise import realise
from ktc.model.manifest import assumptions
from ktc.model.manifest.manifest import Manifest, Versions, check_sealed, read_manifest
from ktc.model.manifest.stale_change_guard import Remembered, guard, remember
from ktc.model.manifest.stock_facts import assumptions_of
from ktc.model.packed_store import process_gpu, weight_store, weights_stage
from ktc.model.packed_store.host_table import show_tables, with_tables
from ktc.model.packed_store.memory import check_bytes
from ktc.model.packed_store.placement import check_devices, device_map, follow, return_loss_to_labels
from ktc.model.packed_store.random_weights import fill_random

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedFrom:
    """The folder and the options of a load, for weights that replace the first ones."""

    folder: Path
    manifest: Manifest
    library: KernelLibrary | None
    reference: bool
    allow_nonfinite: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedFrom:
        return self


class LoadOptions(TypedDict, total=False):
    """The options of `ktc.load` about reading weights."""

    weights: str | Path | None
    reference: bool
    map: bool
    allow_nonfinite: bool
    random_weights: int | None
    progress: Progress | None


def load_as(
    model_class: type[PreTrainedModel],
    folder: Path,
    *,
    config: PreTrainedConfig | None = None,
    attention: str | None = None,
    experts: str | None = None,
    **options: Unpack[LoadOptions],
) -> PreTrainedModel:
    """Load as an instance of `model_class`, with a `config` that was read from the folder and then changed.

    The model gets a copy of `config`. Raises TypeError for an unknown option.
    """
    if unknown := options.keys() - LoadOptions.__annotations__.keys():
        raise TypeError(f"a load has no option `{min(unknown)}`")
    weights, reference = options.get("weights"), options.get("reference", False)
    folder = folder.resolve()
    manifest = read_manifest(folder)
    if not reference:
        manifest = process_gpu.for_this_process(manifest, folder)
    checkpoint = Path(weights) if weights is not None else Path(manifest.model.folder)
    library = check_fit(manifest, folder, checkpoint, reference)
    fill = _filling(folder, manifest, checkpoint, library, options)
    placement = {} if reference else dict(manifest.placement)
    check_devices(() if reference else manifest.devices)
    model = build_on_meta(
        model_class, copy.deepcopy(config) or read_config(folder, model_class), manifest, attention, reference, experts
    )
    check_assumptions(manifest, model, folder)
    remembered = remember(model, manifest.rewrites)
    realise(model, manifest.rewrites, library, folder)
    read_to = with_tables(placement, manifest.rewrites)
    if not reference:
        check_gpu_products(model)
        check_bytes(model, manifest, folder, read_to)  # before anything is read; `completed` checks the loaded model
    with progress_bar(f"loading {folder.name}") as bar:
        fill(model, read_to, progress=options.get("progress") or bar)
    if library is not None:
        _warn_of_spinning(num_threads(manifest))
    base = manifest.model.name if weights is None else str(Path(weights).absolute())
    made_from = LoadedFrom(folder, manifest, library, reference, options.get("allow_nonfinite", False))
    return completed(model, made_from, placement, remembered, base)


def completed(
    model: PreTrainedModel, made_from: LoadedFrom, placement: Mapping[str, str], remembered: Sequence[Remembered],
    base: str,
) -> PreTrainedModel:  # fmt: skip
    """Return a model whose weights were read, made ready for calls. `remembered` are facts from before its rewrites.

    Raises `InputRefused`: L421 for a buffer that cannot be computed, L408 for a tensor without a value, L413 for a
    model of another size than the plan.
    """
    folder, manifest, reference = made_from.folder, made_from.manifest, made_from.reference
    compute_buffers(model, placement)
    model.tie_weights()
    weight_store.check_filled(model)
    if not reference:
        show_tables(model, manifest.rewrites)
        check_bytes(model, manifest, folder, placement)
    follow(model, placement)
    for module in model.modules():
        if isinstance(module, FusedLinear):
            module.round_weight()
        if isinstance(module, StreamedLinear) and not reference:
            module.begin()
    StepContext.given_to(model)
    guard(model, manifest.rewrites, remembered, folder)
    check_split_attention(model)
    check_gpu_routers(model)
    if not reference:
        fuse_sink_prompts(model, model.dtype)
    if manifest.cuda_graph and not reference:
        keep_experts(model)
        fuse_norms(model)
        fuse_rotary(model)
        join_siblings(model)
        multiply_few_rows(model)
        cast("Any", model).decode_graphs = DecodeGraphs()
    entry = next((kernel.entry for kernel in manifest.kernels if kernel.spec["op"] == "step"), None)
    if entry is not None and made_from.library is not None and not reference:
        cast("Any", model).decode_graphs = native_steps(made_from.library.kernel(entry), num_threads(manifest))
    cast("Any", model).loaded_from = made_from
    return _finished(model, folder, base, placement)


def check_gpu_products(model: nn.Module) -> None:
    """Compare products with codes of experts and linear layers, on the GPUs that compute them. Raises (H247)."""
    for module in model.modules():
        if isinstance(module, StoredLinear) and module.device.type == "cuda":
            check_linear(module.format, module.device)
        if isinstance(module, FusedMoe) and module.offload is not None and module.weights.packed is not None:
            for device in module.offload.devices:
                check_products(module.weights.packed, device)


def check_split_attention(model: nn.Module) -> None:
    """Compare attention of new tokens with PyTorch's, on the GPUs that compute it. Raises HostLacks (H248)."""
    answering = [module for module in model.modules() if isinstance(getattr(module, "decode", None), SplitDecode)]
    sparse = [module for module in answering if isinstance(module.sparse, Sparse)]
    absorbing = [module for module in answering if isinstance(module, AbsorbedAttention)]
    latents = {(stock_class(module), module.absorption): module for module in absorbing}
    devices = {parameter.device for module in answering for parameter in module.parameters()}
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            check_split_decode(device)
            for module in latents.values():
                check_joined_keys(module, device)
            check_sparse_steps(sparse, device)


def check_gpu_routers(model: nn.Module) -> None:
    """Compare routings with PyTorch's, on the GPUs that compute them. Raises HostLacks (H249)."""
    for module in model.modules():
        if isinstance(module, FusedRouter):
            device = next(cast("nn.Module", module).parameters()).device
            if device.type == "cuda":
                check_gpu_routing(module.routing.form, device)


def num_threads(manifest: Manifest) -> int:
    """Return how many threads the kernels of a compiled model use at most."""
    return max((step.args.get("threads", 1) for step in manifest.rewrites), default=1)


@functools.cache
def _warn_of_spinning(threads: int) -> None:
    """Warn (L452) where idle threads of PyTorch keep the cores that kernels on other threads need. Once per process."""
    if threads == 1 or torch.get_num_threads() == 1 or on_torch_threads(threads) or not environment.openmp_spins():
        return
    message = f"{threads} kernel threads wait for the cores on which PyTorch's {torch.get_num_threads()} threads spin"
    hint = "start the process with `OMP_WAIT_POLICY=passive`; see `ktc explain L452`"
    log.warning("%s", render([Diagnostic("L452", message, hint=hint, severity="warning")]))


def _filling(
    folder: Path, manifest: Manifest, checkpoint: Path, library: KernelLibrary | None, options: LoadOptions
) -> Callable[..., None]:
    """Return the function that fills a model: from a seed, or from its checkpoint, whose files are checked here.

    Raises InputRefused (L443) for random weights, or experts without a library, that are to be mapped.
    """
    map, seed = options.get("map", False), options.get("random_weights")
    if seed is not None:
        if map:
            raise InputRefused(Diagnostic("L443", "random weights cannot be mapped", hint="load them without `map`"))
        return functools.partial(fill_random, seed=seed)
    sources, index, store = read_rows(folder, manifest), open_index(checkpoint), None
    if library is not None:
        store = weights_stage.usable_store(folder, manifest, sources, index, map=map)
    elif map:
        message = "experts that run as their reference have no packed form that could be mapped"
        raise InputRefused(Diagnostic("L443", message, hint="load it without `map`"))
    stored, allow_nonfinite = weights_stage.StoredWeights(sources, index, store), options.get("allow_nonfinite", False)
    return functools.partial(weights_stage.fill_weights, stored=stored, map=map, allow_nonfinite=allow_nonfinite)


# Checks before anything is read


def check_fit(manifest: Manifest, folder: Path, checkpoint: Path, reference: bool) -> KernelLibrary | None:
    """Return the kernel library (checked when it is opened), `None` in reference mode. Raise every mismatch."""
    problems = _version_mismatches(manifest, folder, with_library=not reference and manifest.library is not None)
    if problems:
        raise InputRefused(*problems)
    check_sealed(manifest, folder)
    check_source(manifest, checkpoint)
    if reference or manifest.library is None:
        return None
    host.restrict(host.detect(), manifest.isa)
    entries = tuple((kernel.entry, str(kernel.spec["dtype"])) for kernel in manifest.kernels)
    file, digest = folder / manifest.library.file, manifest.library.sha256
    return KernelLibrary(file, digest, entries, renewal=manifest.renewal(folder))


def _version_mismatches(manifest: Manifest, folder: Path, with_library: bool) -> list[Diagnostic]:
    """Another release series may name modules otherwise; another interpreter cannot load the library."""
    installed = Versions.installed()
    problems: list[Diagnostic] = []
    for field in fields(Versions):
        exact = field.name == "python_abi"
        made, present = getattr(manifest.versions, field.name), getattr(installed, field.name)
        if (made == present if exact else _series(made) == _series(present)) or (exact and not with_library):
            continue
        message = f"`{folder.name}` was compiled with {field.name} {made}, installed is {present}"
        problems.append(Diagnostic("L403", message, hint=f"compile again: `{manifest.renewal(folder)}`"))
    return problems


def _series(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def check_source(manifest: Manifest, checkpoint: Path) -> None:
    """Raise `InputRefused` (L405) if the checkpoint is missing or its config has changed."""
    path = checkpoint / "config.json"
    if not path.is_file():
        hint = "say where it is: `--weights FOLDER`, in Python `load(weights=FOLDER)`"
        message = f"the model's checkpoint is no longer at `{checkpoint}`"
        if checkpoint != Path(manifest.model.folder):  # it was given
            message = f"the model's checkpoint is not at `{checkpoint}`: it has no `{path.name}`"
        raise InputRefused(Diagnostic("L405", message, hint=hint))
    if file_digest(path) != manifest.model.config_sha256:
        message = f"`{path}` has changed since the model was compiled"
        hint = "compile again, or name the original: `--weights FOLDER`, in Python `load(weights=FOLDER)`"
        raise InputRefused(Diagnostic("L405", message, hint=hint))


def check_assumptions(manifest: Manifest, model: PreTrainedModel, folder: Path) -> None:
    """Compare the stock model with the one that was compiled.

    Raise `InputRefused` (L427) for other settings; log a warning (L428) for other code of replaced classes.
    """
    present = assumptions_of(model, manifest.rewrites)
    hint = f"compile again: `{manifest.renewal(folder)}`"
    changed = list(itertools.islice(assumptions.differences(manifest.assumptions, present), 8))
    if changed:
        raise InputRefused(*(Diagnostic("L427", difference, hint=hint) for difference in changed))
    for name in assumptions.changed_code(manifest.assumptions, present):
        message = f"the code of `{name}` is not the code that was compiled, which runs instead"
        log.warning("%s", render([Diagnostic("L428", message, hint=hint, severity="warning")]))


def read_rows(folder: Path, manifest: Manifest) -> tuple[WeightSource, ...]:
    """Return the rows of `weights.json`. Raise `InputRefused` (L402)."""
    try:
        return read_sources(read_regular(folder / "weights.json"))
    except (OSError, ValueError) as error:
        hint = f"compile again: `{manifest.renewal(folder)}`"
        raise InputRefused(Diagnostic("L402", f"`{folder / 'weights.json'}` is damaged: {error}", hint=hint)) from error


def read_config(folder: Path, model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """Return the config of the compiled model, in the class that its model class takes."""
    config_class = remote_code.config_class_of(model_class)
    return cast("PreTrainedConfig", (config_class or AutoConfig).from_pretrained(folder))


# The model itself


def build_on_meta(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    manifest: Manifest,
    attention: str | None,
    reference: bool,
    experts: str | None = None,
) -> PreTrainedModel:
    """Build the stock modules without storage, each tensor in its final dtype. `config` is of the folder, or a part.

    `attention` and `experts` name implementations of transformers; the others are those that the stock model chooses.
    """
    config = stock_model.part_of(model_class, config)
    dtype = torch.float32 if reference else cast("torch.dtype", getattr(torch, manifest.model.dtype))
    config.architectures = [manifest.model.class_name]
    vars(config).pop("auto_map", None)  # it names a file of the compiled folder; this config may be saved elsewhere
    asked = {"attn_implementation": attention, "experts_implementation": experts}
    chosen: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    model = stock_model.build_on_meta(config, dtype, model_class, **chosen)
    _keep_in_fp32(model, dtype)
    return model


def realised_on_meta(
    model_class: type[PreTrainedModel], folder: Path, manifest: Manifest, library: KernelLibrary | None,
    *, reference: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """Build the compiled model of a folder without storage: its stock modules, with the recipe realised in them."""
    model = build_on_meta(model_class, read_config(folder, model_class), manifest, None, reference)
    realise(model, manifest.rewrites, library, folder)
    return model


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keep the tensors in fp32 that the class names, such as a router's correction bias, in a 16-bit model."""
    kept = kept_in_fp32(model, half=dtype == torch.float16)
    if not kept or dtype not in (torch.float16, torch.bfloat16):
        return
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and any(part in name for part in kept):
            tensor.data = tensor.data.float()


def _finished(model: PreTrainedModel, folder: Path, base: str, placement: Mapping[str, str]) -> PreTrainedModel:
    """Set the attributes that users read: origin, generation defaults, devices."""
    if (folder / generation_config.FILE).exists():
        model.generation_config = generation_config.read_generation_config(folder)
    # An adapter saved from this model names the original as its base, so that it loads anywhere.
    model.name_or_path = base
    model.config.name_or_path = base
    devices = device_map(placement)
    if devices is not None:
        cast("Any", model).hf_device_map = devices
    if len({device for device in placement.values() if device != "cpu"}) > 1:
        return_loss_to_labels(model)
    environment.apply_use_kt()
    peft_glue.install()
    return model
