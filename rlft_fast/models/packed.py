"""The packed forward of a backbone: from token ids to final hidden states."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rlft_fast.models.vision import ImageInputs, embed_with_images


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """What a packed forward pass needs: S rows, all of a micro-batch, or one rank's share of them.

    Args:
        input_ids: (1, S) int64.
        position_ids: (1, S) int64, of each token within its sequence; (3, 1, S) time, height and width for models
            with a vision tower.
        cu_seqlens_q: int32 boundaries of the segments, among the rows of all ranks of the group.
        cu_seqlens_k: int32 boundaries of the keys that each segment attends to; the same where a segment attends to
            itself alone.
        max_seqlen_q: length of the longest segment.
        max_seqlen_k: most keys of a segment.
        key_index: (K,) int64 row of each key among those of all ranks, None: keys are the rows in order.
        active_index: (A,) int64 rows that need the head; one may need it several times, with different targets.
        target: (A,) int64 next tokens.
        support: (A, K) int64 ids that each was sampled among, -1 fills up; None: the whole vocabulary.
        output_index: (A,) int64 on the CPU, position in the micro-batch that each output belongs to.
        images: for models with a vision tower.
        sequence_group: the ranks that share the micro-batch, None: this one has all of it.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: Tensor | None
    active_index: Tensor
    target: Tensor
    output_index: Tensor
    support: Tensor | None = None
    images: ImageInputs | None = None
    sequence_group: ProcessGroup | None = None


def packed_hidden(backbone: nn.Module, inputs: ModelInputs) -> Tensor:
    """(S, D) final hidden states of packed sequences."""
    if inputs.images is None:
        model, tokens = backbone, {"input_ids": inputs.input_ids}
    else:
        model = backbone.get_submodule("language_model")
        tokens = {"inputs_embeds": embed_with_images(backbone, inputs.input_ids, inputs.images)}
    outputs = model(
        **tokens,
        position_ids=inputs.position_ids,
        use_cache=False,
        cu_seq_lens_q=inputs.cu_seqlens_q,
        cu_seq_lens_k=inputs.cu_seqlens_k,
        max_length_q=inputs.max_seqlen_q,
        max_length_k=inputs.max_seqlen_k,
        key_index=inputs.key_index,
        sequence_group=inputs.sequence_group,
    )
    return outputs.last_hidden_state[0]
