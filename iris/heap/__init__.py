"""Memory that all ranks share: an allocator, a mapping, and the heap made of both."""

from iris.heap.allocator import HeapStats
from iris.heap.mapping import describe_address
from iris.heap.symmetric import SymmetricHeap

__all__ = ["HeapStats", "SymmetricHeap", "describe_address"]
