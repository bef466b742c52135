"""Fused operations for AMD CDNA3, in Gluon: buffer loads, matrix cores, shared memory of swizzled rows.

Compiled for gfx942 and gfx950 and run in the simulator; never run on an AMD GPU.
"""
