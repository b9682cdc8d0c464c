"""A reward model for the sums of the demo. It learns from the answers that the demo sampled, and from which are right.

    make demo ROLLOUT=hf
    .venv/bin/python examples/reward_model.py      # minutes on two cores; writes runs/reward_model

It starts from the demo's trained policy, with a new head for one score. The score is the log-odds, at the last token of
an answer, that the answer is right. The answers come from the whole run, from the policy's first evasions to its last
sums. A model trained on sums alone would score other texts at random, and a policy would soon find texts it overrates.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine, export_hf
from rlft_fast.models import load_tokenizer
from rlft_fast.rl import Aggregation

PROMPTS_PER_STEP = 16
ANSWERS_PER_PROMPT = 8  # they share the prompt's tokens
HELD_OUT_SHARE = 0.1


class Answer(NamedTuple):
    text: str
    ended: bool
    right: bool


Answers = dict[str, list[Answer]]
"""By prompt."""


@dataclass(frozen=True)
class RightOrWrong:
    """-r·log sigmoid(score) - (1 - r)·log sigmoid(-score), where r is 1 for a right answer and 0 for a wrong one."""

    aggregation: Aggregation = "sequence-mean"
    max_response_tokens: int | None = None
    fields: tuple[str, ...] = ("reward_T", "loss_weight_T")
    needs_sequences: bool = False

    def per_token(self, fields: Mapping[str, Tensor]) -> Tensor:
        loss_T = binary_cross_entropy_with_logits(fields["score_T"], fields["reward_T"], reduction="none")
        return fields["loss_weight_T"] * loss_T

    def metrics(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        right_T = fields["reward_T"]
        known_T = fields["loss_weight_T"] * (right_T != 0.5)
        return {"known": known_T.sum(), "correct": (known_T * ((fields["score_T"] > 0) == (right_T > 0.5))).sum()}


def read_answers(samples: Path, rng: random.Random) -> tuple[Answers, Answers]:
    """The answers in a run's samples.jsonl: first those to most prompts, then those to the held-out prompts.

    An answer is right if it got the whole reward: it has the right number, and it ends.
    """
    answers: Answers = defaultdict(list)
    lines = samples.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028 within an answer
    for sample in map(json.loads, filter(str.strip, lines)):
        answer = Answer(sample["completion"], sample["finish_reason"] == "stop", sample["reward"] == 1.0)
        answers[sample["prompt"]].append(answer)
    prompts = sorted(answers)
    rng.shuffle(prompts)
    count = round(HELD_OUT_SHARE * len(prompts))
    return {p: answers[p] for p in prompts[count:]}, {p: answers[p] for p in prompts[:count]}


def choose_answers(answers: list[Answer], rng: random.Random) -> list[Answer]:
    """At most ANSWERS_PER_PROMPT / 2 right answers, and at most as many wrong answers."""
    chosen: list[Answer] = []
    for right in (True, False):
        some = [answer for answer in answers if answer.right == right]
        chosen += rng.sample(some, min(len(some), ANSWERS_PER_PROMPT // 2))
    return chosen


def make_batch(answers: Answers, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Prompts with their answers.

    Two tokens of a sequence are active: the last token of the answer and the last token of the prompt. The prompt's
    label is ½, because nothing is known yet; the same label on every answer lets them share the prompt's tokens.
    """
    end = tokenizer.eos_token_id
    prompts, completions, masks, labels = [], [], [], []
    for prompt, answer in ((p, answer) for p, some in answers.items() for answer in some):
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        ids = tokenizer.encode(answer.text, add_special_tokens=False) + [end] * answer.ended
        prompts.append(prompt_ids)
        completions.append([*ids, end])  # a position is active if the next token counts; this extra token never runs
        masks.append([i in (0, len(ids)) for i in range(len(ids) + 1)])
        labels += [0.5] * len(prompt_ids) + [float(answer.right)] * (len(ids) + 1)
    return Batch.from_samples(prompts, completions, completion_masks=masks).replace(reward_T=torch.tensor(labels))


def pairwise_accuracy(engine: FSDPEngine, answers: Answers, tokenizer: PreTrainedTokenizerBase) -> float:
    """How often a right answer to a prompt scores higher than a wrong answer to the same prompt."""
    batch = make_batch(answers, tokenizer)
    last = batch.cu_seqlens[1:].long() - 2  # each answer's last token; the extra token follows it
    score = engine.infer(batch, ("score",))["score"][last]
    higher = []
    for some, score_N in zip(answers.values(), score.split([len(some) for some in answers.values()]), strict=True):
        right_N = torch.tensor([answer.right for answer in some])
        higher.append((score_N[right_N, None] > score_N[~right_N]).float().flatten())
    return torch.cat(higher).mean().item()


def write_classifier(policy: Path, folder: Path) -> None:
    """Writes the policy's body with a new head for one score."""
    tokenizer = load_tokenizer(policy)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(
    engine: FSDPEngine, answers: Answers, tokenizer: PreTrainedTokenizerBase, steps: int, rng: random.Random
) -> None:
    for step in range(1, steps + 1):
        prompts = rng.sample(sorted(answers), min(PROMPTS_PER_STEP, len(answers)))
        batch = make_batch({prompt: choose_answers(answers[prompt], rng) for prompt in prompts}, tokenizer)
        metrics = engine.train_step(batch, RightOrWrong())
        if step % 5 == 0:
            accuracy = metrics["correct"] / metrics["known"]
            print(f"step {step}  loss {metrics['loss']:.3f}  accuracy {accuracy:.3f}", flush=True)


def main(policy: Path, samples: Path, output: Path, steps: int, learning_rate: float) -> None:
    rng = random.Random(0)
    tokenizer = load_tokenizer(policy)
    optimizer = OptimizerConfig(learning_rate=learning_rate, schedule="linear", warmup_steps=5)
    config = EngineConfig(max_tokens=4096, optimizer=optimizer)
    training, held_out = read_answers(samples, rng)
    with TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        write_classifier(policy, start)
        engine = FSDPEngine(str(start), config, head="score", num_training_steps=steps).initialize()
        train(engine, training, tokenizer, steps, rng)
        export_hf(engine, output, overwrite=True)
    accuracy = pairwise_accuracy(engine, held_out, tokenizer)
    print(f"a right answer to a held-out problem scores higher than a wrong one in {accuracy:.3f} of all pairs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("runs/demo/hf"), help="model to start from")
    parser.add_argument("--samples", type=Path, default=Path("runs/demo/samples.jsonl"), help="answers of a run")
    parser.add_argument("--output", type=Path, default=Path("runs/reward_model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    options = parser.parse_args()
    main(options.policy, options.samples, options.output, options.steps, options.learning_rate)
