"""Models that reinforcement fine-tuning trains: a policy with log-probabilities, a critic, and a reward model.

heads          the log-probability head, and the three models around packed sequences
loading        builds a model from a Hugging Face folder and loads its weights
folders        tokenizers and configurations of Hugging Face folders
weights        the weights of a model folder
value_head     a critic's head in model folders
ends           end tokens and stop texts
packed         the inputs of a packed forward
attention      attention over packed sequences, and for generation
routing        records and replays the experts that routers choose
architectures  which models can be packed
probe          finds what a model does between its backbone and its logits
images         images of vision-language models
adapters       low-rank adapters
patch          log-probabilities inside any trainer: patch_lm_head

Names are imported on first use: a tokenizer needs no code of models, which transformers takes seconds to import.
"""

from typing import TYPE_CHECKING

from rlft_fast.errors import names_on_first_use

if TYPE_CHECKING:
    from rlft_fast.models.adapters import adapter_parameters, add_lora, disabled_lora, low_rank_factors
    from rlft_fast.models.architectures import (
        layer_configs,
        padded_attention,
        padded_implementation,
        position_limit,
        require_divisible_heads,
        require_fixed_rope,
        require_packed_attention,
        require_positions,
        rope_limits,
    )
    from rlft_fast.models.attention import (
        PACKED_ATTENTION,
        LookAhead,
        RowCache,
        RowStates,
        all_rows_of_own_heads,
        needs_more_than_boundaries,
        packed_attention,
        prepare_chunks,
        sinks_of_own_heads,
    )
    from rlft_fast.models.ends import Ends, end_token_ids, generation_defaults, split_stop
    from rlft_fast.models.folders import hidden_size, image_family, is_quantized, load_tokenizer, padding_id
    from rlft_fast.models.heads import LogprobHead, PolicyModel, RewardModel, RLModel, ValueModel
    from rlft_fast.models.images import (
        ImageFamily,
        ImageInputs,
        blank_image,
        check_images,
        has_three_positions,
        has_vision,
        prepare_images,
        prepare_look_ahead,
        rotary_positions,
        sees_ahead,
    )
    from rlft_fast.models.loading import (
        build_critic,
        build_policy,
        build_reward_model,
        check_loadable,
        folder_dtype,
        load,
        load_critic,
        load_policy,
        require_same_computation,
    )
    from rlft_fast.models.packed import ModelInputs, final_hidden
    from rlft_fast.models.patch import LogprobOutput, added_keywords, patch_lm_head, unpatch_lm_head
    from rlft_fast.models.probe import require_next_token_loss
    from rlft_fast.models.routing import Routers, Routing, check_routers, has_routers
    from rlft_fast.models.value_head import head_parameters, stored_head, token_classifier
    from rlft_fast.models.weights import (
        CheckpointPart,
        checkpoint_parts,
        checkpoint_tensors,
        keeps_float32,
        load_weights,
        local_part,
        materialize,
        model_checksum,
        name_kinds,
        name_some,
    )

__all__ = [
    "PACKED_ATTENTION",
    "CheckpointPart",
    "Ends",
    "ImageFamily",
    "ImageInputs",
    "LogprobHead",
    "LogprobOutput",
    "LookAhead",
    "ModelInputs",
    "PolicyModel",
    "RLModel",
    "RewardModel",
    "Routers",
    "Routing",
    "RowCache",
    "RowStates",
    "ValueModel",
    "adapter_parameters",
    "add_lora",
    "added_keywords",
    "all_rows_of_own_heads",
    "blank_image",
    "build_critic",
    "build_policy",
    "build_reward_model",
    "check_images",
    "check_loadable",
    "check_routers",
    "checkpoint_parts",
    "checkpoint_tensors",
    "disabled_lora",
    "end_token_ids",
    "final_hidden",
    "folder_dtype",
    "generation_defaults",
    "has_routers",
    "has_three_positions",
    "has_vision",
    "head_parameters",
    "hidden_size",
    "image_family",
    "is_quantized",
    "keeps_float32",
    "layer_configs",
    "load",
    "load_critic",
    "load_policy",
    "load_tokenizer",
    "load_weights",
    "local_part",
    "low_rank_factors",
    "materialize",
    "model_checksum",
    "name_kinds",
    "name_some",
    "needs_more_than_boundaries",
    "packed_attention",
    "padded_attention",
    "padded_implementation",
    "padding_id",
    "patch_lm_head",
    "position_limit",
    "prepare_chunks",
    "prepare_images",
    "prepare_look_ahead",
    "require_divisible_heads",
    "require_fixed_rope",
    "require_next_token_loss",
    "require_packed_attention",
    "require_positions",
    "require_same_computation",
    "rope_limits",
    "rotary_positions",
    "sees_ahead",
    "sinks_of_own_heads",
    "split_stop",
    "stored_head",
    "token_classifier",
    "unpatch_lm_head",
]

__getattr__ = names_on_first_use(__name__)
