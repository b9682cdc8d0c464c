"""Workers on a Ray cluster: a driver calls the methods of groups of processes. Needs the extra ``ray``.

connecting  joining a cluster, or starting one on this machine
group       `WorkerGroup`: one world of worker processes, and how their ends are told
dispatch    how a call's arguments reach the workers, and how their results come back
workers     the roles: actor, rollout and reference; critic; reference alone; teacher; reward model; objectives of rows
remote      what a trainer holds in place of engines, rollout and checkpoints
beside      servers that the driver asks itself, while workers train
generators  vLLM servers that generate for a run, and replacements of servers that die
head        the head of the cluster, which is watched, and how to end without it
pool        places on a cluster that groups share, with their GPUs
resources   what a run asks for is compared with what a cluster has
usage       time and memory that calls take of the workers
sendable    what cannot be sent to workers is named
buffers     tensors travel as buffers, not as pickles

A cluster is trusted: Ray unpickles what its processes send. Ray listens on loopback unless it is told otherwise.
"""

from rlft_fast.cluster.beside import RolloutBeside
from rlft_fast.cluster.connecting import connect
from rlft_fast.cluster.dispatch import DP_COMPUTE_PROTO, ONE_TO_ALL, RANK_ZERO, Dispatch, register
from rlft_fast.cluster.generators import Generators
from rlft_fast.cluster.group import WorkerError, WorkerGroup
from rlft_fast.cluster.head import HEAD, HeadLostError
from rlft_fast.cluster.pool import ResourcePool
from rlft_fast.cluster.remote import RemoteCheckpoints, RemoteEngine, RemoteRollout
from rlft_fast.cluster.resources import num_cpus, parts_of, require_connected, require_own_machine, shared_part
from rlft_fast.cluster.sendable import require_sendable
from rlft_fast.cluster.usage import TotalUsage
from rlft_fast.cluster.workers import (
    ActorRolloutRefWorker,
    ColocatedWorker,
    CriticWorker,
    ReferenceWorker,
    RewardModelWorker,
    TaughtWorker,
    TeacherWorker,
    Worker,
)

__all__ = [
    "DP_COMPUTE_PROTO",
    "HEAD",
    "ONE_TO_ALL",
    "RANK_ZERO",
    "ActorRolloutRefWorker",
    "ColocatedWorker",
    "CriticWorker",
    "Dispatch",
    "Generators",
    "HeadLostError",
    "ReferenceWorker",
    "RemoteCheckpoints",
    "RemoteEngine",
    "RemoteRollout",
    "ResourcePool",
    "RewardModelWorker",
    "RolloutBeside",
    "TaughtWorker",
    "TeacherWorker",
    "TotalUsage",
    "Worker",
    "WorkerError",
    "WorkerGroup",
    "connect",
    "num_cpus",
    "parts_of",
    "register",
    "require_connected",
    "require_own_machine",
    "require_sendable",
    "shared_part",
]
