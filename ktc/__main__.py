"""`python -m ktc`, and `torchrun -m ktc train`: the command line."""

from ktc.cli.app import run

if __name__ == "__main__":
    run()
