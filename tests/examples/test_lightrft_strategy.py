"""LightRFT's loop on `FSDPEngine`, beside the same loop in plain torch and transformers."""

from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

from examples.lightrft_fused import make_batch
from examples.lightrft_strategy import Strategy, make_actor, train
from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import unpatch_lm_head
from tests.support.machine.distributed import run_distributed

STEPS = 4


def prepared() -> tuple[Strategy, FSDPEngine]:
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01, max_grad_norm=0.1, schedule="linear")
    strategy = Strategy(EngineConfig(optimizer=optimizer), num_training_steps=STEPS, accumulated_gradient=2)
    return strategy, strategy.prepare(make_actor())


def plain_rewards(num_ranks: int) -> list[list[float]]:
    """By rank and step. The loss is the mean over micro-batches of two rows and over ranks."""
    model: LlamaForCausalLM = make_actor().model
    unpatch_lm_head(model)
    model.set_attn_implementation("eager")
    model.double()
    decayed, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    expected: list[list[float]] = [[] for _ in range(num_ranks)]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / STEPS)
        optimizer.zero_grad()
        for rank in range(num_ranks):
            total = 0.0
            for row in range(4):
                ids, mask, actions = (x[row] for x in make_batch(rank).values())
                width = make_batch(rank)["action_mask"][row // 2 * 2 : row // 2 * 2 + 2].sum()
                tokens, is_action = ids[mask > 0], torch.cat([mask[:4] * 0, actions])[mask > 0] > 0
                logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)[is_action[1:]]
                answer = tokens[is_action]
                logprob = logprobs.gather(1, answer[:, None])[:, 0]
                entropy, reward = -(logprobs.exp() * logprobs).sum(-1), 1 - answer / 32
                (-(reward * logprob + 0.01 * entropy).sum() / width / 2 / num_ranks).backward()
                total += (reward * logprob.detach().exp()).sum().item()
            expected[rank].append(total)
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return expected


def check(rank: int, folder: Path, expected: list[list[float]]) -> None:
    strategy, actor = prepared()
    assert train(strategy, actor, STEPS, folder) == pytest.approx(expected[rank], rel=1e-4)


def test_the_loop_learns_as_in_plain_torch_and_goes_on_from_its_checkpoints(tmp_path, capsys):
    (expected,) = plain_rewards(1)
    assert expected[-1] > expected[0]
    strategy, actor = prepared()
    assert train(strategy, actor, 2, tmp_path) == pytest.approx(expected[:2], rel=1e-4)
    strategy.save_ckpt(actor, tmp_path, tag="half", client_state={"expected": "half"})
    rest = train(strategy, actor, 2, tmp_path)
    assert rest == pytest.approx(expected[2:], rel=1e-4)
    strategy.report_memory("at the end", actor)
    assert capsys.readouterr().out.startswith("at the end: weights 0.000 GB, gradients 0.000 GB, optimizer 0.000 GB")
    strategy, again = prepared()
    assert strategy.load_ckpt(again, tmp_path, tag="half") == {"expected": "half"}
    assert train(strategy, again, 2, tmp_path / "again") == rest
    assert strategy.load_ckpt(again, tmp_path) == {"expected": rest[-1]}


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes(tmp_path):
    run_distributed(check, 2, tmp_path, plain_rewards(2))
