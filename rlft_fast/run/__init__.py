"""A run of any trainer: its loop, and everything in its folder.

protocol    what a run drives: a trainer and its models
progress    how far a run has come, as its checkpoints hold it
run         `Run`: the loop around a trainer's steps, with checkpoints, weights and summary
folder      which run a folder belongs to, and which settings a resumed run must share with that run
going_back  what came after an earlier checkpoint becomes a run of its own
lock        one run at a time writes to a folder
store       a copy of the run in an object store
copies      copies to the store while the training goes on
phases      time, memory and waiting in the parts of a step
profile     what torch's profiler sees of chosen steps
records     what a run writes down of its steps: log, tokens, samples, timeline, curves, trackers

Names are imported on first use: some only read files, and torch would take seconds to import. The names that users need
are names of `rlft_fast.trainer`, too.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.run.folder import (
        claim,
        differences,
        dotted,
        is_run,
        naming_start,
        require_restartable,
        require_same,
        require_usable,
        settings_of,
    )
    from rlft_fast.run.lock import is_in_use, require_unlocked, running_since
    from rlft_fast.run.phases import Phases
    from rlft_fast.run.protocol import Evaluated, StepResult, Trainer
    from rlft_fast.run.records import (
        COLORS,
        PANELS,
        PHASE_COLORS,
        RunLog,
        Timeline,
        draw_timeline,
        drawable,
        is_exact_integer,
        parse_json,
        plot_runs,
        read_metrics,
        read_rollout,
        read_timeline,
        read_tokens,
        require_replayable,
        require_trackers,
        token_columns,
    )
    from rlft_fast.run.run import Run, by_first
    from rlft_fast.run.store import Store

__all__ = [
    "COLORS",
    "PANELS",
    "PHASE_COLORS",
    "Evaluated",
    "Phases",
    "Run",
    "RunLog",
    "StepResult",
    "Store",
    "Timeline",
    "Trainer",
    "by_first",
    "claim",
    "differences",
    "dotted",
    "draw_timeline",
    "drawable",
    "is_exact_integer",
    "is_in_use",
    "is_run",
    "naming_start",
    "parse_json",
    "plot_runs",
    "read_metrics",
    "read_rollout",
    "read_timeline",
    "read_tokens",
    "require_replayable",
    "require_restartable",
    "require_same",
    "require_trackers",
    "require_unlocked",
    "require_usable",
    "running_since",
    "settings_of",
    "token_columns",
]

__getattr__ = names_on_first_use(__name__)
