"""The second half of a step: an experience becomes an update.

learner       micro-batches, optimizer steps, their metrics
objective     the loss of a micro-batch
distillation  what a teacher adds to it
"""

from rlft_fast.trainer.learn.distillation import (
    asked_of_teacher,
    check_embeddings,
    check_teacher,
    other_tokens,
    with_teacher,
)
from rlft_fast.trainer.learn.learner import Learner
from rlft_fast.trainer.learn.objective import Objective

__all__ = [
    "Learner",
    "Objective",
    "asked_of_teacher",
    "check_embeddings",
    "check_teacher",
    "other_tokens",
    "with_teacher",
]
