"""Experts sent to a GPU at each use: the ring, its sizes, the chunks of a layer, and layers that processes share."""
