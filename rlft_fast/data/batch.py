"""`Batch`: the one structure that travels between rollout, engine and trainer.

Sequences lie one behind the other in 1-D tensors, delimited by `cu_seqlens`. Every per-token field is aligned with
positions: index t speaks about the prediction made *at* position t, that is, about token t + 1 of the same sequence.
"""

import copy
import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rlft_fast.data.images import Images, image_table

IGNORE_INDEX = -100

_INTEGER_FIELDS = dict.fromkeys(
    ("input_ids_T", "position_ids_T", "group_B", "episode_B", "unit_B", "image_B"), torch.int64
)
_INT32_FIELDS = dict.fromkeys(("cu_seqlens", "support_TK", "teacher_ids_TK", "weight_version_T"), torch.int32)
_FIELD_DTYPES = _INTEGER_FIELDS | _INT32_FIELDS | {"loss_mask_T": torch.bool}
# Rewards may also be float64: float32 has no two numbers near 1e9 that differ by 1. All others are float32.
_REWARDS = ("reward_T", "reward_B", "baseline_B")
_ALIGNMENT, _HUGE = 64, 1 << 22  # bytes
_EXPERTS = "routed_experts_TK"  # uint8, or int16 where a layer has more than 256 experts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Packed sequences with what is known about each of their tokens.

    A batch is built on the CPU, planned and cut there (`select`), and only its micro-batches are moved to a device.
    Construction checks every shape and dtype; on the CPU it also checks the values of `cu_seqlens` and `loss_mask_T`
    (on a device that would wait for it).

    Args:
        input_ids_T: (T,) int64, tokens of all sequences.
        position_ids_T: (T,) int64, position of each token within its sequence.
        cu_seqlens: (B + 1,) int32, sequence b is `[cu_seqlens[b], cu_seqlens[b + 1])`; no sequence is empty.
        max_seqlen: length of the longest sequence, or an upper bound of it.
        loss_mask_T: (T,) bool, True where the *next* token was sampled by the policy; the last position of each
            sequence is always False.
        old_logprob_T: (T,) float32, log-probability of the next token under the policy that starts the update.
        ref_logprob_T: (T,) float32, the same under the reference model.
        teacher_logprob_T: (T,) float32, the same under the teacher.
        teacher_ids_TK: (T, K) int32, the next tokens that the teacher finds most likely.
        teacher_logprob_TK: (T, K) float32, log-probabilities of these ids under the teacher; -inf: there is no such id.
        rollout_logprob_T: (T,) float32, log-probability of the next token as the generator reported it.
        weight_version_T: (T,) int32, version of the weights that sampled the next token; 0 where none did.
        logprob_T: (T,) float32, log-probability of the next token under the current policy.
        entropy_T: (T,) float32, entropy of the next-token distribution.
        value_T: (T,) float32, the critic's value of the state before the next token is chosen.
        advantage_T: (T,) float32, advantage of the next token.
        return_T: (T,) float32, regression target of `value_T`.
        loss_weight_T: (T,) float32, weight of each token in a sum-loss. Tokens of weight 0 have no output, and do not
            run unless an output depends on them.
        reward_T: (T,) float64 or float32, reward of choosing the next token, penalties included; None where no method
            reads it. Of a batch without advantages: the parts of `reward_B` that single turns have earned, or None.
        sum_prob_squared_T: (T,) float32, sum of the squared probabilities of all next tokens.
        selected_T: (T,) float32, 1 at the tokens that a loss treats apart from the others, else 0.
        support_TK: (T, K) int32, the ids that the next token was sampled among, -1 fills up; None where it was sampled
            among all. Log-probabilities and entropies are over these ids.
        routed_experts_TK: (T, layers * K) uint8, or int16 where a layer has more than 256 experts: the experts that the
            policy's routers chose for each token, layer after layer. A training step uses these experts again.
        reward_B: (B,) float64 or float32, reward of each sequence.
        baseline_B: (B,) float64 or float32, reward of the greedy answer to each sequence's prompt.
        group_B: (B,) int64, sequences that answer the same prompt share a number.
        episode_B: (B,) int64, branches of one episode are neighbours and share a number; each has the reward of the
            episode, and the loss mask has each sampled token in one of them. None: each sequence is an episode.
        unit_B: (B,) int64, sequences that a loss couples (the two of a pair) share a number; a plan keeps them in one
            micro-batch.
        image_B: (B,) int64, number in `images` of each sequence's images, -1 where it has none; None: no sequence has.
        images: the images of the sequences. Sequences with the same images share a number.
        meta: anything about the batch as a whole; every batch holds its own deep copy.

    Raises:
        TypeError: a field is not a tensor or has the wrong dtype.
        ValueError: a field has the wrong shape or device, or `cu_seqlens` or `loss_mask_T` contradict the above.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    loss_mask_T: Tensor
    old_logprob_T: Tensor | None = None
    ref_logprob_T: Tensor | None = None
    teacher_logprob_T: Tensor | None = None
    teacher_ids_TK: Tensor | None = None
    teacher_logprob_TK: Tensor | None = None
    rollout_logprob_T: Tensor | None = None
    weight_version_T: Tensor | None = None
    logprob_T: Tensor | None = None
    entropy_T: Tensor | None = None
    value_T: Tensor | None = None
    advantage_T: Tensor | None = None
    return_T: Tensor | None = None
    loss_weight_T: Tensor | None = None
    reward_T: Tensor | None = None
    sum_prob_squared_T: Tensor | None = None
    selected_T: Tensor | None = None
    support_TK: Tensor | None = None
    routed_experts_TK: Tensor | None = None
    reward_B: Tensor | None = None
    baseline_B: Tensor | None = None
    group_B: Tensor | None = None
    episode_B: Tensor | None = None
    unit_B: Tensor | None = None
    image_B: Tensor | None = None
    images: tuple[Images, ...] = ()
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_tensor("cu_seqlens", self.cu_seqlens, None, self.cu_seqlens)
        if self.cu_seqlens.numel() == 0:
            raise ValueError("cu_seqlens is empty, expected B + 1 entries: a batch of no sequences has cu_seqlens [0]")
        _check_tensor("input_ids_T", self.input_ids_T, None, self.cu_seqlens)
        size_of = {"T": self.num_tokens, "B": self.num_sequences}
        for name, tensor in self._tensors().items():
            _check_tensor(name, tensor, size_of.get(row_letter(name)), self.cu_seqlens)
        if self.cu_seqlens.device.type == "cpu":
            self._check_boundaries()
        object.__setattr__(self, "meta", copy.deepcopy(self.meta))

    @classmethod
    def from_samples(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        completion_masks: Sequence[Sequence[bool]] | None = None,
        rollout_logprobs: Sequence[Sequence[float]] | None = None,
        supports: Sequence[Tensor | None] = (),
        rewards: Sequence[float] | None = None,
        groups: Sequence[int] | None = None,
        images: Sequence[Images | None] = (),
        meta: dict[str, Any] | None = None,
    ) -> Self:
        """Packs what a sampler returns; token-aligned input becomes position-aligned here, and nowhere else.

        Args:
            prompts: B lists of token ids, none empty (the first sampled token needs a position that predicts it).
            completions: B lists of token ids that follow the prompts; one may be empty.
            completion_masks: for each completion token whether the policy sampled it; None means that it sampled all.
                In a multi-turn sample the tokens of the environment are False.
            rollout_logprobs: for each completion token the log-probability that the sampler reported; what is given
                for tokens that were not sampled is replaced by 0.
            supports: for each completion (tokens, K) integers, the ids that each token was sampled among, -1 where
                there are fewer than K. K may differ; the batch is as wide as it needs to be. All None, or empty: they
                were sampled among all.
            rewards: B numbers.
            groups: B integers, equal for samples of the same prompt.
            images: of each sample's prompt, None where it has none; empty: no sample has.
            meta: anything about the batch as a whole.

        Returns:
            The batch, on the CPU.

        Raises:
            ValueError: lists of different lengths, or an empty prompt; the message names the sample.
            TypeError: a token id or a group is no integer.
        """
        given = [support for support in supports if support is not None] or None
        if given is not None and (len(given) != len(supports) or any(support.dim() != 2 for support in given)):
            raise ValueError("supports must be a (tokens, K) tensor for every sample, or None for every sample")
        _check_lengths(prompts, completions, completion_masks, rollout_logprobs, given)
        columns: dict[str, Tensor] = {}
        if rollout_logprobs is not None:
            columns["rollout_logprob_T"] = cat_lists(rollout_logprobs, np.float32)
        if given is not None:
            columns["support_TK"] = cat_supports(given)
        token_ids = cat_lists(completions, np.int64)
        is_sampled = torch.ones(len(token_ids), dtype=torch.bool)
        if completion_masks is not None:
            is_sampled = cat_lists(completion_masks, np.bool_)
        return cls.from_columns(
            cat_lists(prompts, np.int64), list_lengths(prompts), np.arange(len(prompts)), token_ids,
            list_lengths(completions), is_sampled, columns,
        ).replace(
            reward_B=None if rewards is None else torch.tensor(rewards, dtype=torch.float64),
            group_B=None if groups is None else cat_lists([groups], np.int64),
            meta=meta or {},
            **image_table(images),
        )  # fmt: skip

    @classmethod
    def from_columns(
        cls,
        prompt_ids: Tensor,
        prompt_lengths: np.ndarray,
        prompt_B: np.ndarray,
        token_ids: Tensor,
        lengths: np.ndarray,
        is_sampled: Tensor,
        columns: Mapping[str, Tensor],
    ) -> Self:
        """`from_samples` with arrays: prompts one behind the other, completions one behind the other.

        Args:
            prompt_ids: integers, tokens of N prompts.
            prompt_lengths: (N,) integers >= 1, tokens of each prompt.
            prompt_B: (B,) integers, number of the prompt that each completion follows.
            token_ids: integers, tokens of B completions.
            lengths: (B,) integers, tokens of each completion.
            is_sampled: bool, for each completion token whether the policy sampled it.
            columns: fields of the batch with one entry per completion token. They are 0 (ids of a support -1) at
                tokens that were not sampled.

        Returns:
            The batch, on the CPU.

        Raises:
            ValueError: a token was sampled that is not among the ids of its support.
        """
        own_prompt = prompt_lengths[prompt_B]
        bounds, starts = cumulative(own_prompt + lengths), cumulative(prompt_lengths)[:-1]
        num_tokens, ends = int(bounds[-1]), bounds[1:]
        input_ids_T = new_rows(num_tokens, torch.int64)
        put_pieces(input_ids_T, bounds[:-1], prompt_ids, starts[prompt_B], own_prompt)
        begins = cumulative(lengths)[:-1]
        put_pieces(input_ids_T, ends - lengths, token_ids, begins, lengths)
        predicts = ends - lengths - 1  # the last token of a prompt predicts the first of its completion
        loss_mask_T = new_rows(num_tokens, torch.bool).zero_()
        put_pieces(loss_mask_T, predicts, is_sampled, begins, lengths)
        if "support_TK" in columns:
            columns = {**columns, "support_TK": _needed_support(columns["support_TK"], token_ids, is_sampled)}
        fields: dict[str, Any] = {}
        for name, values in columns.items():
            empty = -1 if name == "support_TK" else 0
            fields[name] = new_rows(num_tokens, values.dtype, *values.shape[1:]).fill_(empty)
            if not is_sampled.all():
                values = values.where(is_sampled.view(-1, *[1] * (values.dim() - 1)), empty)
            put_pieces(fields[name], predicts, values, begins, lengths)
        max_seqlen = int((own_prompt + lengths).max(initial=0))
        position_ids_T = new_rows(num_tokens, torch.int64)
        from_start = np.zeros(len(bounds) - 1, np.int64)
        put_pieces(position_ids_T, bounds[:-1], torch.arange(max_seqlen), from_start, own_prompt + lengths)
        return cls(
            input_ids_T=input_ids_T,
            position_ids_T=position_ids_T,
            cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
            max_seqlen=max_seqlen,
            loss_mask_T=loss_mask_T,
            **fields,
        )

    @property
    def num_tokens(self) -> int:
        return self.input_ids_T.shape[0]

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @property
    def lengths(self) -> np.ndarray:
        """(B,) int64, tokens of each sequence. Needs a batch on the CPU."""
        self._require_cpu("lengths")
        return np.diff(self.cu_seqlens.numpy().astype(np.int64))

    @property
    def images_B(self) -> list[Images | None]:
        """The images of each sequence. Needs a batch on the CPU."""
        self._require_cpu("images_B")
        numbers = [-1] * self.num_sequences if self.image_B is None else self.image_B.tolist()
        return [None if number < 0 else self.images[number] for number in numbers]

    @property
    def target_T(self) -> Tensor:
        """(T,) int64, the next token where `loss_mask_T` is True, else -100."""
        # The last position of a sequence is masked, so the roll never brings in a token of another sequence.
        return self.input_ids_T.roll(-1).where(self.loss_mask_T, IGNORE_INDEX)

    @property
    def active_T(self) -> Tensor:
        """(T,) bool, the positions that need the head: `loss_mask_T` without the tokens whose weight is 0."""
        return self.loss_mask_T if self.loss_weight_T is None else self.loss_mask_T & (self.loss_weight_T != 0)

    @property
    def active_index_T(self) -> Tensor:
        """int64 indices of the positions where `active_T` is True. CPU only."""
        self._require_cpu("active_index_T")
        return self.active_T.nonzero().squeeze(1)

    def select(self, indices: Sequence[int] | np.ndarray | Tensor) -> Self:
        """Packs the named sequences, in that order, into a new batch.

        Args:
            indices: integers in [0, B), in any order; repeated or left out as wished, also empty.

        Returns:
            A batch with tensors and a `meta` of its own.

        Raises:
            TypeError: `indices` are not integers (a boolean mask, for example).
            ValueError: an index is outside [0, B), or the batch is on a device.
        """
        index_B = integer_array("indices", indices)
        if ((index_B < 0) | (index_B >= self.num_sequences)).any():
            raise ValueError(f"select got an index outside [0, {self.num_sequences}): {index_B.tolist()}")
        lengths, row_B = self.lengths[index_B], torch.from_numpy(index_B)
        starts = self.cu_seqlens.numpy()[index_B]
        fields: dict[str, Any] = {}
        selected: dict[int, Tensor] = {}  # a tensor that is two fields is copied once, and sent once to a worker
        for name, tensor in self._tensors().items():
            if name != "cu_seqlens":
                if id(tensor) not in selected:
                    is_of_tokens = row_letter(name) == "T"
                    pieces = cat_pieces(tensor, starts, lengths) if is_of_tokens else tensor.index_select(0, row_B)
                    selected[id(tensor)] = pieces
                fields[name] = selected[id(tensor)]
        fields["cu_seqlens"] = torch.from_numpy(cumulative(lengths).astype(np.int32))
        fields["max_seqlen"] = int(lengths.max(initial=0))
        return self.replace(**fields)

    def token_index(self, index_B: np.ndarray) -> Tensor:
        """int64 positions here of the tokens of these sequences, in the order in which `select` packs them."""
        return token_ranges(self.cu_seqlens.numpy()[index_B], self.lengths[index_B])

    def episodes(self) -> Self:
        """The batch with the branches of each episode as one sequence, for what looks at episodes as wholes.

        Its tokens are those of this batch, in the same places. No model can run it. Needs a batch on the CPU.
        """
        if self.episode_B is None:
            return self
        self._require_cpu("episodes")
        is_first_B = torch.ones(self.num_sequences, dtype=torch.bool)
        is_first_B[1:] = self.episode_B[1:] != self.episode_B[:-1]
        first = is_first_B.nonzero().flatten()
        fields: dict[str, Any] = {
            name: tensor[first] for name, tensor in self._tensors().items() if row_letter(name) == "B"
        }
        cu_seqlens = torch.cat([self.cu_seqlens[first], self.cu_seqlens[-1:]])
        longest = int(cu_seqlens.diff().max()) if len(first) else 0
        return self.replace(**fields | {"cu_seqlens": cu_seqlens, "max_seqlen": longest, "episode_B": None})

    def asking_at_the_end(self, padding_id: int | None = None) -> "Batch":
        """The same sequences with one position active in each: the last. For models that judge whole sequences.

        A position is active if the next token is of interest, so each sequence gets a dummy last token. The dummy never
        runs, because no other token depends on it.

        Args:
            padding_id: a token that is left out at the end of sequences, but for their first token; None: there is
                none.
        """
        starts, lengths = self.cu_seqlens.numpy()[:-1], self.lengths
        if padding_id is not None and len(lengths):
            end_T = np.where(self.input_ids_T.numpy() == padding_id, 0, np.arange(1, self.num_tokens + 1))
            lengths = (np.maximum.reduceat(end_T, starts) - starts).clip(1)
        ids = cat_pieces(self.input_ids_T, starts, lengths)
        last = ids[torch.from_numpy(cumulative(lengths)[1:] - 1)]
        each, one = np.arange(len(last)), np.ones(len(last), np.int64)
        is_sampled = torch.ones(len(last), dtype=torch.bool)
        asking = Batch.from_columns(ids, lengths, each, last, one, is_sampled, {})
        return asking.replace(images=self.images, image_B=self.image_B)

    def unweighted(self) -> Self:
        """The batch without weights: all tokens of `loss_mask_T` are active."""
        return self.replace(loss_weight_T=None)

    def replace(self, **fields: Any) -> Self:
        """A batch with the named fields exchanged, checked like any other."""
        return dataclasses.replace(self, **fields)

    def to(self, device: torch.device | str) -> Self:
        """Copies every tensor to `device`, without waiting for the copies."""
        device = torch.device(device)

        def move(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            pin = device.type == "cuda" and value.device.type == "cpu"  # only copies from pinned memory return at once
            return (value.pin_memory() if pin else value).to(device, non_blocking=pin)

        fields: dict[str, Any] = {name: move(tensor) for name, tensor in self._tensors().items()}

        def moved(own: Images | None) -> Images | None:
            if own is None:
                return None
            return Images(own.key, {name: move(tensor) for name, tensor in own.inputs.items()}, moved(own.before))

        fields["images"] = tuple(map(moved, self.images))
        return self.replace(**fields)

    def _tensors(self) -> dict[str, Tensor]:
        others = ("max_seqlen", "images", "meta")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in others}
        return {name: value for name, value in fields.items() if value is not None}

    def _require_cpu(self, what: str) -> None:
        if self.cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"{what} needs a batch on the CPU, this one is on {self.cu_seqlens.device} and would wait for it: "
                "take it before to(device)"
            )

    def _check_boundaries(self) -> None:
        cu_seqlens = self.cu_seqlens.numpy()
        lengths = np.diff(cu_seqlens)
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != self.num_tokens or (lengths < 1).any():
            raise ValueError(
                f"cu_seqlens must rise from 0 to the number of tokens ({self.num_tokens}) without an empty sequence, "
                f"got {cu_seqlens.tolist()}"
            )
        if lengths.max(initial=0) > self.max_seqlen:
            raise ValueError(f"max_seqlen is {self.max_seqlen}, but the longest sequence has {lengths.max()} tokens")
        if self.image_B is not None and not ((self.image_B >= -1) & (self.image_B < len(self.images))).all():
            raise ValueError(
                f"image_B has numbers outside [-1, {len(self.images)}), the numbers of the images and -1 for none: "
                f"{self.image_B.tolist()}"
            )
        if self.loss_mask_T[self.cu_seqlens[1:].long() - 1].any():
            raise ValueError(
                "loss_mask_T is True at the last position of a sequence, where no next token exists: "
                "position t speaks of token t + 1, so shift a token-aligned mask left by one"
            )


def _dtypes(name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a field may have."""
    if name in _REWARDS:
        return torch.float64, torch.float32
    return (torch.uint8, torch.int16) if name == _EXPERTS else (_FIELD_DTYPES.get(name, torch.float32),)


def row_letter(name: str) -> str:
    """T if a field has one row per token, B if it has one row per sequence."""
    return name.rpartition("_")[2][0]


def integer_array(name: str, values: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    """Copies a 1-D sequence of integers into an int64 array; refuses floats and booleans, which numpy would convert."""
    array = np.array(values.numpy() if isinstance(values, Tensor) else values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}: convert them first, a mask by .nonzero()[0]")
    return array.astype(np.int64, copy=False)


def _check_tensor(name: str, tensor: Tensor, size: int | None, beside: Tensor) -> None:
    dtype, *also = _dtypes(name)
    if not isinstance(tensor, Tensor) or tensor.dtype not in (dtype, *also):
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be a tensor of {dtype}, got {got}: convert it with .to({dtype})")
    dim = 2 if name.endswith("_TK") else 1
    if tensor.dim() != dim or (size is not None and tensor.shape[0] != size):
        shape = f"({'*' if size is None else size},{' K' * (dim - 1)})"
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != beside.device:
        raise ValueError(f"{name} is on {tensor.device}, cu_seqlens on {beside.device}: move the batch as a whole")


def _check_lengths(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *per_token: Sequence[Any] | None
) -> None:
    for values in (completions, *per_token):
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"got {len(prompts)} prompts but {len(values)} completions, masks, log-probs or supports")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty: begin it with at least one token, for example bos")
        for values in per_token:
            if values is not None and len(values[i]) != len(completions[i]):
                raise ValueError(
                    f"sample {i} has {len(completions[i])} completion tokens but {len(values[i])} values for them"
                )


def cumulative(lengths: np.ndarray) -> np.ndarray:
    """(B + 1,) boundaries of pieces of these lengths, from 0 on."""
    return np.concatenate([[0], lengths.cumsum()])


def token_ranges(starts: np.ndarray, lengths: np.ndarray) -> Tensor:
    """int64 ``starts[i], ..., starts[i] + lengths[i] - 1`` for each i, one range behind the other."""
    index = np.arange(lengths.sum())
    index += np.repeat(starts - cumulative(lengths)[:-1], lengths)
    return torch.from_numpy(index)


def new_rows(num_rows: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """(num_rows, *shape) on the CPU, with any contents, for columns that are large.

    NumPy asks the kernel for huge pages, and torch does not: the first touch of 64 MB takes 7 ms instead of 27. The
    alignment is torch's, because a kernel may add in another order where memory is aligned otherwise.
    """
    num_bytes = num_rows * math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE:
        return torch.empty(num_rows, *shape, dtype=dtype)
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(num_rows, *shape)


def cat_pieces(rows: Tensor, starts: np.ndarray, lengths: np.ndarray) -> Tensor:
    """``rows[starts[i] : starts[i] + lengths[i]]`` for each i, one piece behind the other. On the CPU.

    Pieces are copied faster than rows by their indices, which take eight bytes each.
    """
    array, joined = rows.numpy(), new_rows(int(lengths.sum()), rows.dtype, *rows.shape[1:])
    pieces = [array[a:b] for a, b in zip(starts.tolist(), (starts + lengths).tolist(), strict=True)]
    np.concatenate([array[:0], *pieces], out=joined.numpy())
    return joined


def put_pieces(
    target: Tensor, target_starts: np.ndarray, rows: Tensor, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """Writes ``rows[starts[i] : starts[i] + lengths[i]]`` to ``target[target_starts[i] :]`` for each i. On the CPU."""
    to, given = target.numpy(), rows.numpy()
    for at, start, length in zip(target_starts.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        to[at : at + length] = given[start : start + length]


def count_pieces(mask: Tensor, starts: np.ndarray, lengths: np.ndarray) -> Tensor:
    """int64, how many of ``mask[starts[i] : starts[i] + lengths[i]]`` are True, for each i. On the CPU."""
    array, bounds = mask.numpy(), zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    return torch.tensor([np.count_nonzero(array[a:b]) for a, b in bounds], dtype=torch.int64)


def cat_lists(values: Sequence[Sequence[Any]], dtype: type) -> Tensor:
    """The elements of all lists, one list behind the other.

    Raises:
        TypeError: the dtype is of integers, and an element is none. NumPy would cut its fraction off.
    """
    elements = chain.from_iterable(values)
    if np.issubdtype(dtype, np.integer):
        elements = map(operator.index, elements)
    try:
        return torch.from_numpy(np.fromiter(elements, dtype, sum(map(len, values))))
    except TypeError as error:
        raise TypeError(f"token ids and groups must be integers: {error}") from None


def list_lengths(values: Sequence[Sequence[Any]]) -> np.ndarray:
    """(B,) int64, length of each list."""
    return np.fromiter(map(len, values), np.int64, len(values))


def cat_supports(supports: Sequence[Tensor]) -> Tensor:
    """(tokens, K) int32, one support behind the other, all as wide as the widest."""
    width = max(support.shape[1] for support in supports)
    return torch.cat([pad(support, (0, width - support.shape[1]), value=-1) for support in supports]).int()


def _needed_support(ids_TK: Tensor, token_ids: Tensor, is_sampled: Tensor) -> Tensor:
    """The support without the columns that no sampled token needs."""
    outside = is_sampled & ~(ids_TK == token_ids.unsqueeze(1)).any(1)
    if outside.any():
        raise ValueError(
            f"token {token_ids[outside][0]} is not among the {ids_TK.shape[1]} ids that it was sampled among: give the "
            "sampler's own"
        )
    used_K = (ids_TK[is_sampled] >= 0).any(0)
    used_K[:1] = True
    return ids_TK[:, used_K].int()
