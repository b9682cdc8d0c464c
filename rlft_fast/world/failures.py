"""When a rank of a run dies, the others say which one: what a collective reports is only that somebody is gone.

Ranks leave the reason of their end in the store that they met at. One whose collective failed reads what the others
left; who left nothing was killed.
"""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from rlft_fast.errors import RunError
from rlft_fast.world.collectives import get_rank, get_world_size

_COLLECTIVE = ("gloo", "nccl", "connection", "broken pipe", "timed out", "timeout", "socket")
_CONSEQUENCE = "lost another process"


class LostRankError(RunError):
    """Another process ended; the message names it."""


@contextlib.contextmanager
def naming_lost_ranks(store: dist.Store | None, patience_s: float = 10.0) -> Iterator[None]:
    """An error inside that comes from the end of another rank becomes a `LostRankError` that names it.

    Args:
        store: where ranks leave their reasons, from `init_distributed`; None: a single process.
        patience_s: seconds to wait for the others' reasons.

    Raises:
        LostRankError: a collective failed because of other ranks.
    """
    try:
        yield
    except Exception as error:
        if store is None:
            raise
        consequence = _is_collective_failure(error)
        _leave_reason(store, _CONSEQUENCE if consequence else f"{type(error).__name__}: {error}")
        if not consequence:
            raise
        raise LostRankError(_describe(_read_reasons(store, patience_s))) from error


def _is_collective_failure(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _COLLECTIVE)
    )


def _leave_reason(store: dist.Store, reason: str) -> None:
    with contextlib.suppress(RuntimeError):  # who kept the store may be the one that is gone
        store.set(f"end/{get_rank()}", reason[:500])


def _read_reasons(store: dist.Store, patience_s: float) -> dict[int, str | None]:
    """By rank, why it ended; None for those that left nothing in time."""
    reasons: dict[int, str | None] = {}
    deadline = time.monotonic() + patience_s
    for rank in range(get_world_size()):
        left = max(deadline - time.monotonic(), 0.01)
        try:
            store.wait([f"end/{rank}"], timedelta(seconds=left))
            reasons[rank] = store.get(f"end/{rank}").decode(errors="replace")
        except RuntimeError:
            reasons[rank] = None
    _wait_for_readers(store, [rank for rank, reason in reasons.items() if reason == _CONSEQUENCE], patience_s)
    return reasons


def _wait_for_readers(store: dist.Store, ranks: list[int], patience_s: float) -> None:
    """The store may live in rank 0, which therefore goes last."""
    with contextlib.suppress(RuntimeError):
        store.set(f"read/{get_rank()}", "yes")
        if get_rank() == 0:
            store.wait([f"read/{rank}" for rank in ranks], timedelta(seconds=patience_s))


def _describe(reasons: dict[int, str | None]) -> str:
    ended = [
        f"rank {rank} ended with {reason}" for rank, reason in reasons.items() if reason not in (None, _CONSEQUENCE)
    ]
    killed = [str(rank) for rank, reason in reasons.items() if reason is None]
    if killed:
        ended.append(f"rank {', '.join(killed)} ended without a word (killed, out of memory, or its machine is gone)")
    what = "; ".join(ended) or "a collective failed on every rank: the network, or a timeout that is too short"
    return f"{what}. Run again with --resume to continue from the newest checkpoint"
