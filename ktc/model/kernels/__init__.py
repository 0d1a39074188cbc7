"""Native kernels: their specs, the library of an OUT, and calls into it."""
