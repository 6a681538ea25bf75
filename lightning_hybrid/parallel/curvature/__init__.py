"""Kronecker-factored curvature: who sees inputs and slopes, who inverts what, and whole gradients out of shards."""
