"""Pairs for a reward model of the demo's sums, from the answers that the demo sampled, and the model to start from.

    make demo ROLLOUT=hf
    .venv/bin/python examples/reward_model.py              # seconds; writes runs/reward_pairs
    .venv/bin/rlft-fast reward examples/reward_model.yaml  # minutes on two cores; writes runs/reward_model

A pair has a right answer and a wrong answer to one problem. The answers come from the whole run, from the policy's
first evasions to its last sums. A model trained on sums alone would score other texts at random, and a policy would
soon find texts it overrates. The model starts from the demo's trained policy, with a new head for one score.
"""

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from rlft_fast.models import load_tokenizer

PAIRS_PER_PROMPT = 8
HELD_OUT_SHARE = 0.1

Answers = dict[str, dict[str, bool]]
"""By prompt, the texts of the answers, and whether each is right."""


def read_answers(samples: Path) -> Answers:
    """The answers in a run's samples.jsonl. An answer is right if it got the whole reward: its number, and it ends."""
    answers: Answers = defaultdict(dict)
    lines = samples.read_text(encoding="utf-8").split("\n")  # splitlines would also cut at U+2028 within an answer
    for sample in map(json.loads, filter(str.strip, lines)):
        found, text = answers[sample["prompt"]], sample["completion"]
        is_right = sample["finish_reason"] == "stop" and sample["reward"] == 1.0
        found[text] = is_right or found.get(text, False)
    return answers


def make_pairs(answers: dict[str, bool], rng: random.Random) -> Iterator[dict[str, str]]:
    """Some of all pairs of a right answer and a wrong answer, none of them empty."""
    right, wrong = ([text for text, is_right in answers.items() if is_right == kind and text] for kind in (True, False))
    pairs = [*product(right, wrong)]
    for chosen, rejected in rng.sample(pairs, min(len(pairs), PAIRS_PER_PROMPT)):
        yield {"chosen": chosen, "rejected": rejected}


def write_pairs(samples: Path, folder: Path) -> None:
    """Writes train.jsonl and held_out.jsonl, which share no prompt."""
    rng, answers = random.Random(0), read_answers(samples)
    prompts = sorted(answers)
    rng.shuffle(prompts)
    count = round(HELD_OUT_SHARE * len(prompts))
    for name, part in (("held_out", prompts[:count]), ("train", prompts[count:])):
        rows = [{"prompt": prompt, **pair} for prompt in part for pair in make_pairs(answers[prompt], rng)]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_classifier(policy: Path, folder: Path) -> None:
    """Writes the policy's body with a new head for one score."""
    tokenizer = load_tokenizer(policy)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(policy: Path, samples: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    write_pairs(samples, output)
    write_classifier(policy, output / "start")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, default=Path("runs/demo/hf"), help="model to start from")
    parser.add_argument("--samples", type=Path, default=Path("runs/demo/samples.jsonl"), help="answers of a run")
    parser.add_argument("--output", type=Path, default=Path("runs/reward_pairs"), help="folder to write")
    options = parser.parse_args()
    main(options.policy, options.samples, options.output)
