"""A reward model for the sums of the demo: it learns to tell right answers from wrong ones, by the logistic loss.

    .venv/bin/python examples/reward_model.py                          # writes runs/reward_model
    .venv/bin/python examples/reward_model.py --policy runs/demo/hf    # starts from a policy that can add

Answers are made, not sampled: right sums and wrong ones in several wordings, with and without an end. The score is
trained to be the log-odds that the answer is right; a reward is the score at its last token.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.data import Batch
from rlft_fast.demo import smollm2_folder, write_problems
from rlft_fast.engine import FSDPEngine, export_hf
from rlft_fast.models import load_tokenizer
from rlft_fast.rl import Aggregation

WORDINGS = (
    "{n}", "{n}.", "{a} + {b} = {n}", "{a} + {b} = {n}.", "The answer is {n}.", "The sum of {a} and {b} is {n}.",
)  # fmt: skip
# What the untrained policy says in place of an answer; without these a score of such a text would be arbitrary.
EVASIONS = (
    "The answer is", "{a} + {b} =", "The answer is {a} + {b}.", "{a} + {b} = ?", "To solve this problem, we need to",
    "Let's start by simplifying the problem.", "I'm here to help you with", "A classic example of this is the",
)  # fmt: skip
PROMPTS_PER_STEP = 8
ANSWERS_PER_PROMPT = 8  # which share the prompt's tokens


@dataclass(frozen=True)
class RightOrWrong:
    """-r·log sigmoid(score) - (1 - r)·log sigmoid(-score), where r is 1 for a right answer and 0 for a wrong one."""

    aggregation: Aggregation = "sequence-mean"
    max_response_tokens: int | None = None
    fields: tuple[str, ...] = ("reward_T", "loss_weight_T")
    needs_sequences: bool = False

    def per_token(self, score_T: Tensor, right_T: Tensor, loss_weight_T: Tensor) -> Tensor:
        return loss_weight_T * binary_cross_entropy_with_logits(score_T, right_T, reduction="none")

    def metrics(self, score_T: Tensor, right_T: Tensor, loss_weight_T: Tensor) -> dict[str, Tensor]:
        known_T = loss_weight_T * (right_T != 0.5)
        return {"known": known_T.sum(), "correct": (known_T * ((score_T > 0) == (right_T > 0.5))).sum()}


def wrong_numbers(right: int, rng: random.Random) -> Iterator[int]:
    """Near misses and far ones, without end."""
    while True:
        wrong = right + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10)) if rng.random() < 0.7 else rng.randint(1, 60)
        if wrong != right and wrong > 0:
            yield wrong


def make_answers(problem: dict[str, str], num_right: int, count: int, rng: random.Random) -> list[tuple[str, bool]]:
    """`count` answers to a problem, of which the first `num_right` are right and the last may be none at all."""
    a, b = re.findall(r"\d+", problem["prompt"])
    right = int(problem["answer"])
    numbers = [right] * num_right + list(islice(wrong_numbers(right, rng), count - num_right))
    answers = [(rng.choice(WORDINGS).format(a=a, b=b, n=n), n == right) for n in numbers]
    if rng.random() < 0.5:
        answers[-1] = rng.choice(EVASIONS).format(a=a, b=b), False
    return answers


def make_batch(
    problems: list[dict[str, str]], num_right: int, count: int, tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> Batch:
    """Prompts with their answers, some of which have an end token.

    Active are the tokens that follow the number, its last digit included, and the last token of the prompt: with a
    label of ½ it says that nothing is known yet, and lets all answers of a prompt share its tokens.
    """
    end = tokenizer.eos_token_id
    prompts, completions, masks, labels = [], [], [], []
    for problem in problems:
        prompt = tokenizer.encode(problem["prompt"], add_special_tokens=False)
        for text, is_right in make_answers(problem, num_right, count, rng):
            ids = [*tokenizer.encode(text, add_special_tokens=False), *([end] if rng.random() < 0.8 else [])]
            num_before = len(tokenizer.encode(text.rstrip("."), add_special_tokens=False)) - 1
            prompts.append(prompt)
            completions.append([*ids, end])  # a position is active for the sake of the next token; this one never runs
            masks.append([True, *(i >= num_before for i in range(len(ids)))])
            labels += [0.5 if i < len(prompt) else float(is_right) for i in range(len(prompt) + len(ids) + 1)]
    return Batch.from_samples(prompts, completions, completion_masks=masks).replace(reward_T=torch.tensor(labels))


def pairwise_accuracy(engine: FSDPEngine, problems: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> float:
    """How often the right number scores higher than a wrong one in answer to the same problem, in any wordings."""
    batch = make_batch(problems, 2, 6, tokenizer, random.Random(0))
    last = batch.cu_seqlens[1:].long() - 2  # whose next token is the one more
    score = engine.infer(batch, ("score",))["score"][last].view(len(problems), 6)
    return (score[:, :2, None] > score[:, None, 2:-1]).float().mean().item()  # the last may be an evasion


def write_classifier(policy: Path, folder: Path) -> None:
    """The policy's body with a new head for one score."""
    tokenizer = load_tokenizer(policy)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_problems(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(
    engine: FSDPEngine, problems: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, steps: int, seed: int = 0
) -> None:
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        chosen = rng.choices(problems, k=PROMPTS_PER_STEP)
        batch = make_batch(chosen, ANSWERS_PER_PROMPT // 2, ANSWERS_PER_PROMPT, tokenizer, rng)
        metrics = engine.train_step(batch, RightOrWrong())
        if step % 5 == 0:
            accuracy = metrics["correct"] / metrics["known"]
            print(f"step {step}  loss {metrics['loss']:.3f}  accuracy {accuracy:.3f}", flush=True)


def main(policy: Path, output: Path, steps: int, learning_rate: float) -> None:
    tokenizer = load_tokenizer(policy)
    optimizer = OptimizerConfig(learning_rate=learning_rate, schedule="linear", warmup_steps=5)
    config = EngineConfig(max_tokens=4096, optimizer=optimizer)
    with TemporaryDirectory() as folder:
        start = Path(folder) / "start"
        training, held_out = (read_problems(path) for path in write_problems(Path(folder)))
        write_classifier(policy, start)
        engine = FSDPEngine(str(start), config, head="score", num_training_steps=steps).initialize()
        train(engine, training, tokenizer, steps)
        export_hf(engine, output, overwrite=True)
    accuracy = pairwise_accuracy(engine, held_out, tokenizer)
    print(f"a right answer to a held-out problem scores higher than a wrong one in {accuracy:.3f} of all pairs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="model to start from (default: the demo's)")
    parser.add_argument("--output", type=Path, default=Path("runs/reward_model"), help="folder to write")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    options = parser.parse_args()
    main(options.policy or smollm2_folder(), options.output, options.steps, options.learning_rate)
