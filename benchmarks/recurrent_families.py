"""What families with recurrent layers take: a table in Markdown, from ktc's own decisions about small twins.

    python benchmarks/recurrent_families.py [FAMILY ...]

A row has the layers of one recurrent block that `moe-lora` adapts, why a decoding step is neither a CUDA graph nor
native ("yes" if it can be), and why requests of `ktc serve` take turns, which then have no prefix cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import torch

from ktc.foundation import host
from ktc.inference.serving.model_runner import ModelRunner
from ktc.language import dsl
from ktc.model import twin
from ktc.model.decode_steps.step_memory import unfit
from ktc.model.hf.foreign_errors import first_line
from ktc.stages.capture import capture
from ktc.stages.capture.types import ModelSource
from ktc.stages.match import match
from ktc.stages.plan import make_plan

FAMILIES: Final = (
    "bailing_hybrid", "granitemoehybrid", "inkling_text", "inkling2_text", "jamba", "kimi_linear", "lfm2_moe",
    "minimax", "nemotron_h", "qwen3_5_moe", "qwen3_next", "qwen4_exp",
)  # fmt: skip


def adapted(config: Any) -> str:
    """Return the layers of a recurrent block that the bundled program adapts."""
    captured = capture(ModelSource("twin", None, config, None))
    program = dsl.load("moe-lora", {"format": "bf16"})
    machine = host.detect()
    lora = make_plan(captured, (), match(captured, program, machine), program, machine).lora
    blocks = [site.fqn for site in captured.sites if captured.block(site.block).recurrent]
    names = {
        target.removeprefix(f"{fqn}.") for fqn in blocks for target in (lora.targets if lora else ())
        if target.startswith(f"{fqn}.")
    }  # fmt: skip
    return ", ".join(sorted(names)) or ("no recurrent block is found" if not blocks else "none")


def step(model: Any) -> str:
    """Return "yes" where the cache of a step can be at fixed addresses, else why not."""
    try:
        with torch.no_grad():
            cache = model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values
        return unfit(cache) or "yes"
    except ValueError as error:  # of a cache that counts no positions
        return f"its cache: {first_line(error)}"


def rows(families: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each family."""
    for family in families:
        config = twin.shrink(twin.default_config(family))
        config.dtype = torch.float32
        model = twin.build(config, 1, torch.float32).eval()
        served = ModelRunner(model).unbatched_reason or "batches"
        yield family, adapted(config), step(model), served


def main(*families: str) -> None:
    """Print the table."""
    print("| family | layers with LoRA | captured or native step | `ktc serve` takes turns since |")
    print("| --- | --- | --- | --- |")
    for cells in rows(families or FAMILIES):
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
