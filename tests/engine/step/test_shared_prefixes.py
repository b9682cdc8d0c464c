"""Sequences that share sampled tokens: the loss and the gradient of the batch in which every sequence runs alone."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rlft_fast.data import Batch, share_prefixes
from rlft_fast.engine.forward import prepare_model_inputs
from rlft_fast.models import load_policy
from rlft_fast.models.packed import final_hidden
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, policy_loss
from tests.support.machine.distributed import run_distributed

SYSTEM, FIRST, TOOL = [5, 6, 7, 8], [30, 31, 32], [40, 41]


def episodes() -> Batch:
    """Two prompts behind a system message; episodes that part in their first turn, behind it, and at their last token.

    One episode is another's beginning, one is there twice, and one has a token of an environment where the others
    sampled it. Every token of every sequence has numbers of its own.
    """
    own = [
        ([*SYSTEM, 1], [*FIRST, *TOOL, 50, 51, 52], [1, 1, 1, 0, 0, 1, 1, 1]),
        ([*SYSTEM, 1], [*FIRST, *TOOL, 50, 51, 53], [1, 1, 1, 0, 0, 1, 1, 1]),
        ([*SYSTEM, 2, 3], [*FIRST, 60], [1, 1, 1, 1]),
        ([*SYSTEM, 1], [*FIRST, *TOOL, 54], [1, 0, 1, 0, 0, 1]),
        ([*SYSTEM, 1], [30, 33, 34], [1, 1, 1]),
        ([*SYSTEM, 1], FIRST, [1, 1, 1]),
        ([*SYSTEM, 1], [*FIRST, *TOOL, 50, 51, 53], [1, 1, 1, 0, 0, 1, 1, 1]),
    ]
    prompts, completions, masks = zip(*own, strict=True)
    batch = Batch.from_samples(prompts, completions, completion_masks=masks)
    generator = torch.Generator().manual_seed(0)
    fields = torch.randn(3, batch.num_tokens, generator=generator)
    return batch.replace(advantage_T=fields[0], old_logprob_T=fields[1] - 5.5, ref_logprob_T=fields[2] - 5.5)


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("llama")


def in_float64(model: nn.Module) -> nn.Module:
    """The model without the norms of transformers, which compute in float32 whatever the weights are."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if isinstance(norm, LlamaRMSNorm):
                own = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                own.weight = norm.weight
                setattr(module, name, own)
    return model.double()


def test_hidden_states_and_gradients_in_float64(path):
    batch = episodes()
    index, layout = batch.active_index_T, share_prefixes(batch)
    assert len(layout.token_index_U) == len(SYSTEM) + 14  # of 73
    shared = in_float64(load_policy(path).backbone)
    alone = in_float64(AutoModel.from_pretrained(path, attn_implementation="sdpa"))
    inputs = prepare_model_inputs(batch, torch.device("cpu"), backbone=shared)
    found = final_hidden(shared, inputs)[inputs.active_index_A]
    sequences = batch.input_ids_T.split(batch.lengths.tolist())
    expected = torch.cat([alone(input_ids=ids[None]).last_hidden_state[0] for ids in sequences])[index]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    weight_AD = torch.randn(expected.shape, dtype=torch.float64)  # another for each sequence of a shared token
    (found * weight_AD).sum().backward()
    (expected * weight_AD).sum().backward()
    actual, gradients = ({name: x.grad for name, x in model.named_parameters()} for model in (shared, alone))
    reference.assert_close(actual, gradients, 1e-13)


def check_gradient(rank: int, path: Path, batch: Batch, expected: dict, config: dict) -> None:
    for max_tokens in (64, 14):  # one micro-batch, and as many as there are
        engine = make_engine(path, max_tokens=max_tokens, config=config, temperature=reference.TEMPERATURE)
        engine.train_step(batch, policy_loss())
        reference.assert_close(reference.gradients(engine), expected, 2e-5)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "config"),
    [(1, {}), (2, {}), (2, {"sequence_parallel": 2})],
    ids=["one", "data", "sequence"],
)
def test_the_policy_gradient_is_that_of_every_sequence_alone(path, world_size, config):
    plain = reference.PlainPolicy(path, episodes())
    batch = near_policy(episodes(), plain.logprob_T.float())
    run_distributed(check_gradient, world_size, path, batch, plain.gradients(batch, "token-mean"), config)
