"""A generator whose replies a test writes, and chat templates of families."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import trl

from rlft_fast.rollout import Answers, Completion, Request, SamplingParams, Span

PLAYERS = Path(__file__).parents[2] / "envs" / "players.py"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
IM_END, EOT = "<|im_end|>", "<|eot_id|>"
SPECIAL = ["<|im_start|>", IM_END, EOT, "<|start_header_id|>", "<|end_header_id|>", "<end_of_turn>", "<|end|>",
           "<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|user|>", "<|observation|>", "<turn|>",
           "<|END_OF_TURN_TOKEN|>"]  # fmt: skip


class Scripted:
    """A generator whose replies a function gives. It records every request."""

    name = "scripted"

    def __init__(self, reply: Callable[[Request], list[int]]) -> None:
        self.reply, self.seen, self.episodes, self.images = reply, [], [], []

    def load(self, weights, version) -> None: ...

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> Answers:
        answers: Answers = []
        for request in requests:
            ids = self.reply(request)[: request.max_new_tokens]
            self.seen.append(([*request.token_ids], ids, request.seed))
            self.episodes.append(request.episode)
            self.images.append(request.images)
            reason = "stop" if ids and ids[-1] >= 256 else "length"
            support = None if params.top_k is None else torch.tensor(ids, dtype=torch.int32).repeat(params.top_k, 1).T
            answers.append(Completion(ids, [-0.5] * len(ids), reason, (Span(len(ids), 3),), support))
        return answers


def in_turn(tokenizer, *replies: str, end: str = IM_END) -> Callable[[Request], list[int]]:
    left = [tokenizer.encode(reply + end, add_special_tokens=False) for reply in replies]
    return lambda request: left.pop(0)
