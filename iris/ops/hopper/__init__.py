"""Fused operations for NVIDIA Hopper, in Gluon: tensor memory accelerator, mbarriers, wgmma, warps with roles."""
