"""TRL's trainers with the fused head, and their logs side by side."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from trl.trainer import utils

from rlft_fast.integrations.trl import disable, enable

KERNEL = utils._ChunkedLogProbFunction


@contextmanager
def only_fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Enabled, and an error if TRL's own kernel runs."""
    enable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(KERNEL, "forward", None)
            yield
    finally:
        disable()


def compare(theirs: list[dict[str, float]], ours: list[dict[str, float]]) -> None:
    """All that TRL logs, step by step; the first `grad_norm` shows that there was something to compare."""
    assert [set(step) for step in theirs] == [set(step) for step in ours]
    assert len(theirs) >= 5
    assert theirs[0]["grad_norm"] > 0.01
    for number, (step, other) in enumerate(zip(theirs[:-1], ours[:-1], strict=True), 1):  # the last has times alone
        for key in step:
            if not key.endswith(("runtime", "per_second", "time")):
                assert other[key] == pytest.approx(step[key], rel=1e-5, abs=1e-5), (number, key)
