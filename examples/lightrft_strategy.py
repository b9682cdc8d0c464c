"""LightRFT's training loop on the engine of rlft_fast: the strategy's methods, name by name, in a page.

    .venv/bin/python -m examples.lightrft_strategy                                        # seconds on one core
    .venv/bin/torchrun --nproc-per-node 2 -m examples.lightrft_strategy                   # sharded

`examples/lightrft_fused.py` keeps LightRFT's strategy and changes parts of it. Here `FSDPEngine` does the work of the
strategy: units, meshes, accumulation, norm, optimizer, schedule, checkpoints, offloading. The actor is any module; the
forward and the loss stay those of the trainer.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.lightrft_fused import Actor, make_batch
from rlft_fast.config import EngineConfig
from rlft_fast.engine import CheckpointManager, FSDPEngine
from rlft_fast.models import PACKED_ATTENTION, patch_lm_head
from rlft_fast.world import init_distributed, leaving_process_group


class Strategy:
    """The methods of LightRFT's strategy. Models are engines from `prepare` on.

    Args:
        config: sharding, dtypes, offloading, and the optimizer of every model.
        num_training_steps: optimizer steps of the whole run, for the schedule.
        accumulated_gradient: calls of `backward` in an optimizer step.
    """

    def __init__(self, config: EngineConfig, num_training_steps: int, accumulated_gradient: int = 1) -> None:
        self.config, self.num_training_steps = config, num_training_steps
        self.accumulated_gradient = accumulated_gradient
        self.num_backward = 0

    def prepare(self, module: nn.Module) -> FSDPEngine:
        """Shards a module, in place of `prepare_model`, `create_optimizer` and the scheduler."""
        return FSDPEngine.from_module(module, self.config, num_training_steps=self.num_training_steps)

    def backward(self, loss: Tensor, model: FSDPEngine) -> None:
        """LightRFT gives the mean over a micro-batch; the gradient is averaged over micro-batches and ranks."""
        self.num_backward += 1
        is_last = self.num_backward % self.accumulated_gradient == 0
        model.backward(loss / self.accumulated_gradient, is_last=is_last)

    def optimizer_step(self, model: FSDPEngine) -> dict[str, float] | None:
        """Clips, steps and goes on in the schedule; None where more micro-batches follow."""
        return None if self.num_backward % self.accumulated_gradient else model.optimizer_step()

    def save_ckpt(
        self, model: FSDPEngine, save_dir: Path, tag: str | None = None, max_num: int = 3, max_mem: float | None = None,
        client_state: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """A checkpoint of the model's step. With a tag it is kept, and no later one replaces it."""
        with CheckpointManager(save_dir, max_num, max_mem) as manager:
            manager.save(model.step, {"model": model}, client_state or {}, tag=tag)

    def load_ckpt(
        self, model: FSDPEngine, load_dir: Path, tag: str | None = None, *, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        """Loads the newest checkpoint, or the one with the tag, and returns what `save_ckpt` got as client_state."""
        loaded = CheckpointManager(load_dir).load_part(
            {"model": model}, tag=tag, strict=load_module_strict, optimizer=load_optimizer_states,
            scheduler=load_lr_scheduler_states,
        )  # fmt: skip
        return {} if loaded is None else loaded.state

    def offload_model(self, model: FSDPEngine) -> None:
        model.to("cpu", optimizer=False)

    def reload_model(self, model: FSDPEngine) -> None:
        model.to(model.device, optimizer=False)

    def maybe_offload_optimizer(self, model: FSDPEngine) -> None:
        model.to("cpu", params=False)

    def maybe_load_optimizer(self, model: FSDPEngine) -> None:
        model.to(model.device, params=False)

    def report_memory(self, prefix: str, model: FSDPEngine) -> None:
        model.report_memory(prefix)


def make_actor() -> Actor:
    """A small policy, whose head gives log-probabilities without logits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=False, **sizes))
    patch_lm_head(model)
    model.set_attn_implementation(PACKED_ATTENTION)
    return Actor(model)


def train(strategy: Strategy, actor: FSDPEngine, steps: int, folder: Path) -> list[float]:
    """The reward that the policy expects on this rank's answers, after each step."""
    batch, expected = make_batch(actor.world.rank), []
    for _ in range(steps):
        strategy.reload_model(actor)
        strategy.maybe_load_optimizer(actor)
        total = 0.0
        for rows in torch.arange(4).chunk(strategy.accumulated_gradient):
            part = {name: column[rows].to(actor.device) for name, column in batch.items()}
            actions = part["action_mask"]
            reward = 1 - part["sequences"][:, -actions.shape[1] :] / 32  # 1 for token 0, -1 for the last
            logprob, entropy = actor.model(**part)
            strategy.backward(-((reward * logprob + 0.01 * entropy) * actions).sum() / actions.sum(), actor)
            total += (reward * logprob.detach().exp() * actions).sum().item()
        strategy.optimizer_step(actor)
        strategy.save_ckpt(actor, folder, max_num=2, client_state={"expected": total})
        expected.append(total)
        strategy.maybe_offload_optimizer(actor)
        strategy.offload_model(actor)
    return expected


def main() -> None:
    init_distributed()
    config = EngineConfig(optimizer={"learning_rate": 1e-2, "weight_decay": 0.01, "max_grad_norm": 1.0})
    strategy = Strategy(config, num_training_steps=20, accumulated_gradient=2)
    actor = strategy.prepare(make_actor())
    shared: list[Any] = [tempfile.mkdtemp()]
    if actor.world.size > 1:
        torch.distributed.broadcast_object_list(shared)
    rewards = train(strategy, actor, 20, Path(shared[0]))
    strategy.save_ckpt(actor, Path(shared[0]), tag="trained")
    strategy.report_memory("after training", actor)
    if actor.world.is_first:
        print(f"expected reward: {rewards[0]:.3f} at first, {rewards[-1]:.3f} after {len(rewards)} steps")


if __name__ == "__main__":
    with leaving_process_group():
        main()
