"""rlft_fast inside other trainers, by one line each. Every module imports its trainer only when the module is used.

trl             TRL's trainers: ``rlft_fast.integrations.trl.enable()``
transformers    HF ``Trainer``: ``rlft_fast.integrations.transformers.FusedLossTrainer``
verl            one line of verl's configuration: ``external_lib=rlft_fast.integrations.verl``
openrlhf        ``python -m rlft_fast.integrations.openrlhf`` starts OpenRLHF
lightrft        the units of LightRFT's ``FSDPV2Strategy``: ``rlft_fast.integrations.lightrft.enable``
vllm            tells vLLM's processes how to take weights, by an entry point
seams           refuses a trainer whose version lacks what an integration replaces

accelerate needs no module: it wraps a model after :func:`rlft_fast.patch_lm_head`.
"""

__all__: list[str] = []
