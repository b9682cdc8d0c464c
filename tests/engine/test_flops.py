"""Counted FLOPs beside the products that torch counts while a model runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rlft_fast.data import Batch
from rlft_fast.engine import model_flops
from rlft_fast.models import load_critic, load_policy

LENGTH = 24


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma4", "mixtral"])
@pytest.mark.parametrize("backward", [False, True])
def test_flops_are_those_of_the_products(name, backward, tiny_model):
    model = load_critic(tiny_model(name)).float()
    backbone = model.pretrained
    backbone.set_attn_implementation("eager")  # torch counts plain products alone
    backbone.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        hidden = backbone(torch.arange(1, LENGTH + 1)[None], use_cache=False).last_hidden_state
        if backward:
            hidden.sum().backward()
    batch = Batch.from_samples([[1]], [[2] * LENGTH])  # the last token does not run
    attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]  # of all pairs, half of which are causal
    counted = counter.get_total_flops() - attention / 2
    assert model_flops(model, backward=backward).of(batch) == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("name", ["qwen2-vl", "llava", "idefics3", "gemma3-vision"])
def test_towers_are_left_out(name, tiny_model):
    model = load_critic(tiny_model(name))
    matrices = [x for layer in model.backbone.get_decoder().layers for x in layer.parameters() if x.dim() >= 2]
    assert model_flops(model, backward=False).per_token == 2 * sum(x.numel() for x in matrices)


def test_the_head_runs_for_sampled_tokens(tiny_model):
    model = load_policy(tiny_model("llama"))
    few, many = (Batch.from_samples([[1] * (20 - n)], [[2] * n]) for n in (4, 12))
    assert model_flops(model).of(many) - model_flops(model).of(few) == 6 * 8 * model.head.weight.numel()


def test_sequences_that_do_not_run_have_none(tiny_model):
    flops = model_flops(load_policy(tiny_model("llama")))
    batch = Batch.from_samples([[1] * 5, [1] * 9], [[2] * 4, [2] * 3])
    first = batch.replace(loss_weight_T=(torch.arange(batch.num_tokens) < 9).float())
    assert flops.of(first) == flops.of(batch.select([0]))


def test_equal_prefixes_count_once_where_they_run_once(tiny_model):
    flops = model_flops(load_policy(tiny_model("llama")))
    one, three = ([[1, 2, 3]] * n for n in (1, 3))
    alone, copies = Batch.from_samples(one, [[4, 5, 6]]), Batch.from_samples(three, [[4, 5, 6], [4, 5, 6], [4, 7, 6]])
    heads, own, pairs = 6 * flops.per_active, flops.per_token, (5**2 - 4**2) / 2 * flops.per_pair  # of the 7
    assert flops.of(copies) == pytest.approx(flops.of(alone) + heads + own + pairs, rel=1e-12)
    padded = flops._replace(is_padded=True)
    assert padded.of(copies) == pytest.approx(3 * flops.of(alone), rel=1e-12)


def test_a_frozen_weight_has_no_gradient(tiny_model):
    model = load_policy(tiny_model("llama"))
    batch = Batch.from_samples([[1]], [[2]])
    frozen = model.backbone.layers[0].mlp.up_proj.weight
    trained = model_flops(model).of(batch)
    frozen.requires_grad_(False)
    assert trained - model_flops(model).of(batch) == 2 * frozen.numel()  # of one token: the last does not run
