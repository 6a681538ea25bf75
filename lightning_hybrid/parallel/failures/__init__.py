"""Who failed first, and how the others learn of it."""
