"""`python -m census`, with `benchmarks` among the paths of Python: the same command as `ktc census`."""

from __future__ import annotations

import sys

from ktc.cli.app import main

if __name__ == "__main__":  # processes of the census import this module under another name
    sys.exit(main(["census", *sys.argv[1:]]))
