"""A run that fails says so by name."""
