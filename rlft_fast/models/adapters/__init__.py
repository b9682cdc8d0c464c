"""Low-rank adapters.

lora     adds adapters, switches them off, and merges them
experts  adapters of all experts of a layer
"""

from rlft_fast.models.adapters.lora import (
    adapter_parameters,
    add_lora,
    disabled_lora,
    initialize_lora,
    low_rank_factors,
)

__all__ = ["adapter_parameters", "add_lora", "disabled_lora", "initialize_lora", "low_rank_factors"]
