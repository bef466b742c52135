"""What carries a kernel to the GPU, and the library's own memory that its kernels use."""
