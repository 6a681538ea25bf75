"""Pure functions: no process, no communication, no Lightning."""
