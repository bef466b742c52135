"""Older import paths."""

from iris.experimental import iris_gluon

__all__ = ["iris_gluon"]
