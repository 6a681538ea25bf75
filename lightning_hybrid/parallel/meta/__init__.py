"""Models on the meta device: values by seed and name, made where they are kept."""
