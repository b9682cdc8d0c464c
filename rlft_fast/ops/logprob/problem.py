"""One call of a log-prob op as one object, from the checks down to the kernels.

Shapes: T packed tokens, A active ones, R rows of one chunk, D hidden, V vocabulary, C columns of one tile, E trained
columns of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import torch
from torch import Tensor

from rlft_fast.ops import library as library  # registers torch.ops.rlft_fast
from rlft_fast.ops.logprob.statistics import Rows
from rlft_fast.ops.logprob.tiles import float_bias, multiply, operand, operand_dtype
from rlft_fast.ops.precision import rounds_in_kernel


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows of hidden states, the projection, and how its raw logits become the logits that the softmax sees.

    ``z = softcap * tanh(scale * (hidden @ weight.T + bias) / softcap) * inv_temperature``, without tanh where
    ``softcap`` is 0.

    The fields are the first arguments of an operator, tensors before numbers and names; their types are its `SCHEMA`.
    """

    hidden_TD: Tensor
    weight_VD: Tensor
    """The projection, or this rank's rows of it, in any dtype: it is rounded to ``dtype`` tile by tile.

    Beside an adapter it is (V, D - E), the other columns, or (V, D) once `joined` has copied both into one matrix.
    """
    target_T: Tensor
    """int64 rows of ``weight_VD``."""
    active_index: Tensor | None
    """(A,) the tokens that have a target, ascending. None until they are found, which is before any operator runs."""
    bias_V: Tensor | None
    inv_temperature: Tensor
    """float32 (T,), or (1,) for all tokens."""
    threshold_T: Tensor | None = None
    """Smallest logit that counts; None: every logit counts."""
    adapter_VE: Tensor | None = None
    """The last columns of the projection, which get a gradient; the others then get none."""
    softcap: float
    """0 for no soft-capping."""
    scale: float
    backend: str
    group: str = ""
    """Name of the process group whose ranks hold the other rows of the projection; "" where there are none."""
    workspace_mib: int | None
    dtype: torch.dtype
    """To which hidden states and weight are rounded before they are multiplied."""
    ignore_index: int
    """Target of tokens that are not active. Operators read ``active_index`` instead."""

    # ---- an operator's arguments --------------------------------------------------------------------------------

    @staticmethod
    def of(arguments: tuple[Any, ...]) -> Problem:
        """The problem that an operator was given as the first of its arguments."""
        return Problem(**dict(zip(ARGUMENTS, arguments, strict=False)))

    def flat(self) -> tuple[Any, ...]:
        """The problem as `SCHEMA` has it."""
        return (*self.tensors(), *self.scalars())

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in _TENSORS)

    def scalars(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _SCALARS)

    # ---- what is computed with ----------------------------------------------------------------------------------

    @property
    def vocab(self) -> int:
        return self.weight_VD.shape[0]

    @property
    def casts_weight(self) -> bool:
        """Whether the weight is rounded to another dtype, tile by tile, so that no copy of it exists."""
        return any(part.dtype != self.dtype for part in self.parts)

    @property
    def operand_dtype(self) -> torch.dtype:
        """Of the matrices that GEMMs multiply."""
        return operand_dtype(self.dtype, self.device_type)

    @property
    def gradient_dtype(self) -> torch.dtype:
        """To which dlogits may be rounded before they are multiplied: float32 where a gradient has float32's digits."""
        are_narrow = self.hidden_TD.dtype == self.trained.dtype == self.dtype
        return self.dtype if are_narrow else torch.promote_types(self.dtype, torch.float32)

    @property
    def is_plain(self) -> bool:
        """Whether the softmax sees the logits as they are, at most multiplied by a number."""
        return self.bias_V is None and self.softcap == 0 and self.threshold_T is None

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The matrices that hold the projection's columns: the weight and, where they are not joined, the adapter."""
        if self.adapter_VE is None or self.weight_VD.shape[1] == self.hidden_TD.shape[1]:
            return (self.weight_VD,)
        return self.weight_VD, self.adapter_VE

    @property
    def trained(self) -> Tensor:
        """The projection as the input that may need a gradient: (V, D), or (V, E) of an adapter."""
        return self.weight_VD if self.adapter_VE is None else self.adapter_VE

    def factor_of_trained(self, hidden_RD: Tensor) -> Tensor:
        """The columns of hidden states that multiply `trained`."""
        return hidden_RD if self.adapter_VE is None else hidden_RD[:, -self.adapter_VE.shape[1] :]

    @property
    def active(self) -> Tensor:
        """(A,) the tokens that have a target, once they are found."""
        assert self.active_index is not None
        return self.active_index

    @property
    def num_active(self) -> int:
        return self.active.shape[0]

    @property
    def device_type(self) -> str:
        return self.hidden_TD.device.type

    @property
    def kernels(self) -> Any:
        """The module of `logprob_stats_`, `logprob_grad_` and `logprob_frozen_`, which compute between the GEMMs.

        Triton's has GEMMs of plain logits as well: `fused_stats`, `fused_grad` and `fused_odds`.
        """
        if self.backend == "triton":
            from rlft_fast.ops.logprob import triton

            return triton
        return torch.ops.rlft_fast

    def rows(self, index: Tensor) -> Rows:
        """The tokens at these positions, in the dtype that GEMMs multiply in."""
        hidden, target = self.hidden_TD, self.target_T
        are_all = index.shape[0] == hidden.shape[0]
        if are_all and not index.is_cuda and torch.equal(index, torch.arange(index.shape[0], device="cpu")):
            return Rows(
                operand(hidden, self.dtype).contiguous(), target.contiguous(), self.inv_temperature, self.threshold_T
            )
        for_all = self.inv_temperature.shape[0] == 1
        return Rows(
            operand(hidden[index], self.dtype).contiguous(), target[index],
            self.inv_temperature if for_all else self.inv_temperature[index],
            None if self.threshold_T is None else self.threshold_T[index],
        )  # fmt: skip

    def joined(self) -> Problem:
        """The same problem with the whole projection in one matrix, in the dtype that is multiplied.

        For kernels that read a whole matrix, and for GPUs: they take few rows of logits at a time, and would copy the
        projection for each chunk of rows.
        """
        return self if len(self.parts) == 1 else replace(self, weight_VD=self._join(slice(None), self.dtype))

    def weight_rows(self, rows: slice | Tensor) -> Tensor:
        """Rows of the projection (C, D) with an adapter's columns, in a dtype that `multiply` takes."""
        if len(self.parts) == 1:
            rounded = self.weight_VD[rows].to(self.dtype)
            return rounded if rounds_in_kernel(self.device_type, self.dtype) else operand(rounded, self.dtype)
        return self._join(rows, self.operand_dtype)

    def _join(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of some rows of all parts beside each other."""
        parts = [part.detach()[rows].to(self.dtype) for part in self.parts]
        joined = self.weight_VD.new_empty(parts[0].shape[0], self.hidden_TD.shape[1], dtype=dtype)
        for columns, part in zip(joined.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
            columns.copy_(part)
        return joined

    def write_logits(self, hidden_RD: Tensor, weight_CD: Tensor, out: Tensor) -> None:
        """``out = hidden @ weight.T`` of rows that `rows` and `weight_rows` have rounded to ``dtype``."""
        multiply(hidden_RD, weight_CD.T, out, rounded_to=self.dtype)

    def tiles(self, columns: int) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Slices of the vocabulary with their weight rows and bias, in the dtype that GEMMs multiply in."""
        bias = float_bias(self.bias_V)
        for start in range(0, self.vocab, columns):
            tile = slice(start, min(start + columns, self.vocab))
            yield tile, self.weight_rows(tile), None if bias is None else bias[tile]


# ---- the schema of a problem as the first arguments of an operator --------------------------------------------------

_SCHEMA_TYPES = {
    Tensor: "Tensor", Tensor | None: "Tensor?", torch.dtype: "ScalarType", float: "float", int: "int",
    int | None: "int?", str: "str",
}  # fmt: skip
_FIELDS = {name: _SCHEMA_TYPES[kind] for name, kind in get_type_hints(Problem).items()}
_TENSORS = tuple(name for name, kind in _FIELDS.items() if kind.startswith("Tensor"))
_SCALARS = tuple(name for name in _FIELDS if name not in _TENSORS)
ARGUMENTS = (*_TENSORS, *_SCALARS)
SCHEMA = ", ".join(f"{_FIELDS[name]} {name}" for name in ARGUMENTS)
