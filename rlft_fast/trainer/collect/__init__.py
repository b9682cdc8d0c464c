"""The first half of a step: prompts, samples and their rewards become an experience.

collector   asks for answers, judges them, infers what the update needs
answers     a rank's answers to its share of the prompts
curriculum  prompts by their pass rate
experience  what a step learns from
judge       rewards of samples
overlap     collects while the update runs
schedule    which groups may start, and when
"""

from rlft_fast.trainer.collect.answers import own_rows, own_samples
from rlft_fast.trainer.collect.collector import Collected, Collector
from rlft_fast.trainer.collect.curriculum import Curriculum
from rlft_fast.trainer.collect.experience import (
    Experience,
    build_batch,
    merge_metrics,
    mini_batch_rows,
    mismatch,
    rollout_metrics,
    sample_records,
    scored_samples,
    staleness_metrics,
)
from rlft_fast.trainer.collect.judge import Judge, load_functions
from rlft_fast.trainer.collect.overlap import Overlap
from rlft_fast.trainer.collect.schedule import Schedule

__all__ = [
    "Collected",
    "Collector",
    "Curriculum",
    "Experience",
    "Judge",
    "Overlap",
    "Schedule",
    "build_batch",
    "load_functions",
    "merge_metrics",
    "mini_batch_rows",
    "mismatch",
    "own_rows",
    "own_samples",
    "rollout_metrics",
    "sample_records",
    "scored_samples",
    "staleness_metrics",
]
