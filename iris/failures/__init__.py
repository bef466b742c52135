"""What happens when a kernel, a wait or a rank fails."""
