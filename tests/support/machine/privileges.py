"""Runs code as a user whom permissions bind, also where tests run as root."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of linux/capability.h
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


@contextlib.contextmanager
def permissions_hold() -> Iterator[None]:
    """Inside, this thread and threads that it starts may not ignore the permissions of files."""
    if os.geteuid() != 0 or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (
        (ctypes.c_uint32 * 2)(_VERSION, 0),
        (ctypes.c_uint32 * 6)(),
    )  # (effective, permitted, inheritable) x 2
    assert libc.capget(header, data) == 0
    effective = data[0]
    data[0] = effective & ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = effective
        assert libc.capset(header, data) == 0
