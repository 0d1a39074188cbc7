"""Between a GPU and its host: pinned memory, copies, work beside the stream, and calls of the CPU from a CUDA graph."""
