"""Threads of ours that ask a CUDA device, while the program captures a CUDA graph.

By default a capture ends with an error when any thread of the process asks about an event, or
allocates. A thread may say that it has nothing to do with the capture; ours do.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_this = threading.local()


def relax_this_thread() -> None:
    """Let this thread ask a device whenever it likes; never call it on a thread of the user's."""
    if not getattr(_this, "relaxed", False):
        _this.relaxed = True
        _exchange()(ctypes.byref(ctypes.c_int(_RELAXED)))


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread ask a device in here; for a thread of the user's, which stays as it was."""
    mode = ctypes.c_int(_RELAXED)
    _exchange()(ctypes.byref(mode))
    try:
        yield
    finally:
        _exchange()(ctypes.byref(mode))


@cache
def _exchange() -> Callable[[Any], object]:
    """Give the driver's call that exchanges the calling thread's capture mode."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return lambda mode: None  # not NVIDIA's driver, or one without graphs
