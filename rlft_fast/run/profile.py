"""Traces of chosen steps by torch's profiler, which ui.perfetto.dev and chrome://tracing open."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from rlft_fast.config import ProfileConfig
from rlft_fast.files import replacing
from rlft_fast.world import World

FOLDER = "profile"


@contextlib.contextmanager
def profiled(config: ProfileConfig | None, output: Path, step: int, world: World) -> Iterator[None]:
    """Traces what runs inside, if the configuration names the step and this rank.

    A trace that cannot be written costs a warning: the step inside has changed the weights.

    Args:
        config: None: nothing is traced.
        output: folder of the run. The trace is ``profile/step_00000003_rank_0.json.gz`` in it.
        step: number of the step, from 1.
        world: of this process.
    """
    if config is None or step not in config.steps or world.rank not in config.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
        yield
    try:
        _write(profiler, output / FOLDER / f"step_{step:08d}_rank_{world.rank}.json.gz")
    except OSError as error:
        warnings.warn(f"step {step}: its trace is not kept: {error}", stacklevel=2)


def _write(profiler: torch.profiler.profile, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        whole = temporary.with_name(f"{temporary.name}.json.gz")  # the profiler compresses by the name's end
        try:
            profiler.export_chrome_trace(str(whole))
            whole.rename(temporary)
        finally:
            whole.unlink(missing_ok=True)
