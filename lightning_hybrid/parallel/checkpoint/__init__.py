"""What a model and its optimizers are on disk, and how ranks write and read it."""
