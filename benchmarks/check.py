"""The time to check the shipped rule programs, imports done: `python benchmarks/check.py [ROUNDS]`."""

from __future__ import annotations

import sys
import time

from ktc.foundation import resources
from ktc.language import dsl


def milliseconds(program: str, rounds: int) -> list[float]:
    """Return the time of each round, in order."""
    times: list[float] = []
    for _ in range(rounds):
        started = time.perf_counter()
        dsl.load(program)
        times.append(1000 * (time.perf_counter() - started))
    return times


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    programs = sorted(path.stem for path in resources.rules().glob("*.ktr"))
    dsl.load(programs[0])  # reads the grammar
    print(f"{'program':32s}{'best':>8s}{'mean':>8s}  ms")
    for program in programs:
        times = milliseconds(program, rounds)
        print(f"{program:32s}{min(times):8.1f}{sum(times) / rounds:8.1f}")


if __name__ == "__main__":
    main()
