"""`ktc`, `python -m ktc`, and `torchrun -m ktc train`: the command line."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_INTERRUPTED = 130  # as in `ktc.cli.session`, which is imported below


def run() -> NoReturn:
    """Run the command line, also where Ctrl-C ends the imports that it begins with."""
    try:
        from ktc.cli import app

        app.run()
    except KeyboardInterrupt:
        sys.stderr.write("error[U130]: interrupted\n")
        sys.stderr.flush()
        os._exit(_INTERRUPTED)


if __name__ == "__main__":
    run()
