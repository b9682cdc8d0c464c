"""One leg of the race, in a process of its own.

    python -m benchmarks.learning.sides ours-hf|ours-vllm|updates|trl-times TASK SEED STEPS FOLDER
    python -m benchmarks.learning.sides trl TASK SEED STEPS FOLDER SETTING

The last line of its output is JSON: seconds, seconds by phase, reward and tokens of each step, and held-out accuracy by
step. The clock stops while held-out problems are answered. ``updates`` gives the difference of both sides' first step
instead, and ``trl-times`` seconds per step of TRL with each of its settings.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning.workload import (
    CLIP_HIGH,
    CLIP_LOW,
    EVALUATE_EVERY,
    LEARNING_RATE,
    MAX_NEW_TOKENS,
    MINI_BATCHES,
    NUM_PROMPTS,
    NUM_SAMPLES,
    TRL_SETTINGS,
    config_of,
    reward,
)
from rlft_fast.config import Config
from rlft_fast.models import load_tokenizer
from rlft_fast.rewards import last_number
from rlft_fast.trainer import Prompts, load_prompts

# Sequences that TRL has in memory at once. Of 8, 16, 32 and 64, the fastest on two cores (by 2 to 7 %).
TRL_BATCH_SIZE = 16
TIMED_STEPS = 3  # of each of TRL's settings; the first, which compiles, does not count


def run_ours(config: Config) -> dict[str, Any]:
    from rlft_fast.trainer import read_metrics, train

    train(config)
    rows = read_metrics(Path(config.output_dir))
    prompt_ids = taught_prompts(config, load_tokenizer(config.model)).token_ids
    steps = []
    for row in rows:
        if "seconds" in row:
            first = (row["step"] - 1) * NUM_PROMPTS
            tokens = round(row["completion_length_mean"] * NUM_PROMPTS * NUM_SAMPLES)
            steps.append({
                "step": row["step"], "seconds": row["seconds"], "reward": row["reward_mean"], "tokens": tokens,
                "phases": {name: seconds for name, seconds in row.items() if name.startswith("seconds_")},
                # A prompt runs once for all of its answers. Answers that begin alike run fewer rows than counted here.
                "rows": tokens + sum(map(len, prompt_ids[first : first + NUM_PROMPTS])),
            })  # fmt: skip
    accuracy = [(row["step"], row["accuracy"]) for row in rows if "accuracy" in row]
    taken = Config.load(Path(config.output_dir) / "config.yaml").actor.compute_dtype
    return {"steps": steps, "accuracy": accuracy, "setting": "bfloat16" if taken == "bfloat16" else "float32"}


def time_trl(config: Config) -> dict[str, Any]:
    """Seconds per step of TRL with each setting, the rows that a step runs, and why a setting has none."""
    seconds: dict[str, float | None] = {}
    failures = {}
    for name in TRL_SETTINGS:
        try:
            steps = run_trl(config.model_copy(update={"steps": TIMED_STEPS}), name, evaluates=False)["steps"]
            seconds[name] = statistics.mean(step["seconds"] for step in steps[1:])
        except Exception as error:  # a setting that TRL, transformers or this machine's compiler cannot run
            seconds[name], failures[name] = None, f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(name, seconds[name], failures.get(name, ""), file=sys.stderr, flush=True)
    return {"seconds_per_step": seconds, "failures": failures}


def run_trl(config: Config, setting: str, *, evaluates: bool = True) -> dict[str, Any]:
    import transformers

    assert config.evaluation is not None
    tokenizer = load_tokenizer(config.model)
    (held_out_path,) = config.evaluation.sets.values()
    held_out = load_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens, held_out_path)
    steps: list[dict[str, Any]] = []
    accuracy: list[tuple[int, float]] = []

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            if evaluates:
                accuracy.append((0, greedy_accuracy(trainer.model, tokenizer, held_out)))
            self.seconds = 0.0

        def on_step_begin(self, args, state, control, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            self.seconds += time.perf_counter() - self.started
            if state.global_step % MINI_BATCHES:
                return
            step = state.global_step // MINI_BATCHES
            rewards, completions = trainer.sampled
            tokens = sum(map(len, completions))
            phases = dict(trainer.phases)
            phases["seconds_update"] = self.seconds - sum(phases.values())
            steps.append({
                "step": step, "seconds": self.seconds, "reward": rewards.mean().item(), "tokens": tokens,
                "phases": phases, "rows": trainer.num_rows,
            })  # fmt: skip
            self.seconds, trainer.num_rows = 0.0, 0
            trainer.phases.clear()
            if evaluates and (step % EVALUATE_EVERY == 0 or step == config.steps):
                accuracy.append((step, greedy_accuracy(trainer.model, tokenizer, held_out)))
            print(json.dumps(steps[-1]), accuracy[-1:], file=sys.stderr, flush=True)

    trainer = trl_trainer(config, Callback(), **TRL_SETTINGS[setting])
    trainer.train()
    return {"steps": steps, "accuracy": accuracy, "setting": setting}


def run_updates(config: Config) -> dict[str, Any]:
    """How far gradients and weights of TRL and of our engine are apart in TRL's first step, on the same answers."""
    import torch
    import transformers

    from rlft_fast.data import Batch
    from rlft_fast.engine import FSDPEngine
    from rlft_fast.ops.packing import segment_expand
    from rlft_fast.rl import ADVANTAGES, PolicyLoss, compute_advantages

    micro_batches: list[dict[str, torch.Tensor]] = []
    theirs: list[dict[str, torch.Tensor]] = []  # gradients of each optimizer step, clipped
    before: dict[str, torch.Tensor] = {}

    class Callback(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            before.update((name, p.detach().clone()) for name, p in trainer.model.named_parameters())

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            theirs.append({name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None})

    def batch_of(mini_batch: list[dict[str, torch.Tensor]]) -> Batch:
        """The answers of a mini-batch's micro-batches, with TRL's advantages."""
        prompts, completions = (
            [
                ids[mask.bool()].tolist()
                for each in mini_batch
                for ids, mask in zip(each[f"{kind}_ids"], each[f"{kind}_mask"], strict=True)
            ]
            for kind in ("prompt", "completion")
        )
        batch = Batch.from_samples(prompts, completions, groups=range(len(prompts)))
        return batch.replace(advantage_T=expand(torch.cat([each["advantages"] for each in mini_batch]), batch))

    def expand(advantage_B: torch.Tensor, batch: Batch) -> torch.Tensor:
        return segment_expand(advantage_B, batch.cu_seqlens, num_tokens=batch.num_tokens) * batch.loss_mask_T

    trainer = trl_trainer(config, Callback(), max_steps=MINI_BATCHES, logging_steps=1)
    prepare = trainer._prepare_inputs  # it shuffles the answers and cuts them into micro-batches

    def remember(inputs):
        micro_batches.append(prepare(inputs))
        return micro_batches[-1]

    trainer._prepare_inputs = remember
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]  # before clipping
    after = {name: p.detach() for name, p in trainer.model.named_parameters()}

    actor = config.actor.model_copy(update={"compute_dtype": "float32"})
    engine = FSDPEngine(config.model, actor, num_training_steps=MINI_BATCHES).initialize()
    size = len(micro_batches) // MINI_BATCHES
    batches = [batch_of(micro_batches[i * size : (i + 1) * size]) for i in range(MINI_BATCHES)]
    batches = [batch.replace(old_logprob_T=engine.infer(batch, ("logprob",))["logprob"]) for batch in batches]
    tokens = [int(batch.loss_mask_T.sum()) for batch in batches]
    differences = []
    for i, batch in enumerate(batches):
        engine.zero_grad()
        engine.forward_backward(batch, PolicyLoss(clip_low=CLIP_LOW, clip_high=CLIP_HIGH))
        ours = {name: p.grad for name, p in engine.model.pretrained.named_parameters() if p.grad is not None}
        # Before clipping, and per token of the mini-batch: TRL divides by the mean over mini-batches.
        factor = max(1.0, norms[i] + 1e-6) * sum(tokens) / len(tokens) / tokens[i]
        differences.append(_difference(ours, {name: grad * factor for name, grad in theirs[i].items()}) / norms[i])
        engine.optimizer_step()
    ours = {name: p.detach() for name, p in engine.model.pretrained.named_parameters()}

    rewards, completions = trainer.sampled
    batch = Batch.from_samples(
        [[0]] * len(completions), completions, rewards=rewards.flatten().tolist(),
        groups=[i // NUM_SAMPLES for i in range(len(completions))],
    )  # fmt: skip
    ours_T = compute_advantages(batch, ADVANTAGES["grpo"]).advantage_T
    assert ours_T is not None
    advantages = (ours_T - expand(trainer.advantages, batch)).abs().max().item()
    return {
        "gradients": differences, "updates": _difference(ours, after) / _difference(before, after), "norms": norms,
        "tokens": tokens, "advantages": advantages, "answers": len(completions), "rewarded": int((rewards > 0).sum()),
    }  # fmt: skip


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The norm of the difference of all tensors, which may be DTensors on our side."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    whole = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in ours.items()}
    return sum((whole[name] - theirs[name]).double().square().sum().item() for name in theirs) ** 0.5


def taught_prompts(config: Config, tokenizer: Any) -> Prompts:
    """The prompts of all steps, in the order of both sides."""
    prompts = load_prompts(config.data, tokenizer, config.rollout.max_prompt_tokens)
    return prompts.select(prompts.order(0, config.steps * NUM_PROMPTS, config.seed))


def trl_trainer(config: Config, callback: Any, **options: Any) -> Any:
    """TRL's trainer of the run.

    Its ``sampled`` are the rewards and answers of the current step, with ``advantages``. ``phases`` are seconds of the
    step, without the update, and ``num_rows`` counts the positions that its updates run, padding included.

    Args:
        config: our run.
        callback: of transformers.
        **options: changes to GRPOConfig.
    """
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    tokenizer = load_tokenizer(config.model)
    taught = taught_prompts(config, tokenizer)

    class Trainer(GRPOTrainer):
        num_rows = 0

        def __init__(self, *args, **kwargs):
            self.phases: dict[str, float] = {}
            super().__init__(*args, **kwargs)

        def _generate(self, *args, **kwargs):
            started = time.perf_counter()
            output = super()._generate(*args, **kwargs)
            self.phases["seconds_generate"] = time.perf_counter() - started
            return output

        def _compute_loss(self, model, inputs):
            self.num_rows += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            return super()._compute_loss(model, inputs)

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            self.sampled = rewards, completion_ids_list
            return rewards

        def _generate_and_score_completions(self, inputs):
            started = time.perf_counter()
            output = super()._generate_and_score_completions(inputs)
            passed = time.perf_counter() - started
            self.phases["seconds_logprobs and reward"] = passed - self.phases["seconds_generate"]
            self.advantages = output["advantages"].clone()
            return output

    judge = partial(reward, end_token_id=tokenizer.eos_token_id)
    judge.__name__ = "reward"  # type: ignore[attr-defined]  # TRL asks for it
    sequences = NUM_PROMPTS * NUM_SAMPLES
    shared = {
        "bf16": False, "use_cpu": True, "learning_rate": LEARNING_RATE, "lr_scheduler_type": "linear",
        "warmup_steps": 0, "loss_type": "dapo", "epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH, "beta": 0.0,
        "num_iterations": 1, "max_steps": config.steps * MINI_BATCHES, "seed": config.seed, "shuffle_dataset": False,
        "num_generations": NUM_SAMPLES, "max_completion_length": MAX_NEW_TOKENS, "temperature": 1.0, "top_k": 0,
        "top_p": 1.0, "per_device_train_batch_size": TRL_BATCH_SIZE,
        "steps_per_generation": sequences // TRL_BATCH_SIZE,
        "gradient_accumulation_steps": sequences // MINI_BATCHES // TRL_BATCH_SIZE, "gradient_checkpointing": False,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": config.steps * MINI_BATCHES,
    }  # fmt: skip
    return Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32),
        reward_funcs=judge,
        args=GRPOConfig(config.output_dir, **(shared | options)),
        train_dataset=Dataset.from_dict({"prompt": taught.texts, "answer": taught.columns["answer"]}),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def greedy_accuracy(model, tokenizer, prompts: Prompts, batch_size: int = 128) -> float:
    """Share of right answers among the most likely answers, which transformers generates."""
    import torch

    was_training = model.training
    model.eval()
    rewards = []
    for first in range(0, len(prompts), batch_size):
        rows = range(first, min(first + batch_size, len(prompts)))
        ids = prompts.select(rows).token_ids
        padded = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
        with torch.no_grad():
            answered = model.generate(**padded, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        completion_ids = answered[:, padded["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        answers = [prompts.columns["answer"][row] for row in rows]
        rewards += last_number([""] * len(rows), texts, completion_ids.tolist(), answers)
    model.train(was_training)
    return sum(rewards) / len(rewards)


def main() -> None:
    from rlft_fast.demo import smollm2_folder

    side, task, seed, steps, folder, *setting = sys.argv[1:]
    backend = "vllm" if side == "ours-vllm" else "hf"
    config = config_of(str(smollm2_folder()), task, int(seed), Path(folder), backend, int(steps))
    run = {"trl": run_trl, "trl-times": time_trl, "updates": run_updates}.get(side, run_ours)
    print(json.dumps(run(config, *setting)))


if __name__ == "__main__":
    main()
