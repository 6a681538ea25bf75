"""ZeRO by `fully_shard` under any schedule."""
