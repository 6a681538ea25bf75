"""How a tensor plan is made: from the user's patterns, the model's own plan, or what the blocks look like."""
