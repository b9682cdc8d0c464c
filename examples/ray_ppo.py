"""PPO by hand on Ray worker groups: the driver below is the whole algorithm.

    pip install ray
    python examples/ray_ppo.py examples/ppo_critic.yaml --steps 4

Two processes hold the policy and sample from it, one holds the critic. `make demo` makes the model and the problems.
"""

import sys

import torch

from rlft_fast.cluster import ActorRolloutRefWorker, CriticWorker, WorkerGroup, connect
from rlft_fast.config import Config
from rlft_fast.data import Batch
from rlft_fast.models import load_tokenizer
from rlft_fast.rewards import load_reward
from rlft_fast.rl import ADVANTAGES, PolicyLoss, ValueLoss, compute_advantages, reward_with_kl
from rlft_fast.rollout import SamplingParams, sample_seeds
from rlft_fast.trainer import load_prompts


def at_the_end(batch: Batch) -> torch.Tensor:
    """(T,) float32, the reward of each sequence at its last sampled token."""
    no_kl = torch.zeros(batch.num_tokens)
    return reward_with_kl(batch.reward_B, no_kl, batch.loss_mask_T, batch.cu_seqlens, 0.0)


def main(path: str, overrides: dict[str, str]) -> None:
    config = Config.load(path, overrides)
    rollout, function = config.rollout, config.reward.function
    assert isinstance(function, str), "this example has one reward function"
    tokenizer, reward = load_tokenizer(config.model), load_reward(function)
    prompts = load_prompts(config.data, tokenizer, rollout.max_prompt_tokens)
    params = SamplingParams(n=rollout.samples_per_prompt, max_new_tokens=rollout.max_new_tokens)
    count = rollout.prompts_per_step
    connect(num_cpus=3)
    with (
        WorkerGroup(ActorRolloutRefWorker, config, 2) as actor,
        WorkerGroup(CriticWorker, config, 1) as critic,
    ):
        actor.init_model(config.steps)
        critic.init_model(config.steps)
        for step in range(config.steps):
            asked = prompts.select(prompts.order(step * count, count, config.seed))
            seeds = sample_seeds(config.seed, step, range(count), params.n)
            samples = actor.generate_sequences(asked.token_ids, params, seeds)

            ids, own = samples.token_ids(), asked.select(samples.row_B.tolist())
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            rewards = reward(prompts=own.texts, completions=texts, completion_ids=ids, **own.columns)
            samples = samples.replace(reward_B=torch.tensor(rewards, dtype=torch.float64))

            batch = samples.to_batch(asked.token_ids)
            batch = batch.replace(old_logprob_T=actor.compute_log_prob(batch)["logprob_T"])
            batch = batch.replace(**critic.compute_values(batch), reward_T=at_the_end(batch))
            batch = compute_advantages(batch, ADVANTAGES["gae"], gamma=1.0, lam=1.0)
            value = critic.update_critic(batch, ValueLoss())
            policy = actor.update_actor(batch, PolicyLoss())
            actor.sync_rollout()
            mean = float(samples.reward_B.mean())
            print(f"step {step + 1}: reward {mean:.3f}, loss {policy['loss']:.4f}, value loss {value['loss']:.4f}")
        actor.save_checkpoint(f"{config.output_dir}/actor", config.steps)
        actor.export(f"{config.output_dir}/hf")


if __name__ == "__main__":
    names, values = sys.argv[2::2], sys.argv[3::2]
    main(sys.argv[1], {name.removeprefix("--"): value for name, value in zip(names, values, strict=True)})
