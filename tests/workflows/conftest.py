"""An adapter of the twin that all tests here share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def adapter(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of `compiled` with a strong effect."""
    import torch
    from peft import get_peft_model

    import ktc
    from ktc.runtime.peft_glue import read_lora_config

    torch.manual_seed(1)
    tuned = get_peft_model(ktc.load(compiled, reference=True), read_lora_config(compiled))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    folder = tmp_path_factory.mktemp("adapter") / "tuned"
    tuned.save_pretrained(folder)
    return folder
