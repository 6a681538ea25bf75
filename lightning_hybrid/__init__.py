"""Hybrid parallelism for Lightning."""
