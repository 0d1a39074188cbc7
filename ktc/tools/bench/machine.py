"""The machine of a run, as the reports of models show it."""

from __future__ import annotations

from importlib.metadata import version

import torch

from ktc.foundation import host


def machine(*packages: str) -> dict[str, str]:
    """Return processor, cores, instruction set, GPUs, and the versions of torch, transformers and `packages`."""
    here = host.detect()
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "cpu": host.cpu_name(),
        "cores": str(here.cores),
        "isa": here.isas[0],
        "gpus": ", ".join(gpus),
        **{name: version(name) for name in ("torch", "transformers", *packages)},
    }
