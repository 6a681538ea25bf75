"""Models to try the package with; plain Lightning."""
