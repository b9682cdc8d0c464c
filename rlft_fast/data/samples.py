"""`Samples`: completions and their rewards, as columns that travel between processes without pickles."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlft_fast.data.batch import (
    Batch,
    cat_lists,
    cat_pieces,
    cat_supports,
    count_pieces,
    cumulative,
    list_lengths,
    row_letter,
)
from rlft_fast.world import World

_BY_NAME = ("parts", "counts")  # fields with columns by name
_LISTS = ("texts", "pictures", "messages")  # fields with a value of JSON for each sample


class Branches(NamedTuple):
    """N sequences with U tokens behind their prompts: the branches of samples, those of a sample one behind the other.

    Args:
        index_U: (U,) int64, for each token its place among the T tokens of the samples. Without branches it is a slice
            of all tokens, so that nothing is copied.
        is_new_U: (U,) bool, whether the branch before has not had the token.
        length_N: (N,) int64.
        sample_N: (N,) int64, number of the sample.
    """

    index_U: Tensor | slice
    is_new_U: Tensor
    length_N: Tensor
    sample_N: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """B sampled completions of T tokens in all, one behind the other. On the CPU.

    Args:
        row_B: (B,) int64, row of the prompt that a completion answers.
        number_B: (B,) int64, number of a completion among those of its row.
        length_B: (B,) int64, tokens of each completion.
        stopped_B: (B,) bool, True where an end was sampled, False where the limit of tokens cut the completion off.
        reward_B: (B,) float64; NaN where a completion has no reward.
        parts: the parts of the rewards by name, each (B,) float64, with NaN where a part is missing.
        counts: numbers of each sample by name, each (B,) float64, such as the turns of an episode.
        token_ids_T: (T,) int32.
        logprob_T: (T,) float32, log-probability of each token, as the generator reported it.
        is_sampled_T: (T,) bool, whether the policy sampled a token.
        weight_version_T: (T,) int32, version of the weights that sampled a token.
        reward_T: (T,) float64, what an environment gave for a turn, at the last token that the policy sampled in it,
            else 0; None: the samples are no episodes.
        kept_T: (T,) int32, at a token that begins a branch of its episode: how many tokens behind the prompt the branch
            has in common with the branch before it; at all other tokens -1. None: no episode has branches.
        support_TK: (T, K) int32, the ids that each token was sampled among, -1 fills up; None: the whole vocabulary.
        texts: of the B completions, as reward functions read them; None before they are decoded.
        pictures: what an environment has shown in each episode: for each answer with images these, as files in base64.
            None: no environment shows images.
        messages: of each episode, the environment's and the policy's in turn. None: the samples are no episodes, or
            have been scored.
    """

    row_B: Tensor
    number_B: Tensor
    length_B: Tensor
    stopped_B: Tensor
    reward_B: Tensor
    parts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    token_ids_T: Tensor
    logprob_T: Tensor
    is_sampled_T: Tensor
    weight_version_T: Tensor
    reward_T: Tensor | None = None
    kept_T: Tensor | None = None
    support_TK: Tensor | None = None
    texts: Sequence[str] | None = None
    pictures: Sequence[list[list[str]]] | None = None
    messages: Sequence[list[dict[str, Any]]] | None = None

    def __len__(self) -> int:
        return len(self.row_B)

    @property
    def has_reward_B(self) -> Tensor:
        """(B,) bool."""
        return ~self.reward_B.isnan()

    def replace(self, **fields: Any) -> Self:
        return dataclasses.replace(self, **fields)

    def token_ids(self) -> list[list[int]]:
        """The tokens of each completion as lists, of an episode with branches those of the last branch."""
        branches = self.branches()
        ids = self.token_ids_T[branches.index_U].split(branches.length_N.tolist())
        last = dict(zip(branches.sample_N.tolist(), ids, strict=True))
        return [last[i].tolist() for i in range(len(self))]

    def branches(self) -> Branches:
        """The sequences that the policy has read and written: one per sample, or one per branch of an episode."""
        if self.kept_T is None:
            is_new_T = torch.ones(len(self.token_ids_T), dtype=torch.bool)
            return Branches(slice(None), is_new_T, self.length_B, torch.arange(len(self)))
        end_B = self.length_B.cumsum(0)
        begins = (self.kept_T >= 0).nonzero().flatten()
        sample_N = torch.cat([torch.arange(len(self)), torch.bucketize(begins, end_B, right=True)])
        start_N = torch.cat([end_B - self.length_B, begins])
        kept_N = torch.cat([torch.zeros(len(self), dtype=torch.int64), self.kept_T[begins].long()])
        order = torch.from_numpy(np.lexsort((start_N, sample_N)))
        starts, kept = start_N[order].tolist(), kept_N[order].tolist()
        whole = [torch.empty(0, dtype=torch.int64)]
        for start, end, common in zip(starts, [*starts[1:], len(self.token_ids_T)], kept, strict=False):
            whole.append(torch.cat([whole[-1][:common], torch.arange(start, end)]))
        length_N = torch.tensor([*map(len, whole[1:])], dtype=torch.int64)
        first_N = length_N.cumsum(0) - length_N + torch.tensor(kept, dtype=torch.int64)  # that is new
        is_new_U = torch.arange(int(length_N.sum())) >= first_N.repeat_interleave(length_N)
        return Branches(torch.cat(whole), is_new_U, length_N, sample_N[order])

    def sampled_ids(self) -> list[list[int]]:
        """The tokens of each completion that the policy sampled, without an environment's."""
        masks = self.is_sampled_T.split(self.length_B.tolist())
        ids = self.token_ids_T.split(self.length_B.tolist())
        return [own[mask].tolist() for own, mask in zip(ids, masks, strict=True)]

    def replies(self) -> list[list[list[int]]]:
        """The tokens of each completion that the policy sampled, reply by reply: an environment speaks between two."""
        masks = self.is_sampled_T.split(self.length_B.tolist())
        ids = self.token_ids_T.split(self.length_B.tolist())
        bounds = (np.flatnonzero(np.diff(mask.numpy(), prepend=False, append=False)).reshape(-1, 2) for mask in masks)
        return [[own[start:end].tolist() for start, end in each] for own, each in zip(ids, bounds, strict=True)]

    @property
    def sampled_length_B(self) -> Tensor:
        """(B,) int64, tokens of each completion that the policy sampled."""
        lengths = self.length_B.numpy()
        return count_pieces(self.is_sampled_T, cumulative(lengths)[:-1], lengths)

    def select(self, indices: Tensor) -> Self:
        """The samples with these numbers, (N,) int64, in that order."""
        lengths = self.length_B.numpy()
        starts, own = cumulative(lengths)[indices.numpy()], lengths[indices.numpy()]
        fields: dict[str, Any] = {
            name: cat_pieces(tensor, starts, own) if row_letter(name) == "T" else tensor.index_select(0, indices)
            for name, tensor in self._tensors().items()
        }
        fields |= {name: [own[i] for i in indices.tolist()] for name, own in self._lists().items()}
        return self.replace(**fields, **self._each_by_name(lambda column: column[indices]))

    def of_rows(self, rows: Sequence[int]) -> Self:
        """The samples of these rows, in the order that they have here."""
        return self.select(torch.isin(self.row_B, torch.tensor(rows, dtype=torch.int64)).nonzero().squeeze(1))

    def gather(self, world: World) -> Self:
        """The samples of all ranks, by row and number, the same on every rank. All ranks must call it.

        They are in this order whatever rank made them, so the order does not depend on the number of ranks.
        """
        return (self if world.size == 1 else self._of_all_ranks(world)).in_order()

    def in_order(self) -> Self:
        """The samples by row and number."""
        order = np.lexsort((self.number_B.numpy(), self.row_B.numpy()))
        return self if (np.diff(order) == 1).all() else self.select(torch.from_numpy(order))

    def _of_all_ranks(self, world: World) -> Self:
        """The samples of all ranks, in the order of the ranks."""
        lengths = world.all_gather_ragged(self.length_B)
        sizes = {"B": [len(own) for own in lengths], "T": [int(own.sum()) for own in lengths]}

        def gathered(column: Tensor, letter: str) -> Tensor:
            return torch.cat(world.all_gather_ragged(column, sizes[letter]))

        fields: dict[str, Any] = {
            name: gathered(column, row_letter(name)) for name, column in self._as_wide(world)._tensors().items()
        }
        fields |= {name: [*chain(*world.all_gather_json(own))] for name, own in self._lists().items()}
        return self.replace(**fields, **self._each_by_name(lambda column: gathered(column, "B")))

    def _as_wide(self, world: World) -> Self:
        """With a support as wide as the widest of all ranks."""
        own = -1 if self.support_TK is None else self.support_TK.shape[1]
        width = int(world.all_reduce({"width_max": torch.tensor(float(own))})["width_max"])
        if width < 0:
            return self
        support = self.support_TK if self.support_TK is not None else torch.empty(0, 0, dtype=torch.int32)
        assert len(support) == len(self.token_ids_T), "samples of one rollout are sampled alike"
        return self.replace(support_TK=pad(support, (0, width - support.shape[1]), value=-1))

    def to_batch(self, prompts: Sequence[Sequence[int]]) -> Batch:
        """Packs prompts and completions; samples of one row form a group. A branch is a sequence.

        Args:
            prompts: token ids of the prompt of each row.
        """
        rows, prompt_B = self.row_B.unique(return_inverse=True)
        asked = [prompts[row] for row in rows.tolist()]
        index_U, is_new_U, length_N, sample_N = self.branches()
        columns = {"rollout_logprob_T": self.logprob_T, "weight_version_T": self.weight_version_T}
        given = {"reward_T": self.reward_T, "support_TK": self.support_TK}
        columns |= {name: column for name, column in given.items() if column is not None}
        return Batch.from_columns(
            cat_lists(asked, np.int64), list_lengths(asked), prompt_B[sample_N].numpy(), self.token_ids_T[index_U],
            length_N.numpy(), self.is_sampled_T[index_U] & is_new_U,
            {name: column[index_U] for name, column in columns.items()},
        ).replace(
            reward_B=self.reward_B[sample_N], group_B=self.row_B[sample_N],
            episode_B=None if self.kept_T is None else sample_N,
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Everything as tensors by name, for a checkpoint. `of_tensors` takes them."""
        named = {f"{name}.{key}": x_B for name in _BY_NAME for key, x_B in getattr(self, name).items()}
        contents = {name: bytearray(json.dumps([*own]).encode()) for name, own in self._lists().items()}
        lists = {name: torch.frombuffer(content, dtype=torch.uint8) for name, content in contents.items()}
        return self._tensors() | named | lists

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The samples whose `tensors` these are. Other names are left out."""
        fields: dict[str, Any] = {
            field.name: tensors[field.name] for field in dataclasses.fields(cls) if field.name in tensors
        }
        for name in _BY_NAME:
            keys = {key: key.removeprefix(f"{name}.") for key in tensors if key.startswith(f"{name}.")}
            fields[name] = {own: tensors[key] for key, own in keys.items()}
        fields |= {name: json.loads(tensors[name].numpy().tobytes()) for name in _LISTS if name in tensors}
        return cls(**fields)

    def _each_by_name(self, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The fields of columns by name, after a function of each column."""
        fields = {name: getattr(self, name) for name in _BY_NAME}
        return {name: {key: function(column) for key, column in own.items()} for name, own in fields.items()}

    def _lists(self) -> dict[str, Sequence[Any]]:
        return {name: own for name in _LISTS if (own := getattr(self, name)) is not None}

    def _tensors(self) -> dict[str, Tensor]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, Tensor)}


def cat_samples(parts: Sequence[Samples]) -> Samples:
    """One behind the other; all have the same parts of rewards, and all have texts or none has."""
    first = parts[0]
    fields: dict[str, Any] = {}
    for name in first._tensors():
        columns = [getattr(samples, name) for samples in parts]
        fields[name] = cat_supports(columns) if name == "support_TK" else torch.cat(columns)
    for name in _BY_NAME:
        every = [getattr(samples, name) for samples in parts]
        fields[name] = {key: torch.cat([own[key] for own in every]) for key in every[0]}
    fields |= {name: [*chain(*(samples._lists()[name] for samples in parts))] for name in first._lists()}
    return first.replace(**fields)
