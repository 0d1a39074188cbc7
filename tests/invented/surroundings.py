"""The environment of a run of the zoo: a folder for code of models, and quiet libraries."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers.utils import logging


@contextmanager
def code_of_models_below(folder: Path) -> Generator[None]:
    """Let transformers copy the code of models to `folder` and import it there, and show no progress."""
    shown = logging.is_progress_bar_enabled()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
        patch.syspath_prepend(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            patch.delitem(sys.modules, name)  # a package that another folder holds
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown:
                logging.enable_progress_bar()


def forget_code_of_models() -> None:
    """Let the next load of a model run its code again, as a new process does."""
    for name in [name for name in sys.modules if name.startswith("transformers_modules.")]:
        del sys.modules[name]
