"""What a teacher says of a batch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlft_fast.config import TopKTeacherConfig
from rlft_fast.data import Batch
from rlft_fast.engine import Output


def asked_of_teacher(config: TopKTeacherConfig | None) -> tuple[Output, ...]:
    """The outputs to infer of a teacher."""
    return ("logprob",) if config is None or config.num_ids is None else ("logprob", "top_ids", "top_logprob")


def with_teacher(batch: Batch, outputs: Mapping[Output, Tensor], num_embeddings: int) -> Batch:
    """The batch with what its teacher says.

    Args:
        batch: that the outputs are of.
        outputs: of the teacher, see `asked_of_teacher`.
        num_embeddings: of the model that learns. Ids beyond them, of rows that pad a teacher's embeddings, are no ids.
    """
    batch = batch.replace(teacher_logprob_T=outputs["logprob"])
    if "top_ids" not in outputs:
        return batch
    ids_TK, logprob_TK = outputs["top_ids"], outputs["top_logprob"]
    is_known = ids_TK < num_embeddings
    return batch.replace(
        teacher_ids_TK=ids_TK.where(is_known, 0), teacher_logprob_TK=logprob_TK.where(is_known, -torch.inf)
    )
