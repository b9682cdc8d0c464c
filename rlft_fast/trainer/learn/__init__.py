"""The second half of a step: an experience becomes an update.

learner       micro-batches, optimizer steps, their metrics
objective     the loss of a micro-batch
distillation  what a teacher adds to it
teachers      which teachers a model can learn from

Names are imported on first use: what is asked of a teacher's tokenizer needs no models.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.trainer.learn.distillation import asked_of_teacher, with_teacher
    from rlft_fast.trainer.learn.learner import Learner
    from rlft_fast.trainer.learn.objective import Objective
    from rlft_fast.trainer.learn.teachers import check_embeddings, check_teacher, other_tokens

__all__ = [
    "Learner",
    "Objective",
    "asked_of_teacher",
    "check_embeddings",
    "check_teacher",
    "other_tokens",
    "with_teacher",
]

__getattr__ = names_on_first_use(__name__)
