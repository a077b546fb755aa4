"""The environment that UCX reads, settled before it is read.

Rules
1. UCX reads its environment when it is loaded and when a context is made; so this runs before nixl is imported, and a
   process that imported nixl before us keeps what it had.
2. What the user set stands.
3. UCX sends tcp segments from buffers of TX_SEG_SIZE, 8 KiB by default, and receives them into buffers of RX_SEG_SIZE,
   64 KiB by default, without a look at what comes: so much may be sent at once to everybody who has not made that
   smaller, and whoever has is ended by it (docs/design.md, F9).
"""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
import threading
from typing import Final

from kvconn.config import LIMITS

__all__ = ["SEGMENT", "cma_usable", "prepare_ucx_env", "receives_too_little"]

log = logging.getLogger(__name__)

#: bytes of a tcp segment that ours sends, as many as UCX receives by default
SEGMENT: Final = 64 << 10
_SENT: Final = "UCX_TCP_TX_SEG_SIZE"
_RECEIVED: Final = "UCX_TCP_RX_SEG_SIZE"
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
#: run twice, as two processes that are no relatives of each other but siblings, like P and D on one host. The target
#: allows itself to be read, as UCX's own processes do under a Yama policy.
_CMA_PROBE: Final = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
mine = ctypes.create_string_buffer(b"kvconn" if sys.argv[1] == "target" else 6, 6)
if sys.argv[1] == "target":
    libc.prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)
    print(os.getpid(), ctypes.addressof(mine), flush=True)
    sys.stdin.read()
else:
    pid, address = int(sys.argv[2]), int(sys.argv[3])
    here, there = IoVec(ctypes.addressof(mine), 6), IoVec(address, 6)
    n = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    sys.exit(0 if n == 6 and mine.raw == b"kvconn" else 1)
"""


@functools.cache
def cma_usable() -> bool:
    """Whether one process here may read another's memory (``process_vm_readv``).

    Containers and sandboxes may refuse it. UCX asks only whether a process may read itself; where that is allowed and
    others are refused, it takes the refusal as fatal and aborts the process in the first transfer. Asked once per
    process; it costs two short-lived pythons.
    """
    command = [sys.executable, "-I", "-S", "-c", _CMA_PROBE]
    try:
        with subprocess.Popen(
            [*command, "target"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as target:
            guard = threading.Timer(LIMITS.probe, target.kill)
            guard.daemon = True
            guard.start()
            try:
                where = target.stdout.readline().split() if target.stdout else []
                if len(where) != 2:
                    return False
                reader = subprocess.run(
                    [*command, "reader", *where], timeout=LIMITS.probe, check=False, stderr=subprocess.DEVNULL
                )
                return reader.returncode == 0
            finally:
                guard.cancel()
                target.kill()
    except (OSError, subprocess.SubprocessError) as err:
        log.warning("cannot find out whether CMA is permitted, so UCX will not use it: %s", err)
        return False


def receives_too_little(size: str | None) -> bool:
    """Whether this UCX_TCP_RX_SEG_SIZE is less than what our producers send at once (rule 3)."""
    number = re.fullmatch(r"(\d+)([kmg]?)b?", (size or "").strip().lower())
    return number is not None and int(number[1]) * _UNITS[number[2]] < SEGMENT


def prepare_ucx_env() -> None:
    """Settle the environment before UCX reads it: no CMA where the kernel refuses it, errors only, none on stdout; tcp
    segments as large as a peer takes them, unless the user chose a size."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # its default, stdout, is the output of whoever loads us
    if _SENT not in os.environ and _RECEIVED not in os.environ:
        os.environ[_SENT] = str(SEGMENT)
    received = os.environ.get(_RECEIVED)
    if receives_too_little(received):
        log.warning(
            "%s=%s is less than the %d bytes that a producer of ours sends at once over tcp. UCX does not check: the "
            "first large answer ends this process. Unset it, or set %s to it on every producer",
            _RECEIVED, received, SEGMENT, _SENT,
        )  # fmt: skip
    if "UCX_TLS" not in os.environ and not cma_usable():
        log.warning("reading another process's memory is not permitted here; UCX_TLS=^cma keeps UCX from aborting")
        os.environ["UCX_TLS"] = "^cma"
