"""Ways to hold less in a training step: what autograd saves, and parameters, made again or kept elsewhere."""
