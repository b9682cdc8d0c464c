"""Llama 4: attention within chunks, and queries that are scaled by their positions, packed."""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlft_fast.engine.forward import prepare_model_inputs
from rlft_fast.models import load_policy
from rlft_fast.models.packed import final_hidden
from tests.engine.reference import random_batch
from tests.support.numerics import assert_no_further_from_truth

CPU = torch.device("cpu")


def plain(path, batch, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hidden states, log-probabilities and gradients by transformers, of each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    hidden, logprobs = [], []
    for ids, active in zip(
        *(x.split(batch.lengths.tolist()) for x in (batch.input_ids_T, batch.active_T)), strict=True
    ):  # fmt: skip
        own = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        logprob = torch.log_softmax(model.lm_head(own), -1)[:-1].gather(1, ids[1:, None])[:, 0]
        hidden.append(own[active])
        logprobs.append(logprob[active[:-1]])
    return _numbers(model, torch.cat(hidden), torch.cat(logprobs))


def packed(path, batch) -> dict[str, Tensor]:
    policy = load_policy(path)
    assert not policy.padded_because
    inputs = prepare_model_inputs(batch, CPU, backbone=policy.backbone)
    assert inputs.chunks is not None
    assert inputs.key_index is not None  # prompts run once
    return _numbers(
        policy.model, final_hidden(policy.backbone, inputs)[inputs.active_index_A], policy(inputs).logprob
    )  # fmt: skip


def _numbers(model: torch.nn.Module, hidden: Tensor, logprob: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(0.5, 1.5, len(logprob), dtype=logprob.dtype)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad((weights * logprob).sum(), [*parameters.values()])
    flat = torch.cat([g.flatten() for _, g in sorted(zip(parameters, found, strict=True))])
    return {"hidden states": hidden.detach(), "log-probabilities": logprob.detach(), "gradients": flat}


def test_no_further_from_float64_than_transformers(tiny_model):
    path, batch = tiny_model("llama4"), random_batch(24)
    exact, eager = (plain(path, batch, dtype) for dtype in (torch.float64, torch.float32))
    ours = packed(path, batch)
    for name, truth in exact.items():
        assert_no_further_from_truth(ours[name], eager[name], truth)
