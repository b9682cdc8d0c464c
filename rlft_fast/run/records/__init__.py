"""What a run writes down of its steps, and how it is read and drawn again.

log         numbers and samples as JSON lines, and what is shown
step_files  files of single steps
tokens      numbers of every token of a step
rollouts    the samples of each step as tensors, for a replay
timeline    when each part of a run worked
plot        curves of runs
trackers    TensorBoard, Weights & Biases, Trackio, MLflow and Prometheus

Names are imported on first use, as those of `rlft_fast.run`.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.run.records.log import RunLog
    from rlft_fast.run.records.plot import (
        COLORS,
        PANELS,
        drawable,
        is_exact_integer,
        parse_json,
        plot_runs,
        read_metrics,
    )
    from rlft_fast.run.records.rollouts import read_rollout, require_replayable, write_rollout
    from rlft_fast.run.records.step_files import step_files_after
    from rlft_fast.run.records.timeline import PHASE_COLORS, Timeline, draw_timeline, merged, read_timeline
    from rlft_fast.run.records.tokens import read_tokens, token_columns, write_tokens
    from rlft_fast.run.records.trackers import TrackedRun, Tracker, require_trackers

__all__ = [
    "COLORS",
    "PANELS",
    "PHASE_COLORS",
    "RunLog",
    "Timeline",
    "TrackedRun",
    "Tracker",
    "draw_timeline",
    "drawable",
    "is_exact_integer",
    "merged",
    "parse_json",
    "plot_runs",
    "read_metrics",
    "read_rollout",
    "read_timeline",
    "read_tokens",
    "require_replayable",
    "require_trackers",
    "step_files_after",
    "token_columns",
    "write_rollout",
    "write_tokens",
]

__getattr__ = names_on_first_use(__name__)
