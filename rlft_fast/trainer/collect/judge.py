"""From completions to samples with rewards: functions on the rank that sampled, reward models on all of them."""

import math
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlft_fast.config import MODEL_PART, SERVER_PART, Config, run_roles
from rlft_fast.data import Batch, Samples
from rlft_fast.engine import Engine
from rlft_fast.errors import brief, without_panics
from rlft_fast.models import load_tokenizer, split_stop
from rlft_fast.rewards import (
    IsolatedReward,
    LanguageModelJudge,
    Parts,
    RewardError,
    RewardFunction,
    ServerReward,
    WeightedRewards,
    check_columns,
    load_reward,
    reasoning_gym_reward,
    warn_of_missing_values,
    weighted_sum,
)
from rlft_fast.run import naming_start
from rlft_fast.trainer.collect.experience import with_rewards
from rlft_fast.trainer.episodes import environment_names, find_styles
from rlft_fast.trainer.models import with_known_tokens
from rlft_fast.trainer.prompts import Conversation, Limits, Message, Prompts, with_words
from rlft_fast.world import SPANS, STOP, LeftEarlyError, World

_ANSWER = "an answer of 6 words, 1.5"  # to find in a rendered text


class Judge:
    """The reward functions of a run, and, after `use_models`, its reward models.

    Args:
        config: of the run.
        tokenizer: of the policy.
        world: the processes that score together.

    Attributes:
        roles: of the reward models, by name.
        seconds: time in which this rank's functions scored the last answers [s].

    Raises:
        ValueError: a function cannot be used.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, world: World) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.world = world
        self.functions = load_functions(config)
        self.roles = {name: role for name, role in run_roles(config).items() if role.part is not None}
        self.readers = {name: RewardModelReader(role.path, tokenizer) for name, role in self.roles.items()}
        self.models: dict[str, RewardModelScorer] = {}
        weights = {name: own.weight for name, own in config.reward.models.items()}
        self.model_weights = weights | {MODEL_PART: config.reward.model_weight}
        self.seconds = 0.0
        self._turn = threading.Lock()  # functions are called by one thread at a time
        self._replaces = False  # whether its functions score episodes in the environment's place

    @classmethod
    def for_evaluation(cls, config: Config, tokenizer: PreTrainedTokenizerBase, world: World) -> "Judge | None":
        """The judge of the held-out answers; None if the judge of the training answers scores them, too.

        Raises:
            ValueError: a function cannot be used.
        """
        if config.evaluation is None or config.evaluation.function is None:
            return None
        reward = config.reward.model_copy(
            update={"function": config.evaluation.function, "model": None, "models": {}, "server": None}
        )
        judge = cls(config.model_copy(update={"reward": reward}), tokenizer, world)
        judge._replaces = True
        return judge

    def score(self, prompts: Prompts, own: Samples) -> Samples:
        """The samples of all ranks with their texts, each scored by the rank that made it, and by the models of all.

        Args:
            prompts: of the rollout.
            own: the samples of this rank.

        Raises:
            RewardError: a function failed, here or in another process.
        """
        started = time.perf_counter()

        def score() -> tuple[list[str], list[list[Message]] | None, list[Parts]]:
            try:
                with STOP.alone(), self._turn, SPANS.noted("reward"):
                    return self._score_own(prompts, own)
            finally:
                self.seconds = time.perf_counter() - started

        try:
            texts, messages, scored = self.world.together(score, LeftEarlyError, RewardError)
        except (RewardError, LeftEarlyError):
            STOP.leave_together(self.world)
            raise
        STOP.leave_together(self.world)
        weights = self.functions.weights
        totals = [weighted_sum(parts, weights) for parts in scored]
        others = self._without_functions(prompts, own)
        rewards = [other if total is None else total for total, other in zip(totals, others, strict=True)]
        samples = with_rewards(self._counted(own), rewards, scored, [*weights])
        are_read = any(not reader.has_same_template for reader in self.readers.values())
        samples = samples.replace(texts=texts, messages=messages if are_read else None)
        samples = samples.replace(parts={**samples.parts, **own.parts}).gather(self.world)
        return (self._with_models(prompts, samples) if self.models else samples).replace(messages=None)

    def _without_functions(self, prompts: Prompts, own: Samples) -> list[float | None]:
        """What each sample has where no function judges it: 0, to which others add, or None, which leaves it out.

        A model scores every sample, and an environment its episodes, but functions that are tools have no reward to
        give. A teacher needs no reward.
        """
        if self.models or not self.functions.weights:
            return [0.0] * len(own)
        configs = {} if self._replaces else self.config.environments_by_name
        names = environment_names(configs, prompts) if configs else []
        return [0.0 if names and not configs[names[row]].tools else None for row in own.row_B.tolist()]

    def _counted(self, own: Samples) -> Samples:
        """The samples with the parts of the reward that count. An episode that failed has no reward in any case."""
        if not self._replaces:
            return own
        return own.replace(parts={name: 0 * part for name, part in own.parts.items()})

    def check(self, prompts: Prompts, what: str) -> None:
        """Checks before the run that functions and reward models can judge answers to these prompts.

        Warns of rows without a value that a function needs.

        Args:
            prompts: of a data set.
            what: name of the data set in messages.

        Raises:
            ValueError: a function cannot be called with the columns of these prompts, or a reward model cannot read a
                prompt.
        """
        for function in self.functions.functions.values():
            check_columns(function, prompts.columns, what)
            if isinstance(function, ServerReward):
                (prompt,), (answer,) = self.answered(prompts.select([0]), [_ANSWER])
                function.check(prompt, answer, {name: values[0] for name, values in prompts.columns.items()})
            if self.world.is_first:
                warn_of_missing_values(function, prompts.columns, what)
        for reader in self.readers.values():
            reader.check(prompts, what)

    def answered(
        self, prompts: Prompts, texts: Sequence[str], messages: Sequence[list[Message]] | None = None
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Prompts and whole answers as functions get them.

        Args:
            prompts: N prompts.
            texts: N texts that the policy has added to the prompts.
            messages: of N episodes, with all that the policy has written; None: an answer is one message.
        """
        if not self.config.reward.conversational:
            return prompts.answered(texts)
        if messages is None:
            return prompts.answered_messages(texts)
        pairs = [_asked_and_said(prompts.conversations[row], own) for row, own in enumerate(messages)]
        return [asked for asked, _ in pairs], [said for _, said in pairs]

    def use_models(self, engines: Mapping[str, Engine]) -> None:
        """Scores with the engines of the reward models from now on.

        Args:
            engines: of the run, by role. Those of other roles are not read.
        """
        self.models = {
            name: RewardModelScorer(reader, engines[name], "actor" if name == "reward" else name)
            for name, reader in self.readers.items()
        }

    def close(self) -> None:
        """Ends the functions' worker processes; the next call starts new ones."""
        for function in self.functions.functions.values():
            if isinstance(function, IsolatedReward):
                function.close()

    def _score_own(self, prompts: Prompts, own: Samples) -> tuple[list[str], list[list[Message]] | None, list[Parts]]:
        """The texts of this rank's samples, the messages of episodes, and the parts of the rewards."""
        if not len(own):  # there are fewer prompts than processes: functions need not know what to do with nothing
            return [], None if own.messages is None else [], []
        asked, replies = prompts.select(own.row_B.tolist()), self._decode(own)
        texts = ["\n".join(each) for each in replies]  # without a break, the replies 5 and 7 would be read as 57
        messages = None if own.messages is None else [*map(_with_words, own.messages, replies)]
        given = self.answered(asked, texts, messages)
        return texts, messages, self.functions.score(*given, own.sampled_ids(), asked.columns)

    def _decode(self, samples: Samples) -> list[list[str]]:
        """What the policy has written in each reply, as functions, other models and the log read it."""
        replies, keeps = samples.replies(), self.config.reward.keep_special_tokens
        if keeps:
            ends = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
            ends -= {*split_stop(self.config.rollout.stop, self.tokenizer)[0]}  # a part of the answer
            for own, stopped in zip(replies, samples.stopped_B.tolist(), strict=True):
                whole = own if stopped else own[:-1]  # of the replies, which have their end
                own[: len(whole)] = [ids[:-1] if ids[-1] in ends else ids for ids in whole]
        every = [ids for own in replies for ids in own]
        texts = iter(self.tokenizer.batch_decode(every, skip_special_tokens=not keeps))
        return [[*islice(texts, len(own))] for own in replies]

    def _with_models(self, prompts: Prompts, samples: Samples) -> Samples:
        assert samples.texts is not None
        answered, reward_B, parts = prompts.select(samples.row_B.tolist()), samples.reward_B, dict(samples.parts)
        for name, model in self.models.items():
            part = str(self.roles[name].part)
            parts[part] = model.score(answered, samples.token_ids(), samples.texts, samples.messages)
            reward_B = reward_B + self.model_weights[part] * parts[part]  # NaN where one of them is
        return samples.replace(reward_B=reward_B, parts=parts)


class RewardModelReader:
    """How a reward model reads prompts with their answers.

    A model with the policy's vocabulary and chat template gets the policy's own tokens, and behind an end token what
    the template has there, such as a line break: the model has learned to score its last token. Another model gets each
    conversation in its own chat template, as `apply_chat_template` of its tokenizer makes it, and a text without a
    template as its tokenizer makes it, with its own special tokens. Of an episode it reads all messages: calls of tools
    in the policy's words, and results in a user's message, which any template takes.

    Args:
        path: folder of the reward model.
        tokenizer: of the policy.

    Raises:
        ValueError: the folder holds no tokenizer.
    """

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.path, self.policy_tokenizer = path, tokenizer
        self.tokenizer = load_tokenizer(path)
        self.limits = Limits(memory=False)
        self.has_same_tokens = self.tokenizer.get_vocab() == tokenizer.get_vocab()
        template = self.tokenizer.chat_template  # a model without one has learned from the policy's
        self.has_same_template = self.has_same_tokens and template in (None, tokenizer.chat_template)

    def check(self, prompts: Prompts, what: str) -> None:
        """Raises ValueError if the model's chat template cannot be applied to these prompts, `what` in messages."""
        if self.has_same_template or not prompts.conversations:
            return
        where = f"the reward model in {self.path}, whose tokens are not the policy's, reads conversations in its own"
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where} chat template, but has none: put the template that it was trained with into its folder, as "
                "chat_template.jinja, or choose another model"
            )
        limits = Limits()
        for row in _rows_of_each_shape(prompts):
            try:
                text = prompts.conversations[row].render(self.tokenizer, limits, _ANSWER)
                failure = None if _ANSWER in text else "it drops the answer"
            except Exception as error:  # a template is code of the model's
                failure = brief(error)
            if failure is not None:
                raise ValueError(
                    f"{where} chat template, which cannot be applied to row {row} (counted from 0) of {what}: {failure}"
                )

    def sequences(
        self, prompts: Prompts, token_ids: list[list[int]], texts: Sequence[str],
        messages: Sequence[list[Message]] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Prompts with their answers in the model's tokens.

        Args:
            prompts: B prompts.
            token_ids: of the B answers, as the policy has written them.
            texts: the same as texts.
            messages: of B episodes; None: an answer is one message.

        Raises:
            RewardError: the chat template fails.
        """
        asked, answers = prompts.answered(texts)
        conversations = {id(x): x for x in prompts.conversations.values()}  # of prompts, which answers share
        behind = {key: self._behind_answer(x) for key, x in conversations.items()} if self.has_same_template else {}

        def sequence(row: int) -> list[int]:
            conversation = prompts.conversations.get(row)
            if not (self.has_same_tokens if conversation is None else self.has_same_template):
                if messages is not None and conversation is not None:
                    conversation, answers[row] = self._episode(conversation, messages[row])
                return self._sequence(conversation, asked[row], answers[row])
            end = behind.get(id(conversation), [])
            rest = end[1:] if end[:1] == token_ids[row][-1:] else []
            return [*prompts.token_ids[row], *token_ids[row], *rest]

        return [sequence(row) for row in range(len(prompts))]

    def _episode(self, conversation: Conversation, messages: Sequence[Message]) -> tuple[Conversation, str]:
        """What was said before the last reply of an episode, and the reply."""
        asked, said = _asked_and_said(conversation, messages)
        plain = [{name: x for name, x in message.items() if name != "tool_calls"} for message in said]
        *before, last = next(find_styles(self.tokenizer, [])).written(plain)
        return replace(conversation, messages=_in_turn([*asked, *before])), last["content"]

    def _behind_answer(self, conversation: Conversation) -> list[int]:
        """The tokens that the policy's template has behind an answer, from the end token on; []: it shows no answer."""
        try:
            with without_panics():
                _, answer, end = conversation.render(self.policy_tokenizer, self.limits, _ANSWER).rpartition(_ANSWER)
                return self.policy_tokenizer.encode(end, add_special_tokens=False) if answer else []
        except Exception:  # a template is code of the model's; what the policy has written is there in any case
            return []

    def _sequence(self, conversation: Conversation | None, asked: str, answer: str) -> list[int]:
        what = "tokenizer"
        try:
            with without_panics():
                if conversation is None:
                    return self.tokenizer.encode(asked + answer)
                what = "chat template"
                text = conversation.render(self.tokenizer, self.limits, answer)
                what = "tokenizer"
                return self.tokenizer.encode(text, add_special_tokens=False)  # as apply_chat_template does
        except Exception as error:  # a template is code of the model's, and tokenizers has no error of its own
            raise RewardError(
                f"the {what} of the reward model in {self.path} cannot be applied to the answer {answer[:80]!r} to the "
                f"prompt {asked[:80]!r}: {brief(error)}"
            ) from error


def _with_words(messages: Sequence[Message], replies: Sequence[str]) -> list[Message]:
    """The messages of an episode, with all that the policy has written in its own."""
    words = iter(replies)
    return [m | {"content": next(words, "")} if m.get("role") == "assistant" else m for m in messages]


def _in_turn(messages: Sequence[Message]) -> list[Message]:
    """The messages, those of a user one after another as one: many templates refuse two."""
    found: list[Message] = []
    for message in messages:
        both = [*found[-1:], message]
        if len(both) == 2 and all(x["role"] == "user" and isinstance(x["content"], str) for x in both):
            found[-1] = {"role": "user", "content": "\n\n".join(x["content"] for x in both)}
        else:
            found.append(message)
    return found


def _asked_and_said(conversation: Conversation, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What an episode begins with, the environment's first words included, and what was said from the first reply on.

    Args:
        conversation: the prompt.
        messages: see `Samples.messages`.
    """
    begin = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    *before, last = conversation.messages
    words = "".join(message["content"] for message in messages[:begin] if "role" not in message)
    if words:
        last = last | {"content": with_words(last["content"], after=words)}
    nothing: Message = {"role": "assistant", "content": ""}  # the environment may fail at its beginning
    said = [*messages[begin:]] or [nothing]
    return [*before, last, *(message for message in messages[:begin] if "role" in message)], said


def _rows_of_each_shape(prompts: Prompts) -> list[int]:
    """One row of each sequence of roles and keys: templates refuse a conversation by its shape."""
    shapes: dict[Any, int] = {}
    for row, conversation in prompts.conversations.items():
        shape = tuple((m["role"], type(m.get("content")), *sorted(m)) for m in conversation.messages)
        shapes.setdefault((shape, bool(conversation.tools)), row)
    return [*shapes.values()]


class RewardModelScorer:
    """Scores prompt and completion as one text, at its last token.

    Args:
        reader: of the reward model, whose folder holds a sequence classification with one label.
        engine: of the reward model.
        section: key of the section of the configuration that the engine runs by, for messages.
    """

    def __init__(self, reader: RewardModelReader, engine: Engine, section: str = "actor") -> None:
        self.reader = reader
        self.engine = engine
        self.section = section

    def score(
        self, prompts: Prompts, token_ids: list[list[int]], texts: Sequence[str],
        messages: Sequence[list[Message]] | None = None,
    ) -> Tensor:  # fmt: skip
        """The scores of the completions of all ranks, which every rank must ask for together.

        Args:
            prompts: the B prompts that the completions answer.
            token_ids: of the B completions.
            texts: the same as texts.
            messages: of B episodes; None: an answer is one message.

        Returns:
            (B,) float64. NaN, and a warning, where the token cap or the model's positions have no room for a text.

        Raises:
            RewardError: a score is not finite, or the model's chat template fails.
        """
        sequences = self.reader.sequences(prompts, token_ids, texts, messages)
        cap, longest = self.engine.config.max_tokens, self.engine.facts.longest
        why = f"raise {self.section}.max_tokens"
        if longest is not None and longest < cap:
            cap, why = longest, "its positions end there, or its rotary embeddings change"
        fits_B = torch.tensor([len(sequence) < cap for sequence in sequences], dtype=torch.bool)  # and one that asks
        if not fits_B.all():
            warnings.warn(
                f"answers that have more than {cap - 1} tokens with their prompt, as the reward model counts, have no "
                f"score and are left out: {why}",
                stacklevel=2,
            )
        score_B = torch.full((len(sequences),), math.nan, dtype=torch.float64)
        asked = [*compress(sequences, fits_B.tolist())]
        if not asked:
            return score_B
        batch = with_known_tokens(Batch.from_samples(asked, [[] for _ in asked]), self.engine)
        scores = self.engine.score(batch)
        if (bad := ~scores.isfinite()).any():
            number = int(fits_B.nonzero()[bad.nonzero()[0]])
            raise RewardError(
                f"the reward model scored an answer to the prompt {prompts.texts[number][:80]!r} with "
                f"{scores[bad][0]}: look at its weights, or whether {self.section}.compute_dtype, which it runs in, is "
                "too narrow for it"
            )
        score_B[fits_B] = scores.double()
        return score_B


def load_functions(config: Config) -> WeightedRewards:
    """The functions that the configuration names, loaded or with their workers."""
    reward, weights = config.reward, config.function_weights
    specs = [name for name in weights if name != SERVER_PART or reward.server is None]
    functions: dict[str, RewardFunction] = {}
    if reward.function is None:
        functions |= {task: reasoning_gym_reward(task) for task in specs}
    else:
        with naming_start(Path(config.output_dir)):
            if reward.timeout_s is None:
                functions |= {spec: load_reward(spec) for spec in specs}
            else:
                functions |= {spec: IsolatedReward(spec, reward.timeout_s, reward.workers) for spec in specs}
    if (server := reward.server) is not None:
        judge = None if server.judge is None else LanguageModelJudge(**server.judge.model_dump())
        functions[SERVER_PART] = ServerReward(server.url, server.timeout_s, server.retries, judge)
    return WeightedRewards(functions, weights)
