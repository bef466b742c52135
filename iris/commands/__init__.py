"""What the commands of ``python -m iris`` share."""
