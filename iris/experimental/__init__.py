"""Older import paths."""
