"""What other libraries offer to be extended by, filled with Iris: a package for each, imported by its name alone."""
