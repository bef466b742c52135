"""CUDA graphs: which one is being captured, and memory that is not from its pool."""
