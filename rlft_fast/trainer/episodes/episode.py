"""One episode while it is played: its tokens, its turns and how it ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from rlft_fast.data import Images, Samples, cat_supports
from rlft_fast.envs import Failure
from rlft_fast.rollout import Completion, Request, Span, seed_of, to_samples
from rlft_fast.trainer.episodes.history import History
from rlft_fast.trainer.episodes.suffix import Suffix
from rlft_fast.trainer.prompts import Conversation, Message, PromptImages

PART = "environment"
"""Name of the environment's reward among the parts of a reward."""

STOP = "stop_"
"""Begin of the names of counts that tell how an episode has ended, each 0 or 1."""
Stop = Literal["done", "max_turns", "max_new_tokens"]
"""How an episode ends: by the environment, or by a limit. An episode may also fail."""
STOP_REASONS = (*get_args(Stop), *get_args(Failure), "template", "image")
"""How an episode ends, or fails.

Reason ``template``: the chat template cannot be applied to the messages. Reason ``image``: an image of the
environment cannot be used.
"""


@dataclass(slots=True)
class Episode:
    """One episode. Its completion has the tokens of the policy and of the environment, in turn."""

    row: int
    environment: str  # its name
    number: int  # of the environment's process
    prompt: list[int]
    conversation: Conversation  # all messages so far
    seed: int
    max_tokens: int
    has_support: bool  # whether tokens are sampled among some of the vocabulary
    images: Images | None = None  # of all tokens so far
    pictures: list[list[str]] = field(default_factory=list)  # see `Samples.pictures`
    messages: list[Message] = field(default_factory=list)  # see `Samples.messages`
    heard: list[Message] = field(default_factory=list)  # that the next reply answers
    token_ids: list[int] = field(default_factory=list)  # of all branches, one behind the other
    behind_prompt: list[int] = field(default_factory=list)  # of the last branch, with what it has from others
    kept: list[int] = field(default_factory=list)  # see `Samples.kept_T`
    logprobs: list[float] = field(default_factory=list)
    is_sampled: list[bool] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    supports: list[torch.Tensor] = field(default_factory=list)
    reward: float = 0.0
    ends: list[int] = field(default_factory=list)  # for each turn the place behind its last token
    turn_rewards: list[float] = field(default_factory=list)
    calls: int = 0
    failed_calls: int = 0
    history: History | None = None  # what the template leaves of it; None: the policy sees all that was said
    is_thinking: bool = False  # the next reply begins within a thought
    stop_reason: str | None = None  # of STOP_REASONS; None: the episode is running
    failure: str | None = None  # in words; an episode that failed has no reward
    seconds: list[float] = field(default_factory=list)  # of each call of the environment

    @property
    def turns(self) -> int:
        """Replies of the policy's so far."""
        return len(self.ends)

    @property
    def running(self) -> bool:
        return self.stop_reason is None

    @property
    def left(self) -> int:
        """Tokens that the last branch may still have."""
        return self.max_tokens - len(self.behind_prompt)

    @property
    def environment_seed(self) -> int:
        """Decides what the environment draws. The turns of the policy have other seeds."""
        return seed_of(self.seed, 0)

    def request(self, max_turns: int) -> Request:
        """For the next of so many turns, whose draws depend on the episode's seed and the number of the turn alone."""
        seed = seed_of(self.seed, self.turns) if self.turns else self.seed
        return Request(
            row=self.row, token_ids=[*self.prompt, *self.behind_prompt], seed=seed, max_new_tokens=self.left,
            images=self.images,
            episode=self.number if max_turns > 1 else None,
        )  # fmt: skip

    def add_sampled(self, reply: Completion) -> None:
        """Appends a reply of the policy's."""
        self._add(reply.token_ids, reply.logprobs, is_sampled=True)
        self.spans += reply.spans or [Span(len(reply.token_ids), 0)]
        if reply.support is not None:
            self.supports.append(reply.support)
        self.ends.append(len(self.token_ids))
        self.turn_rewards.append(0.0)

    def add_given(self, suffix: Suffix, shown: PromptImages | None = None) -> None:
        """Appends tokens of the environment or the template, and the images that some of them stand for."""
        if shown is not None:
            self.images = replace(shown.load(), before=self.images)
            self.pictures.append(shown.pictures)
        token_ids, self.is_thinking = suffix
        self._add(token_ids, [0.0] * len(token_ids), is_sampled=False)
        version = self.spans[-1].weight_version if self.spans else 0
        self.spans.append(Span(len(token_ids), version))
        if self.has_support:
            self.supports.append(torch.full((len(token_ids), 1), -1, dtype=torch.int32))

    def branch(self, suffix: Suffix) -> None:
        """Goes on from other tokens behind the prompt, which the template has written."""
        pairs = zip(self.behind_prompt, suffix.token_ids, strict=False)
        num_equal = next((i for i, (x, y) in enumerate(pairs) if x != y), len(self.behind_prompt))
        num_kept = min(num_equal, len(suffix.token_ids) - 1)
        begin = len(self.token_ids)
        del self.behind_prompt[num_kept:]
        self.add_given(suffix._replace(token_ids=suffix.token_ids[num_kept:]))
        self.kept[begin] = num_kept

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool) -> None:
        self.token_ids += token_ids
        self.behind_prompt += token_ids
        self.kept += [-1] * len(token_ids)
        self.logprobs += logprobs
        self.is_sampled += [is_sampled] * len(token_ids)

    def earn(self, reward: float | None) -> None:
        """Adds to the reward of the episode, and of its last turn."""
        self.reward += reward or 0.0
        if self.turn_rewards:
            self.turn_rewards[-1] += reward or 0.0

    def rewards(self) -> list[float]:
        """Of each token: at the last token of a turn the reward of the turn, else 0."""
        rewards = [0.0] * len(self.token_ids)
        for end, reward in zip(self.ends, self.turn_rewards, strict=True):
            rewards[end - 1] = reward
        return rewards

    def stop(self, reason: Stop) -> None:
        """Ends the episode."""
        self.stop_reason = reason

    def fail(self, words: str, reason: Failure | Literal["template", "image"]) -> None:
        """Ends the episode, which has no reward, and is left out of the learning."""
        self.stop_reason, self.failure = reason, words

    def completion(self) -> Completion:
        """All tokens."""
        none = torch.empty(0, 1, dtype=torch.int32)  # an episode may fail before its first token
        support = cat_supports([none, *self.supports]) if self.has_support else None
        reason: Literal["stop", "length"] = "stop" if self.stop_reason in ("done", "max_turns") else "length"
        return Completion(self.token_ids, self.logprobs, reason, tuple(self.spans), support, self.is_sampled)


def samples_of(episodes: Sequence[Episode], *, may_branch: bool = False, may_show: bool = False) -> Samples:
    """One sample per episode, with the environment's reward as a part. An episode that failed has no reward.

    Args:
        episodes: that have ended.
        may_branch: whether an episode may have branches.
        may_show: whether an environment may show images.
    """
    samples = to_samples([(episode.row, episode.completion()) for episode in episodes])
    rewards = [episode.reward if episode.failure is None else torch.nan for episode in episodes]
    counts = {
        "turns": [e.turns for e in episodes],
        **({"branches": [1 + sum(kept >= 0 for kept in e.kept) for e in episodes]} if may_branch else {}),
        "tool_calls": [e.calls for e in episodes],
        "failed_tool_calls": [e.failed_calls for e in episodes],
        "environment_failed": [e.failure is not None for e in episodes],
        "environment_calls": [len(e.seconds) for e in episodes],
        "seconds_environment_calls": [sum(e.seconds) for e in episodes],
        **{f"{STOP}{reason}": [e.stop_reason == reason for e in episodes] for reason in STOP_REASONS},
    }
    kept_T = torch.tensor([x for episode in episodes for x in episode.kept], dtype=torch.int32)
    return samples.replace(
        kept_T=kept_T if may_branch else None,
        pictures=[episode.pictures for episode in episodes] if may_show else None,
        messages=[episode.messages for episode in episodes],
        reward_T=torch.tensor([x for episode in episodes for x in episode.rewards()], dtype=torch.float64),
        parts={PART: torch.tensor(rewards, dtype=torch.float64)},
        counts={name: torch.tensor(own, dtype=torch.float64) for name, own in counts.items()},
    )
