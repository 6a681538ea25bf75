"""What runs on `torch.distributed` and knows nothing of Lightning: mesh, stage cut, pipeline, gradients."""
