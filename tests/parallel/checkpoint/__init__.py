"""Tests of checkpoints below the strategy."""
