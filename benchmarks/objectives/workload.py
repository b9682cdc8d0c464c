"""The work of the objectives' benchmark: an optimizer step on the same rows, for SFT, DPO and a reward model.

Rows are texts, which each side reads with its own code. Their words are random, and each word is one token of
SmolLM2's: lengths change the time of a side, tokens do not. Lengths are log-normal: the longest answers of SFT are
several times the median, as those of assistants are. The prompts of pairs have the same length, and both answers of a
pair follow one prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from rlft_fast.models import load_tokenizer

OURS, THEIRS, PADDING_FREE = "rlft_fast", "TRL, padded", "TRL, padding-free"
LEAN, RECOMPUTING = "rlft_fast, recomputing", "TRL, padded, recomputing"
OBJECTIVES = {"sft": "SFT", "dpo": "DPO", "reward": "reward model"}

_PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_NUM_FRAME_TOKENS = 9  # of _PROMPT without its words, by SmolLM2's tokenizer
_WORDS = (
    "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "green", "blue", "black",
    "white", "north", "south", "east", "west", "spring", "summer", "autumn", "winter", "day", "night", "sun", "moon",
    "earth", "water", "fire", "air", "stone",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Sizes.

    Attributes:
        num_rows: of a step of SFT.
        num_pairs: of a step of DPO and of a reward model.
        prompt: median tokens of SFT's prompts.
        answer: median tokens of SFT's answers.
        pair_prompt: tokens of a pair's prompt.
        pair_answer: median tokens of a pair's answers.
    """

    num_rows: int = 16
    num_pairs: int = 4
    prompt: int = 32
    answer: int = 48
    pair_prompt: int = 200
    pair_answer: int = 32


def prepare(model: str, folder: Path, work: Workload) -> None:
    """Writes the rows of each objective, and the model of the reward side: a new head on the language model."""
    random = np.random.default_rng(0)

    def lengths(n: int, median: float, sigma: float) -> list[int]:
        found = random.lognormal(np.log(median), sigma, n).clip(median / 4, median * 4)
        return [max(int(x), 2) for x in found]

    sizes = zip(lengths(work.num_rows, work.prompt, 0.4), lengths(work.num_rows, work.answer, 0.8), strict=True)
    rows = [{"prompt": _PROMPT.format(_text(random, n)), "completion": _text(random, m)} for n, m in sizes]
    prompts = [_PROMPT.format(_text(random, work.pair_prompt - _NUM_FRAME_TOKENS)) for _ in range(work.num_pairs)]
    answers = [_text(random, n) for n in lengths(2 * work.num_pairs, work.pair_answer, 0.5)]
    pairs = [
        {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        for prompt, chosen, rejected in zip(prompts, answers[::2], answers[1::2], strict=True)
    ]
    for path, found in ((rows_of(folder, "sft"), rows), (rows_of(folder, "dpo"), pairs)):
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    torch.manual_seed(0)
    scored = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    scored.config.pad_token_id = None
    scored.save_pretrained(model_of(folder, "reward", model))
    load_tokenizer(model).save_pretrained(model_of(folder, "reward", model))


def rows_of(folder: Path, objective: str) -> Path:
    """The rows of an objective; pairs are those of DPO."""
    return folder / ("rows.jsonl" if objective == "sft" else "pairs.jsonl")


def model_of(folder: Path, objective: str, model: str) -> str:
    """The model of an objective."""
    return str(folder / "reward") if objective == "reward" else model


def _text(random: np.random.Generator, n: int) -> str:
    """So many random words."""
    return " ".join(_WORDS[i] for i in random.integers(len(_WORDS), size=n))
