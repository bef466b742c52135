"""What torch.compile and autograd see of the library."""
