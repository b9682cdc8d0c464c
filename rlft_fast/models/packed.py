"""The forward of a backbone, packed or padded: from token ids to final hidden states."""

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from rlft_fast.models.attention import Chunks, CountedPositions, LookAhead, cache_argument, counts_tokens_before
from rlft_fast.models.images import ImageInputs, embed_with_images
from rlft_fast.ops.packing import RowIndex


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """What a forward pass needs: U rows, all of a micro-batch, or one rank's share of them.

    A row is a token that runs; tokens that several sequences begin with run once, see `rlft_fast.data.share_prefixes`.
    In a padded pass the rows are those of a (U / L, L) batch, one sequence after the other, see
    `rlft_fast.data.pad_sequences`.

    Args:
        input_ids_U: (U,) int64.
        position_ids_U: (U,) int64, position of each token within its sequence; (3, U) time, height and width for models
            with a vision tower.
        cu_seqlens_q: (segments + 1,) int32 boundaries of the segments, among the rows of all ranks of the group.
        cu_seqlens_k: (segments + 1,) int32 boundaries of the keys that each segment attends to; equal to
            `cu_seqlens_q` where every segment attends to itself alone.
        max_seqlen_q: length of the longest segment.
        max_seqlen_k: most keys of a segment.
        key_index: the row of each of the M keys among the rows of all ranks; None: keys are the rows in order.
        chunks: the segments of layers that attend within chunks; None: they have the segments of all layers.
        active_index_A: (A,) int64 rows that need the head; a row may need it several times, with different targets.
        target_A: (A,) int64 next tokens.
        output_index_A: (A,) int64 on the CPU, position in the micro-batch that each output belongs to.
        row_T: (T,) int64 on the CPU, the row of each token of the micro-batch; -1 where this rank runs none; None where
            nothing is asked of rows.
        support_AK: (A, K) int64 ids that each target was sampled among, -1 fills up; None: the whole vocabulary.
        routed_experts_UK: (U, layers * K) integers, the experts that routers are to choose; None: their own choice.
        images: for models with a vision tower.
        look_ahead: rows of images that attend to later ones; None: all are causal.
        sequence_group: the ranks that share the micro-batch; None: this rank has all of it.
        padded_length: L of a padded pass; None: the rows are packed.
    """

    input_ids_U: Tensor
    position_ids_U: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    key_index: RowIndex | None
    active_index_A: Tensor
    target_A: Tensor
    output_index_A: Tensor
    chunks: Chunks | None = None
    row_T: Tensor | None = None
    support_AK: Tensor | None = None
    routed_experts_UK: Tensor | None = None
    images: ImageInputs | None = None
    look_ahead: LookAhead | None = None
    sequence_group: ProcessGroup | None = None
    padded_length: int | None = None


def final_hidden(backbone: nn.Module, inputs: ModelInputs) -> Tensor:
    """(U, D) final hidden states."""
    if inputs.padded_length is None:
        return _packed_hidden(backbone, inputs)
    # No mask and no positions: the padding stands on the right, where no token of a causal model sees it.
    ids_BL = inputs.input_ids_U.view(-1, inputs.padded_length)
    return backbone(input_ids=ids_BL, use_cache=False).last_hidden_state.flatten(0, 1)


def _packed_hidden(backbone: nn.Module, inputs: ModelInputs) -> Tensor:
    if inputs.images is None:
        model, tokens = backbone, {"input_ids": inputs.input_ids_U[None]}
    else:
        model = cast(PreTrainedModel, backbone).get_decoder()
        tokens = embed_with_images(backbone, inputs.input_ids_U, inputs.images)
    counted = {}
    if counts_tokens_before(cast(PreTrainedModel, model).config):
        counted[cache_argument(model.forward)] = CountedPositions(inputs.position_ids_U)
    outputs = model(
        **tokens,
        **counted,
        position_ids=inputs.position_ids_U.unsqueeze(-2),  # a batch of one for transformers
        use_cache=False,
        cu_seq_lens_q=inputs.cu_seqlens_q,
        cu_seq_lens_k=inputs.cu_seqlens_k,
        max_length_q=inputs.max_seqlen_q,
        max_length_k=inputs.max_seqlen_k,
        key_index=inputs.key_index,
        chunks=inputs.chunks,
        look_ahead=inputs.look_ahead,
        sequence_group=inputs.sequence_group,
    )
    return outputs.last_hidden_state[0]
