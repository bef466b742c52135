"""The folders of Iris, its simulator, its sanitizer and Triton: reports look there for the owner of a line of code."""

import os
from pathlib import Path

import triton

IRIS = str(Path(__file__).parents[1]) + os.sep
SANITIZER = IRIS + "sanitizer" + os.sep
SIMULATOR = IRIS + "simulator" + os.sep
TRITON = str(Path(triton.__file__).parent) + os.sep
