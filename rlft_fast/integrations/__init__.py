"""The fused head inside trainers of others, by one line each. A trainer is imported with its own module here.

trl             TRL's trainers: ``rlft_fast.integrations.trl.enable()``
transformers    HF ``Trainer``: ``rlft_fast.integrations.transformers.FusedLossTrainer``

accelerate needs no module: it wraps a model after :func:`rlft_fast.patch_lm_head`.
"""

__all__: list[str] = []
