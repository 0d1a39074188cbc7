"""AMX on processors that have AVX512-BF16 alone: the compiler gets the tile instructions as functions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import pytest

from ktc.foundation import host
from ktc.foundation.isa import INSTRUCTION_SETS

HEADER: Final = Path(__file__).parent / "tiles" / "software_tiles.hpp"  # alone: its folder is part of a digest


def use() -> None:
    """Let this process, and kernels that it builds from now on, take the functions for AMX. Exits where it cannot."""
    if "avx512_bf16" not in host.detect().isas:
        pytest.exit("--software-tiles needs a processor with AVX512-BF16: nothing is tested", returncode=0)
    vectors = INSTRUCTION_SETS["avx512_bf16"]
    flags = (f"-I{HEADER.parent}", "-include", HEADER.name)
    row = replace(INSTRUCTION_SETS["amx"], cpu=vectors.cpu, compiler=(*vectors.compiler, *flags))
    cast("dict[str, Any]", INSTRUCTION_SETS)["amx"] = row
    host._kernel_supports_amx = lambda: True
