"""The processes of a run.

world            `World`: rank, size, device, and the collectives that trainers need
process_group    joining torch's process group and leaving it
stopping         signals that ask a run to stop, and the places where all ranks leave a step together
threads          threads for calls that may hang
spans            when parts of a run worked
peak             the peak of this process's memory
heap             freed memory that stays with the process
failures         after a rank has died, the other ranks name it
"""

from rlft_fast.world.failures import naming_lost_ranks
from rlft_fast.world.heap import keep_freed_memory
from rlft_fast.world.peak import PeakMemory
from rlft_fast.world.process_group import (
    end_with_parent,
    ensure_process_group,
    init_distributed,
    leaving_process_group,
)
from rlft_fast.world.spans import SPANS, Span
from rlft_fast.world.stopping import STOP, LeftEarlyError, write_at_once
from rlft_fast.world.threads import DaemonThreads
from rlft_fast.world.world import RAISED_BY, World, accumulate, collective_timeout, forked_rng

__all__ = [
    "RAISED_BY",
    "SPANS",
    "STOP",
    "DaemonThreads",
    "LeftEarlyError",
    "PeakMemory",
    "Span",
    "World",
    "accumulate",
    "collective_timeout",
    "end_with_parent",
    "ensure_process_group",
    "forked_rng",
    "init_distributed",
    "keep_freed_memory",
    "leaving_process_group",
    "naming_lost_ranks",
    "write_at_once",
]
