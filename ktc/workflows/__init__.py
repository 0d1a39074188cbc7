"""Uses of a compiled model, each behind a command: train, export, merge, generate, serve, evaluate."""
