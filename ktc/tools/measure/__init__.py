"""The rates of this machine, measured: `ktc doctor --measure`, and the limits that `ktc bench` compares with.

In: this machine. Out: its rates with their spreads, for the file that plans are made from. The parts are the processor
(`cpu`, `limits`), the GPUs (`gpu`), the buses (`bus`, `links`), the disk (`disk`) and other programs (`load`).
"""
