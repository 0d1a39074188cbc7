"""Decoding steps as programs: a step is recorded once, and its operations then run in one native call."""
