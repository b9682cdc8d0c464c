"""Plays episodes: the policy and an environment in turn, many episodes at once."""

import base64
import contextlib
import re
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, groupby
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from rlft_fast.cluster import RemoteRollout
from rlft_fast.config import EnvironmentConfig
from rlft_fast.data import Images, Samples
from rlft_fast.envs import EnvironmentClass, EnvironmentPool, Failed, Steps
from rlft_fast.errors import brief
from rlft_fast.rollout import (
    Completion,
    Request,
    RequestError,
    Rollout,
    SamplingParams,
    Seeds,
    draw_seeds,
    without_refusals,
)
from rlft_fast.trainer.episodes.calls import Parsed, parse, text_of
from rlft_fast.trainer.episodes.episode import PART, Episode, samples_of
from rlft_fast.trainer.episodes.history import History, prove_history
from rlft_fast.trainer.episodes.styles import Style
from rlft_fast.trainer.episodes.suffix import choose_suffixes
from rlft_fast.trainer.prompts import (
    ImageError,
    ImageReader,
    ImageSource,
    Message,
    PromptImages,
    Prompts,
    image_parts,
    name_rows,
    only_placeholders,
)
from rlft_fast.world import SPANS, World

_COLUMN = "environment"  # of rows, with a name

_Answered = TypeVar("_Answered")


class _Said(NamedTuple):
    """What an environment has been asked in an episode."""

    episode: Episode
    text: str
    read: Parsed


class Seconds(threading.local):
    """Time of a call [s]. Each thread has numbers of its own."""

    generate = 0.0
    """In which this rank's generator worked."""
    environment = 0.0
    """In which this rank waited for environments."""


class EpisodePlayer:
    """Plays the episodes of a run.

    Args:
        configs: the environments by name, see `environment_names`.
        columns: by the names of the environments, names of the columns of their rows, the prompt's included.
        tokenizer: of the policy.
        end_token_ids: tokens that end a reply of the policy's.
        image_reader: of the policy; None: the policy takes no images.
        why_no_images: why nobody may show the policy images all the same; empty: they may.
        in_turn: whether the episodes of a call take each turn together, so that what the generator answers together is
            the same again. Otherwise an episode goes on as soon as its environment has answered.

    Attributes:
        seconds: of the last call of `samples` in the thread that reads them.

    Raises:
        ValueError: an environment cannot be used, or the chat template does not tell what follows a reply.
    """

    def __init__(
        self, configs: Mapping[str, EnvironmentConfig], columns: Mapping[str, Sequence[str]],
        tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int], image_reader: ImageReader | None = None,
        why_no_images: str = "", *, in_turn: bool = True,
    ) -> None:  # fmt: skip
        self.configs, self.tokenizer, self.in_turn = configs, tokenizer, in_turn
        self.image_reader, self._why_no_images = image_reader, why_no_images
        self._ends = frozenset(end_token_ids)
        self.pool = EnvironmentPool({name: _class_of(own, columns[name]) for name, own in configs.items()})
        try:
            self._suffixes = {
                name: choose_suffixes(tokenizer, tools, end_token_ids, image_reader)
                for name, tools in self.pool.tools.items()
            }
            self._thought_keys = {
                name: prove_history(self._suffixes[name]) for name, own in configs.items() if own.history == "template"
            }
        except BaseException:
            self.pool.close()
            raise
        self.seconds = Seconds()

    def prepare(self, prompts: Prompts, max_prompt_tokens: int) -> Prompts:
        """The prompts with the tools, up to the end of their last words: an episode begins with what follows them.

        Args:
            prompts: of conversations.
            max_prompt_tokens: tokens of the longest prompt allowed.

        Raises:
            ValueError: a prompt is no conversation or ends with the assistant's words, its template does not show where
                its words end, it has images that episodes cannot have, or it is too long with the tools; rows are
                named.
        """
        if missing := [i for i in range(len(prompts)) if i not in prompts.conversations]:
            raise ValueError(
                f"{name_rows(missing)} have no chat template, which an environment needs: set data.chat to true"
            )
        if begun := [i for i, conversation in prompts.conversations.items() if conversation.is_begun]:
            raise ValueError(
                f"{name_rows(begun)} end with words of the assistant's, but an environment begins an episode: end them "
                "with a message of the user's"
            )
        conversations, texts, token_ids = {}, [], []
        names = environment_names(self.configs, prompts)
        for i, conversation in sorted(prompts.conversations.items()):
            suffixes = self._suffixes[names[i]]
            conversations[i] = suffixes.style.with_tools(conversation)
            try:
                if i in prompts.images and (reason := self.why_no_images(names[i])):
                    raise ValueError(f"it has images, but {reason}")
                text, rest = suffixes.split_prompt(conversations[i])
                shown = self._with_images(text, rest, prompts.images.get(i))
            except Exception as error:  # a template is code of the model's
                raise ValueError(f"row {i} (counted from 0) cannot begin an episode: {brief(error)}") from error
            texts.append(text)
            token_ids.append(self.tokenizer.encode(shown, add_special_tokens=False))
        if long := [i for i, ids in enumerate(token_ids) if len(ids) > max_prompt_tokens]:
            raise ValueError(
                f"{name_rows(long)} are longer than rollout.max_prompt_tokens={max_prompt_tokens} with the tools of "
                "the environment: raise it, or leave these rows out"
            )
        return replace(prompts, texts=texts, token_ids=token_ids, conversations=conversations)

    def samples(
        self, rollout: Rollout | RemoteRollout, world: World, prompts: Prompts, params: SamplingParams,
        seeds: Seeds | None = None,
    ) -> Samples:  # fmt: skip
        """This rank's episodes. All ranks must call it together.

        Args:
            rollout: of the policy.
            world: the ranks that call the method together.
            prompts: of this rank, see `prepare`.
            params: how to sample. `SamplingParams.max_new_tokens` is the limit of an episode's tokens after its prompt.
            seeds: of each episode; None: torch's random state gives them.

        Returns:
            One sample per episode, with the environment's reward as a part. An episode whose environment has failed has
            no reward.

        Raises:
            ImageError: an image of a prompt has changed since the start of the run, or is gone.
            RequestError: the generator refuses a request.
            RolloutError: the generator failed.
        """
        self.seconds.generate = self.seconds.environment = 0.0
        seeds = draw_seeds(len(prompts), params.n) if seeds is None else seeds
        images = world.together(prompts.load_images, ImageError) or [None] * len(prompts)
        with contextlib.ExitStack() as left:  # ends the episodes that an error leaves
            begin = partial(self._begin, prompts, images, params, seeds, left)
            episodes = world.together(begin, Exception)
            self._play(rollout, world, episodes, params)
        may_show = any(not self.why_no_images(name) for name in self.configs)
        return samples_of(episodes, may_branch=bool(self._thought_keys), may_show=may_show)

    def _play(
        self, rollout: Rollout | RemoteRollout, world: World, episodes: list[Episode], params: SamplingParams
    ) -> None:
        """Plays begun episodes to their end."""
        said: dict[int, _Said] = {}
        with self.pool.steps() as steps:
            while world.any_rank(any(episode.running for episode in episodes)):
                ready = [episode for episode in episodes if episode.running and episode.number not in said]
                answers = rollout.answer([self._request(episode) for episode in ready], params)
                self.seconds.generate += rollout.seconds
                replies = world.together(partial(without_refusals, answers), RequestError)
                world.together(partial(self._turn, ready, replies, steps, said), Exception)
        world.together(partial(self._end, episodes), Exception)

    def why_no_images(self, name: str) -> str:
        """Why the episodes of an environment have no images; empty: they may have some."""
        if self.image_reader is None:
            return "the policy takes no images: leave them out, or train a vision-language model"
        if self.configs[name].history == "template":
            return "environment.history is template, which shows no images: set it to keep"
        return self._why_no_images or self._suffixes[name].why_no_images

    def images(self, samples: Samples, images: Sequence[Images | None]) -> list[Images | None]:
        """The images of each sample: those of its prompt, and what its environment has shown.

        Args:
            samples: of episodes.
            images: of the prompt of each row; empty: no prompt has images.
        """
        own = [images[row] if images else None for row in samples.row_B.tolist()]
        pictures = samples.pictures or [[]] * len(samples)
        return [self._behind(first, shown) for first, shown in zip(own, pictures, strict=True)]

    def _behind(self, images: Images | None, pictures: Sequence[Sequence[str]]) -> Images | None:
        for answer in pictures:
            images = replace(self._opened(answer).load(), before=images)
        return images

    def _opened(self, pictures: Sequence[str]) -> PromptImages:
        """Images of an answer. Raises ValueError for what is no image."""
        assert self.image_reader is not None
        contents = [base64.b64decode(picture, validate=True) for picture in pictures]
        return self.image_reader.open([ImageSource("of the environment", content) for content in contents])

    def _with_images(self, text: str, rest: str, images: PromptImages | None) -> str:
        """The text of a prompt with the tokens of its images. More text stands behind it."""
        if self.image_reader is None:
            return text
        whole, (end,) = self.image_reader.expand_at(text + rest, images, [len(text)])
        return whole[:end]

    def metrics(self, prompts: Prompts, samples: Samples) -> dict[str, float]:
        """The mean reward of each environment, where there are several; NaN where it has given none.

        Args:
            prompts: of all ranks.
            samples: of all ranks, see `samples`.
        """
        if len(self.configs) < 2:
            return {}
        names, reward_B = environment_names(self.configs, prompts), samples.parts[PART]
        of_B = [names[row] for row in samples.row_B.tolist()]
        masks = {name: torch.tensor([own == name for own in of_B]) for name in self.configs}
        return {f"reward_mean_{PART}_{name}": reward_B[own].nanmean().item() for name, own in masks.items()}

    def played(self, prompts: Prompts, samples: Samples) -> list[str] | None:
        """The name of each sample's environment; None: there is one, without a name."""
        names = environment_names(self.configs, prompts)
        return None if [*self.configs] == [""] else [names[row] for row in samples.row_B.tolist()]

    def turns(self, samples: Samples) -> list[list[dict[str, Any]]]:
        """What was said in each sample, as texts.

        In turn what the policy sampled (``sampled``), with the ``reward`` of its turn, and what followed. What begins a
        branch has the tokens behind the prompt that are ``kept`` before it.
        """
        lengths = samples.length_B.tolist()
        nothing = [None] * len(samples)
        rewards = nothing if samples.reward_T is None else samples.reward_T.split(lengths)
        kept = nothing if samples.kept_T is None else samples.kept_T.split(lengths)
        columns = zip(
            samples.token_ids_T.split(lengths), samples.is_sampled_T.split(lengths), rewards, kept, strict=True
        )
        return [self._runs(ids.tolist(), mask.tolist(), *own) for ids, mask, *own in columns]

    def _runs(
        self, token_ids: list[int], is_sampled: list[bool], reward_T: torch.Tensor | None, kept_T: torch.Tensor | None
    ) -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = []
        start = 0
        for sampled, run in groupby(is_sampled):
            end = start + len([*run])
            runs.append({"sampled": sampled, "text": self._decoded(token_ids[start:end], sampled=sampled)})
            if sampled and reward_T is not None:
                runs[-1]["reward"] = float(reward_T[start:end].sum())
            if kept_T is not None and (kept := int(kept_T[start])) >= 0:
                runs[-1]["kept"] = kept
            start = end
        return runs

    def _decoded(self, token_ids: list[int], *, sampled: bool) -> str:
        text = str(self.tokenizer.decode(token_ids))
        if sampled or self.image_reader is None:
            return text
        return re.sub(f"({re.escape(self.image_reader.token)})+", r"\1", text)  # one for each run

    def close(self) -> None:
        """Ends all environments."""
        self.pool.close()

    def _begin(
        self, prompts: Prompts, images: Sequence[Images | None], params: SamplingParams, seeds: Seeds,
        left: contextlib.ExitStack,
    ) -> list[Episode]:  # fmt: skip
        rows = [(row, seed) for row, own in enumerate(seeds) for seed in own]
        names = environment_names(self.configs, prompts)
        numbers = self.pool.open([names[row] for row, _ in rows])
        left.callback(self.pool.drop, numbers)
        episodes = [
            Episode(
                row=row, environment=names[row], number=number, prompt=prompts.token_ids[row],
                conversation=prompts.conversations[row], seed=seed, max_tokens=params.max_new_tokens,
                has_support=params.support_size is not None, images=images[row],
            )
            for number, (row, seed) in zip(numbers, rows, strict=True)
        ]  # fmt: skip
        columns = [
            {key: prompts.columns[key][row] for key in self.pool.classes[name].columns if key in prompts.columns}
            | {"prompt": only_placeholders(prompts.conversations[row].messages)}
            for row, name in enumerate(names)
        ]
        own_seeds = {episode.number: episode.environment_seed for episode in episodes}
        own_rows = {episode.number: columns[episode.row] for episode in episodes}
        begun = self._timed(partial(self.pool.reset, own_rows, own_seeds))
        for episode in episodes:
            answer = begun[episode.number]
            if isinstance(answer, Failed):
                episode.fail(answer, answer.kind)
                continue
            suffixes = self._suffixes[episode.environment]
            messages, shown = self._shown(episode, answer["messages"])
            given = self._made(episode, partial(suffixes.opening, episode.conversation, messages, shown))
            if given is not None and self._has_room(episode, len(given.token_ids), episode.left):
                episode.add_given(given, shown)
                episode.conversation, episode.heard = suffixes.opened(episode.conversation, messages), messages
                if episode.environment in self._thought_keys:
                    key, prompt = self._thought_keys[episode.environment], prompts.texts[episode.row]
                    episode.history = History(suffixes, key, prompt, episode.conversation)
        return episodes

    def _request(self, episode: Episode) -> Request:
        return episode.request(self.configs[episode.environment].max_turns)

    def _turn(
        self, episodes: Sequence[Episode], replies: Sequence[Completion], steps: Steps, said: dict[int, "_Said"]
    ) -> None:
        """Takes a reply in each episode, asks the environments, and adds what they answer.

        Args:
            episodes: that the policy has answered.
            replies: of the policy.
            steps: calls of environments that are under way.
            said: what these environments have been asked, by the numbers of the episodes.
        """
        asked: dict[int, Mapping[str, Any]] = {}
        for episode, reply in zip(episodes, replies, strict=True):
            episode.add_sampled(reply)
            style = self._suffixes[episode.environment].style
            text = self._text(reply, style)
            read = parse(text, style.form, style.tools, is_thinking=episode.is_thinking)
            episode.messages += [*episode.heard, read.message]
            episode.calls += len(read.calls) + (read.mistake is not None)
            episode.failed_calls += read.mistake is not None
            if reply.finish_reason == "length":  # without its end, the reply says nothing for sure
                episode.stop("max_new_tokens")
            elif read.mistake is not None:
                self._answer(episode, text, read, None)
            else:
                asked[episode.number] = read.message
                said[episode.number] = _Said(episode, text, read)
        steps.give(asked)
        goes_on = any(episode.running and episode.number not in said for episode in episodes)
        while said and (self.in_turn or not goes_on):
            for number, answer in self._timed(steps.rest if self.in_turn else steps.some).items():
                episode, text, read = said.pop(number)
                self._answer(episode, text, read, answer)
                goes_on |= episode.running

    def _answer(self, episode: Episode, text: str, reply: Parsed, answer: Mapping[str, Any] | Failed | None) -> None:
        """Adds the environment's answer to an episode; None: the reply had a call that cannot be read."""
        if isinstance(answer, Failed):
            episode.fail(answer, answer.kind)
            return
        if answer is None:
            messages: list[Message] = [{"role": "tool", "content": reply.mistake}]
        else:
            messages = answer["messages"]
            episode.earn(answer["reward"])
        if (answer is not None and answer["done"]) or not messages:
            return episode.stop("done")
        if episode.turns == self.configs[episode.environment].max_turns:
            return episode.stop("max_turns")
        suffixes = self._suffixes[episode.environment]
        messages, shown = self._shown(episode, messages)
        episode.heard = [{"role": "user"} | message for message in messages]
        conversation, said = episode.conversation, suffixes.style.said(reply, text)
        if episode.history is not None:
            said = episode.history.said(reply, text)
        episode.conversation = suffixes.answered(conversation, said, messages)
        if episode.history is not None:
            make_again = partial(episode.history.rewritten, episode.conversation, reply, messages)
            if (again := self._made(episode, make_again)) is not None:
                if self._has_room(episode, len(again.token_ids), episode.max_tokens):
                    episode.branch(again)
                return
        ended = episode.token_ids[-1] in self._ends
        given = self._made(episode, partial(suffixes.after_reply, conversation, reply, messages, shown, ended=ended))
        if given is not None and self._has_room(episode, len(given.token_ids), episode.left):
            episode.add_given(given, shown)

    def _shown(self, episode: Episode, messages: Sequence[Message]) -> tuple[list[Message], PromptImages | None]:
        """An environment's messages as the template takes them, and their images.

        The episode has failed where an image cannot be used.
        """
        plain, images = self._suffixes[episode.environment].without_special_tokens(messages), None
        plain = [{"role": "user"} | message if image_parts([message]) else message for message in plain]
        if pictures := image_parts(plain):
            try:
                images = self._images_of(episode, plain, pictures)
            except Exception as error:  # of a damaged image, Pillow may raise any error
                episode.fail(f"its answer {brief(error)}", "image")
        return only_placeholders(plain), images

    def _images_of(self, episode: Episode, messages: Sequence[Message], pictures: Sequence[Message]) -> PromptImages:
        if reason := self.why_no_images(episode.environment):
            raise ValueError(f"has an image, but {reason}")
        assert self.image_reader is not None
        if others := {message["role"] for message in messages if image_parts([message])} - {"user"}:
            raise ValueError(
                f"has an image in a message of the role {min(others)}: show it in a message of the role user"
            )
        if self.image_reader.config.image_token_id in compress(episode.token_ids, episode.is_sampled):
            raise ValueError(
                f"has an image, but the policy has written {self.image_reader.token}, behind which no image can stand"
            )
        if mistakes := [part["mistake"] for part in pictures if "mistake" in part]:
            raise ValueError(f"has an image that is none: {mistakes[0]}")
        return self._opened([part["image"] for part in pictures])

    def _made(self, episode: Episode, make: Callable[[], _Answered]) -> _Answered | None:
        """What a template makes; None, and the episode has failed, where it cannot."""
        if not episode.running:
            return None
        try:
            return make()
        except Exception as error:  # a template is code of the model's
            episode.fail(f"the chat template cannot be applied to its messages: {brief(error)}", "template")
            return None

    def _has_room(self, episode: Episode, num_tokens: int, left: int) -> bool:
        """Whether a reply may follow so many tokens; otherwise the episode has ended."""
        if num_tokens >= left:
            episode.stop("max_new_tokens")
        return episode.running

    def _end(self, episodes: Sequence[Episode]) -> None:
        """Ends the environments, and takes the rewards of whole episodes."""
        ended = self._timed(partial(self.pool.end, [episode.number for episode in episodes]))
        for episode in episodes:
            self._take_end(episode, ended.get(episode.number))
        if failed := [episode for episode in episodes if episode.failure is not None]:
            warnings.warn(
                f"{len(failed)} of {len(episodes)} episodes have no reward, because the environment "
                f"{self.pool.classes[failed[0].environment]} failed: {failed[0].failure}",
                stacklevel=2,
            )

    def _timed(self, call: Callable[[], _Answered]) -> _Answered:
        started = time.perf_counter()
        with SPANS.noted("environment"):
            answers = call()
        self.seconds.environment += time.perf_counter() - started
        return answers

    def _take_end(self, episode: Episode, answer: Mapping[str, Any] | Failed | None) -> None:
        episode.seconds = self.pool.seconds.pop(episode.number, [])
        if isinstance(answer, Failed):
            episode.fail(answer, answer.kind)
        elif answer is not None:
            episode.earn(answer["reward"])

    def _text(self, reply: Completion, style: Style) -> str:
        ids = reply.token_ids
        return text_of(self.tokenizer, ids[:-1] if ids and ids[-1] in self._ends else ids, style.form)


def environment_names(configs: Mapping[str, EnvironmentConfig], prompts: Prompts) -> list[str]:
    """The name of each row's environment, from the column ``environment``. The sole environment needs no column.

    Args:
        configs: the environments by name; the sole one of ``environment`` has the name "".
        prompts: the rows.

    Raises:
        ValueError: a row names none of the environments; rows are named.
    """
    if [*configs] == [""]:
        return [""] * len(prompts)
    names = prompts.columns.get(_COLUMN, [None] * len(prompts))
    if others := [i for i, name in enumerate(names) if not isinstance(name, str) or name not in configs]:
        raise ValueError(
            f"{name_rows(others)} have the {_COLUMN} {brief(repr(names[others[0]]))}, expected a name of environments: "
            f"{', '.join(configs)}"
        )
    return names


def _class_of(config: EnvironmentConfig, columns: Sequence[str]) -> EnvironmentClass:
    spec = config.name or config.tools
    return EnvironmentClass(spec, config.options, columns, config.timeout_s, config.max_result_characters)
