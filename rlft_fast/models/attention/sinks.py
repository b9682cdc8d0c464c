"""Attention with sinks (gpt-oss): the softmax of each head has one more term in its denominator, exp(sink).

With scores s_j = scale q·k_j, each key weighs exp(s_j - z), where z = log(exp(sink) + sum_j exp(s_j)). Without the
sink, z is the log-sum-exp of flash attention. So the kernels run as they are:

    forward:   out  = sigmoid(lse - sink) * flash(q, k, v).out
    backward:  (dq, dk, dv) = flash_backward(dout, q, k, v, out, z)
               dsink = -sum over rows of exp(sink - z) dout·out

The kernels' backward computes exp(s_j - lse) (dout·v_j - dout·out), and gets `z` for `lse` and the scaled output for
`out`. No (queries, keys) weights are kept. Source of sinks: https://arxiv.org/abs/2309.17453 and
https://arxiv.org/abs/2508.10925.
"""

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class FlashKernel(Protocol):
    """A flash attention of (1, heads, n, head_dim) queries that gives its log-sum-exp, (1, heads, n)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        ...


class OneSegment(NamedTuple):
    """The kernel of a CPU for one segment, in float32 or wider.

    Attributes:
        scale: factor on the scores.
        mask: (queries, keys), the keys that each query sees; None: causal, as many keys as queries.
    """

    scale: float
    mask: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return run(q, k, v, 0.0, self.mask is None, attn_mask=self._bias(q), scale=self.scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(
            dout, q, k, v, out, lse, 0.0, self.mask is None, attn_mask=self._bias(q), scale=self.scale
        )  # fmt: skip

    def _bias(self, q: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        return q.new_zeros(self.mask.shape).masked_fill(~self.mask, -math.inf)


class AllSegments(NamedTuple):
    """The variable-length kernel of a GPU for all segments, the kernel behind `varlen_attn`.

    Attributes:
        scale: factor on the scores.
        window: positions that a token sees, its own included; None: its own and all before it.
        boundaries: int32 boundaries of segments and of their keys, and the largest number of both.
    """

    scale: float
    window: int | None
    boundaries: tuple[Tensor, Tensor, int, int]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        run = torch.ops.aten._flash_attention_forward
        packed = (_packed(x) for x in (q, k, v))
        out, lse, *_ = run(*packed, *self.boundaries, 0.0, self.window is None, False, **self._options())
        return _unpacked(out), lse.unsqueeze(0)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        run = torch.ops.aten._flash_attention_backward
        packed = (_packed(x) for x in (dout, q, k, v, out))
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        dq, dk, dv = run(
            *packed, lse.squeeze(0), *self.boundaries, 0.0, self.window is None, *no_dropout, **self._options()
        )  # fmt: skip
        return _unpacked(dq), _unpacked(dk), _unpacked(dv)

    def _options(self) -> dict[str, Any]:
        left = -1 if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": left, "window_size_right": 0}


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor, kernel: FlashKernel) -> Tensor:
    """Flash attention whose softmax has one more term for each head.

    Args:
        q: (1, heads, n, head_dim).
        k: (1, kv_heads, m, head_dim).
        v: (1, kv_heads, m, head_dim).
        sinks_H: (heads,), a score in the softmax that has no value.
        kernel: computes the rest.

    Returns:
        (1, heads, n, head_dim).
    """
    return _Sinks.apply(kernel, q, k, v, sinks_H)


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel: FlashKernel, q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor) -> Tensor:
        out, lse = kernel.forward(q, k, v)
        with_sink = torch.logaddexp(lse, sinks_H.to(lse)[:, None])
        out = (out * (lse - sinks_H.to(lse)[:, None]).sigmoid().unsqueeze(-1)).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks_H, out, with_sink)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyrefly: ignore[bad-override]
        (dout,) = grad_outputs
        q, k, v, sinks_H, out, with_sink = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.backward(dout, q, k, v, out, with_sink)
        weight = (sinks_H.to(with_sink)[:, None] - with_sink).exp()
        dsinks = -(weight * (dout.to(weight.dtype) * out).sum(-1)).sum((0, 2))
        return None, dq, dk, dv, dsinks.to(sinks_H.dtype)


def _packed(x: Tensor) -> Tensor:
    """(1, heads, n, d) -> (n, heads, d)."""
    return x.squeeze(0).transpose(0, 1)


def _unpacked(x: Tensor) -> Tensor:
    """(n, heads, d) -> (1, heads, n, d)."""
    return x.transpose(0, 1).unsqueeze(0)
