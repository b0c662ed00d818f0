"""Reuse memory.

What. Tells the allocator of the C library to keep what tensors free, instead of handing it back to the
operating system, which clears every page of the next tensor anew. The same as a preloaded tcmalloc or
jemalloc does, without installing one.
Effect on quality. None: the same operations on the same numbers, to the last bit.
Effect on time. A step of BERT at size mini, one thread: 171 page faults instead of 7,636, 0.6 instead of
16.4 ms in the kernel, 86 instead of 90 ms of processor time in all.
Relieves. Forward pass, backward pass: what their memory costs the host; on a GPU it lies elsewhere.
When not. Machines whose memory is nearly full: what was freed stays with the process. Other C libraries than
glibc.
Use. With the model: `reuse_memory()`.
Source. https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html, on allocators; mallopt(3).
"""

import ctypes
import platform

from torch import nn

from common.errors import UserError
from common.training.method import Method

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # names of mallopt(3), as in malloc.h
NEVER, NONE = -1, 0


def reuse_memory() -> bool:
    """Keep freed memory in this process from now on; returns whether the C library can."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(TRIM_THRESHOLD, NEVER) and mallopt(MMAP_MAX, NONE))


class ReuseMemory(Method):
    """Holds for the whole process, from before the first step."""

    keeps_mathematics = True

    def model(self, model: nn.Module) -> nn.Module:
        """Raise UserError where the C library cannot."""
        if not reuse_memory():
            raise UserError("needs glibc", where=f"methods.{self.name}")
        return model
