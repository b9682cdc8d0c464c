"""rlft_fast inside LightRFT's FSDPV2Strategy, which a class of the same interface stands in for here.

    .venv/bin/torchrun --nproc-per-node 2 -m examples.lightrft_fused      # seconds on two cores

With LightRFT itself, import FSDPV2Strategy from `lightrft.strategy.fsdp.fsdpv2`, and keep `enable` and the actor's
forward. The policy learns to answer with small token ids.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ConstantLR, LRScheduler
from transformers import LlamaConfig, LlamaForCausalLM

from rlft_fast.integrations.lightrft import action_logprobs, enable


class FSDPV2Strategy:
    """What LightRFT's strategy does to a model and its gradients, without its engines, offloading and checkpoints.

    Args:
        accumulated_gradient: micro-batches of an optimizer step.
        fused_linear_logprob: leaves the head in the root's unit, as LightRFT's flag does.
    """

    def __init__(self, accumulated_gradient: int = 1, fused_linear_logprob: bool = False) -> None:
        self.accumulated_gradient, self.fused_linear_logprob = accumulated_gradient, fused_linear_logprob
        self.cur_step: dict[str, int] = defaultdict(int)

    def prepare_model(self, model: nn.Module, shard_size: int = -1) -> nn.Module:
        shards = dist.get_world_size() if shard_size < 0 else shard_size
        shape = (dist.get_world_size() // shards, shards)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        for name, module in model.named_modules():
            is_head = "lm_head" in name and not self.fused_linear_logprob
            if is_head or isinstance(module, nn.Embedding) or type(module).__name__ == "LlamaDecoderLayer":
                fully_shard(module, mesh=mesh)
        return fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def create_optimizer(self, model: nn.Module, lr: float, weight_decay: float = 0.01) -> torch.optim.Optimizer:
        decayed, others = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr)

    def backward(self, loss: Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss.backward()

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: LRScheduler, name: str = "model"
    ) -> None:
        self.cur_step[name] += 1
        if self.cur_step[name] % self.accumulated_gradient == 0:
            for group in optimizer.param_groups:  # each by a norm of its own
                nn.utils.clip_grad_norm_(group["params"], 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


class Actor(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> tuple[Tensor, Tensor]:
        return action_logprobs(self.model, sequences, attention_mask, action_mask)


def make_batch(rank: int) -> dict[str, Tensor]:
    """Four sequences: prompts padded on the left to 4 columns, answers on the right to 8."""
    generator = torch.Generator().manual_seed(rank)
    prompts, answers = (torch.randint(1, limit, (4, 1), generator=generator) for limit in (5, 9))
    columns = torch.arange(12) - 4
    mask = (columns >= -prompts) & (columns < answers)
    ids = torch.randint(0, 64, mask.shape, generator=generator) * mask
    return {"sequences": ids, "attention_mask": mask.long(), "action_mask": mask[:, 4:].long()}


def train(strategy: Any, steps: int) -> list[float]:
    """The reward that the policy expects, after each step."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    actor = Actor(LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes)))
    strategy.prepare_model(actor)
    optimizer = strategy.create_optimizer(actor, lr=1e-2)
    scheduler = ConstantLR(optimizer, factor=1.0)
    batch, expected = make_batch(dist.get_rank()), []
    actions = batch["action_mask"]
    reward = 1 - batch["sequences"][:, -actions.shape[1] :] / 32  # of each action: 1 for token 0, -1 for the last
    for _ in range(steps):
        logprob, entropy = actor(**batch)
        loss = -((reward * logprob + 0.01 * entropy) * actions).sum() / actions.sum()
        strategy.backward(loss, actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
        expected.append((reward * logprob.detach().exp() * actions).sum().item())
    return expected


def main() -> None:
    dist.init_process_group("gloo")
    enable(FSDPV2Strategy, max_norm=1.0)
    rewards = train(FSDPV2Strategy(), steps=20)
    if dist.get_rank() == 0:
        print(f"expected reward: {rewards[0]:.3f} at first, {rewards[-1]:.3f} after {len(rewards)} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
