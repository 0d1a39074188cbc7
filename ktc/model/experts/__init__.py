"""The routed experts of a layer: `module` and `weights`, and below them the rooms that compute, send and store them."""
