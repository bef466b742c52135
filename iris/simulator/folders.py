"""Where the files of this library, its simulator, its sanitizer and Triton are: whose code a line of a stack is of."""

import os
from pathlib import Path

import numpy
import torch
import triton

IRIS = str(Path(__file__).parents[1]) + os.sep
SANITIZER = IRIS + "sanitizer" + os.sep
SIMULATOR = IRIS + "simulator" + os.sep
TRITON = str(Path(triton.__file__).parent) + os.sep
# None of a kernel's lines in these are the user's.
LIBRARIES = (IRIS, TRITON, *(str(Path(library.__file__).parent) + os.sep for library in (numpy, torch)))
