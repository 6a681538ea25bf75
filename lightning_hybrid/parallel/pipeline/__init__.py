"""The stage cut: which part of a model is where, and how micro-batches go through it."""
