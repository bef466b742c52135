"""Grouped GEMM, as the experts of a layer need it: each group of rows times a matrix of its own, on one GPU."""
