"""Tensor and sequence parallelism: the matrices of a block, and what is between them, dealt out to ranks."""
