"""The older import path of `iris.gluon`."""

from iris.gluon import *  # noqa: F403
