"""CUDA graphs: which one is being captured (`capture`), and memory that is not from its pool (`kept`)."""
