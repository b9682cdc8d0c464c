"""When a rank of a run dies, the other ranks name it. A failed collective only reports that some rank is gone.

A rank that ends leaves the reason in the store at which the ranks met. A rank whose collective failed reads the reasons
of the others. A rank without a reason was killed.
"""

import contextlib
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from rlft_fast.errors import RunError, brief, text_of
from rlft_fast.world.world import World

# gloo raises a plain RuntimeError if a peer is gone (torch 2.13). Its text is the only sign; NCCL raises DistErrors.
_GLOO_WORDS = ("gloo", "nccl", "connection", "broken pipe", "timed out", "timeout", "socket")
_IN_GLOO = "gloo/transport"  # in its messages: the file that failed
_CONSEQUENCE = "lost another process"  # left in the store by a rank whose collective failed


class LostRankError(RunError):
    """Another process ended; the message names it."""


@contextlib.contextmanager
def naming_lost_ranks(world: World, patience_s: float = 10.0) -> Iterator[None]:
    """Turns the error of a failed collective inside into a `LostRankError`, which names the rank that ended first.

    Args:
        world: from `init_distributed`; ranks leave their reasons in its store.
        patience_s: seconds to wait for the reasons of other ranks.

    Raises:
        LostRankError: a collective failed because another rank ended.
    """
    try:
        yield
    except Exception as error:
        if world.store is None:
            raise
        consequence = _is_collective_failure(error)
        _leave_reason(world, _CONSEQUENCE if consequence else f"{type(error).__name__}: {brief(error)}")
        if not consequence:
            raise
        if isinstance(error, LostRankError):
            raise
        raise LostRankError(_describe(_read_reasons(world, patience_s))) from error


def name_lost_ranks_at_exit(world: World) -> None:
    """Has an error that ends this process go through `naming_lost_ranks` before it is shown."""
    show = sys.excepthook

    def show_named(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            with naming_lost_ranks(world) if isinstance(error, Exception) else contextlib.nullcontext():
                raise error
        except BaseException as named:
            show(type(named), named, trace if named is error else named.__traceback__)

    sys.excepthook = show_named


def _is_collective_failure(error: Exception) -> bool:
    # Other subclasses of RuntimeError, such as errors of a rollout, know their own cause.
    if type(error) is RuntimeError and any(word in text_of(error).lower() for word in _GLOO_WORDS):
        return True
    cause: BaseException | None = error  # of an error of a checkpoint, for instance
    while cause is not None:
        if isinstance(cause, dist.DistError) or _IN_GLOO in text_of(cause):
            return True
        cause = cause.__cause__
    return False


def _leave_reason(world: World, reason: str) -> None:
    assert world.store is not None
    with contextlib.suppress(RuntimeError):  # the store is gone if the rank that keeps it is gone
        world.store.set(f"end/{world.rank}", reason[:500])


def _read_reasons(world: World, patience_s: float) -> dict[int, str | None]:
    """The reason of each rank's end; None for a rank that left no reason in time."""
    store = world.store
    assert store is not None
    reasons: dict[int, str | None] = {}
    deadline = time.monotonic() + patience_s
    for rank in range(world.size):
        left = max(deadline - time.monotonic(), 0.01)
        try:
            store.wait([f"end/{rank}"], timedelta(seconds=left))
            reasons[rank] = store.get(f"end/{rank}").decode(errors="replace")
        except RuntimeError:
            reasons[rank] = None
    _wait_for_readers(world, [rank for rank, reason in reasons.items() if reason == _CONSEQUENCE], patience_s)
    return reasons


def _wait_for_readers(world: World, ranks: list[int], patience_s: float) -> None:
    """Has rank 0 wait until the other ranks have read, because rank 0 may keep the store."""
    assert world.store is not None
    with contextlib.suppress(RuntimeError):
        world.store.set(f"read/{world.rank}", "yes")
        if world.is_first:
            world.store.wait([f"read/{rank}" for rank in ranks], timedelta(seconds=patience_s))


def _describe(reasons: dict[int, str | None]) -> str:
    ended = [
        f"rank {rank} ended with {reason}" for rank, reason in reasons.items() if reason not in (None, _CONSEQUENCE)
    ]
    killed = [str(rank) for rank, reason in reasons.items() if reason is None]
    if killed:
        ended.append(f"rank {', '.join(killed)} ended without a word (killed, out of memory, or its machine is gone)")
    what = "; ".join(ended) or "a collective failed on every rank: the network, or a timeout that is too short"
    return f"{what}. Run again with --resume to continue from the newest checkpoint"
