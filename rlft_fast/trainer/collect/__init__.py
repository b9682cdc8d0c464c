"""The first half of a step: prompts, samples and their rewards become an experience.

collector   asks for answers, judges them, infers what the update needs
curriculum  prompts by their pass rate
experience  what a step learns from
judge       rewards of samples
overlap     collects while the update runs
schedule    which groups may start, and when
source      the samples of each step, from all of these
"""

from rlft_fast.trainer.collect.collector import Collector, own_rows, own_samples
from rlft_fast.trainer.collect.curriculum import Curriculum
from rlft_fast.trainer.collect.experience import (
    Experience,
    build_batch,
    logged_tokens,
    merge_metrics,
    mini_batch_rows,
    mismatch,
    rollout_metrics,
    sample_records,
    scored_samples,
    staleness_metrics,
)
from rlft_fast.trainer.collect.judge import Judge, load_functions
from rlft_fast.trainer.collect.source import SampleSource

__all__ = [
    "Collector",
    "Curriculum",
    "Experience",
    "Judge",
    "SampleSource",
    "build_batch",
    "load_functions",
    "logged_tokens",
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
