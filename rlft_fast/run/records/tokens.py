"""Numbers of every token of a step: one safetensors file per step in the folder ``tokens`` of a run.

A file has these columns, of B samples with T tokens in all, one sample behind the other:

- sample_B: (B,) int32, number of the sample among the lines of its step in ``samples.jsonl``, from 0.
- length_B: (B,) int32, tokens of the completion.
- token_id_T: (T,) int32.
- weight_version_T: (T,) int32, version of the weights that sampled the token.
- mask_T: (T,) bool, whether the token was in the batch of the update.
- rollout_logprob_T: (T,) float32, log-probability as the generator reported it.
- logprob_T: (T,) float32, log-probability under the trained policy before the update. Where only the update computes
  it, tokens without an advantage may have none.
- entropy_T: (T,) float32, entropy of the trained policy's distribution before the update, likewise.
- advantage_T: (T,) float32, factors of corrections included.

Unknown numbers are NaN. A column without a known number is left out.

Reading a file takes no torch, which takes seconds to import.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from rlft_fast.files import replacing
from rlft_fast.run.records.step_files import TOKENS, step_file

if TYPE_CHECKING:
    from torch import Tensor

    from rlft_fast.data import Batch, Samples

_DTYPES = {
    "sample_B": np.int32, "length_B": np.int32, "token_id_T": np.int32, "weight_version_T": np.int32,
    "mask_T": np.bool_, "rollout_logprob_T": np.float32, "logprob_T": np.float32, "entropy_T": np.float32,
    "advantage_T": np.float32,
}  # fmt: skip
_MAY_BE_MISSING = ("logprob_T", "entropy_T", "advantage_T")


def token_columns(samples: "Samples", taught: "Samples", batch: "Batch", max_bytes: int) -> "dict[str, Tensor]":
    """The columns of the first samples of a step, of as many samples as fit.

    Args:
        samples: all samples of the step, in the order of their lines.
        taught: the samples in the batch, in its order.
        batch: what the update learned from. ``logprob_T`` and ``entropy_T`` are of the policy before the update.
        max_bytes: most bytes of all columns.
    """
    import torch

    token_bytes = sum(np.dtype(dtype).itemsize for name, dtype in _DTYPES.items() if name.endswith("_T"))
    end_B = samples.length_B.cumsum(0)
    num_kept = int((end_B * token_bytes + 8 * torch.arange(1, len(samples) + 1) <= max_bytes).sum())
    num_tokens = int(end_B[num_kept - 1]) if num_kept else 0
    is_sampled_T = samples.is_sampled_T[:num_tokens]
    columns = {
        "sample_B": torch.arange(num_kept, dtype=torch.int32),
        "length_B": samples.length_B[:num_kept].int(),
        "token_id_T": samples.token_ids_T[:num_tokens].clone(),
        "weight_version_T": samples.weight_version_T[:num_tokens].clone(),
        "mask_T": torch.zeros(num_tokens, dtype=torch.bool),
        "rollout_logprob_T": samples.logprob_T[:num_tokens].where(is_sampled_T, math.nan),
    }
    found = {"logprob_T": batch.logprob_T, "entropy_T": batch.entropy_T, "advantage_T": batch.advantage_T}
    known = {name: column for name, column in found.items() if column is not None}
    columns |= {name: torch.full((num_tokens,), math.nan) for name in known}
    place = {key: i for i, key in enumerate(zip(samples.row_B.tolist(), samples.number_B.tolist(), strict=True))}
    ends, batch_ends = end_B.tolist(), batch.cu_seqlens[1:].tolist()
    every, is_new_U, length_N, sample_N = taught.branches()
    index_U = torch.arange(len(taught.token_ids_T))[every]
    keys = [*zip(taught.row_B.tolist(), taught.number_B.tolist(), strict=True)]
    begin_B = taught.length_B.cumsum(0) - taught.length_B
    branches = zip(index_U.split(length_N.tolist()), is_new_U.split(length_N.tolist()), sample_N.tolist(), strict=True)
    for b, (index, is_new, sample) in enumerate(branches):
        if (i := place[keys[sample]]) < num_kept:
            own = index[is_new] - begin_B[sample] + ends[i] - taught.length_B[sample]
            predicting = (batch_ends[b] - 1 - len(index) + torch.arange(len(index)))[is_new]  # the positions before
            columns["mask_T"][own] = batch.loss_mask_T[predicting]
            for name, column in known.items():
                columns[name][own] = column[predicting].where(batch.loss_mask_T[predicting], math.nan)
    return columns


def write_tokens(run: Path, step: int, columns: "Mapping[str, Tensor]", num_samples: int) -> None:
    """Writes the file of a step.

    Args:
        run: folder of the run.
        step: counts from 1.
        columns: from `token_columns`.
        num_samples: samples of the step, also those without columns.
    """
    from safetensors.torch import save

    path = step_file(run, TOKENS, step)
    path.parent.mkdir(exist_ok=True)
    metadata = {
        "step": str(step), "num_samples": str(num_samples), "num_left_out": str(num_samples - len(columns["sample_B"]))
    }  # fmt: skip
    with replacing(path) as file:
        file.write_bytes(save(dict(columns), metadata))


def read_tokens(run: Path, step: int) -> tuple[dict[str, np.ndarray], int] | None:
    """The columns of a step, and the number of samples of the step; None if the run has no file of the step.

    Raises:
        ValueError: the file is damaged.
    """
    path = step_file(run, TOKENS, step)
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            num_samples = int((file.metadata() or {})["num_samples"])
        _check(columns, num_samples)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"{path.relative_to(run)} is damaged: {error}") from error
    return columns, num_samples


def _check(columns: Mapping[str, np.ndarray], num_samples: int) -> None:
    if missing := [name for name in _DTYPES if name not in columns and name not in _MAY_BE_MISSING]:
        raise ValueError(f"it has no {', '.join(missing)}")
    if unknown := columns.keys() - _DTYPES:
        raise ValueError(f"it has unknown columns, such as {min(unknown)}")
    num_tokens = int(columns["length_B"].sum())
    for name, column in columns.items():
        expected = len(columns["sample_B"]) if name.endswith("_B") else num_tokens
        if column.dtype != _DTYPES[name] or column.shape != (expected,):
            raise ValueError(
                f"{name} has shape {column.shape} and dtype {column.dtype}, expected ({expected},) and "
                f"{np.dtype(_DTYPES[name])}"
            )
    numbers = columns["sample_B"]
    if (columns["length_B"] < 0).any() or (np.diff(numbers, prepend=-1) <= 0).any() or (numbers >= num_samples).any():
        raise ValueError("its samples contradict each other")
