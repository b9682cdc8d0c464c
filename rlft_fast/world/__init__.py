"""The processes of a run.

collectives    the process group, this process's rank and device, and the collectives that trainers need
stopping       signals that ask a run to stop, and the places where all ranks leave a step together
failures       after a rank has died, the other ranks name it
"""

from rlft_fast.world.collectives import (
    accumulate,
    all_gather_ragged,
    all_reduce,
    any_rank,
    barrier,
    collective_timeout,
    ensure_process_group,
    forked_rng,
    get_device,
    get_local_world_size,
    get_rank,
    get_world_size,
    init_distributed,
    leaving_process_group,
    require_agreement,
    sequence_group,
)
from rlft_fast.world.failures import naming_lost_ranks
from rlft_fast.world.stopping import STOP, LeftEarlyError

__all__ = [
    "STOP",
    "LeftEarlyError",
    "accumulate",
    "all_gather_ragged",
    "all_reduce",
    "any_rank",
    "barrier",
    "collective_timeout",
    "ensure_process_group",
    "forked_rng",
    "get_device",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "leaving_process_group",
    "naming_lost_ranks",
    "require_agreement",
    "sequence_group",
]
