"""The ops in an environment that has the wheel and torch alone: `python ops_alone.py`, from any folder."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

import rlft_fast
from rlft_fast.errors import TRAIN_MODULES
from rlft_fast.ops import FusedAdamW, clip_grad_norm_, linear_logprob, pad, unpad


def logprob(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> Tensor:
    return linear_logprob(hidden_TD, weight_VD, target_T).logprob


def plain(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor) -> Tensor:
    return (hidden_TD @ weight_VD.T).log_softmax(-1).gather(-1, target_T[:, None])[:, 0]


def main() -> None:
    assert Path(__file__).parents[2] not in Path(rlft_fast.__file__).parents, "this is the source, not the wheel"
    brought = [name for name in TRAIN_MODULES if name != "numpy" and find_spec(name)]  # numpy: by some builds of torch
    assert brought == []

    torch.manual_seed(0)
    hidden_TD, weight_VD = torch.randn(7, 16, requires_grad=True), torch.randn(101, 16, requires_grad=True)
    target_T = torch.randint(101, (7,))
    results = []
    for function in (plain, logprob, torch.compile(logprob, fullgraph=True)):
        logprob_T = function(hidden_TD, weight_VD, target_T)
        results.append((logprob_T, *torch.autograd.grad(-logprob_T.sum(), (hidden_TD, weight_VD))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])

    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert torch.equal(unpad(pad(target_T, cu_seqlens, max_seqlen=4), cu_seqlens), target_T)

    weight_VD.grad = results[1][-1]
    norm = weight_VD.grad.norm()
    torch.testing.assert_close(clip_grad_norm_([weight_VD], max_norm=0.5), norm)
    torch.testing.assert_close(weight_VD.grad.norm(), torch.tensor(0.5))
    expected_VD = weight_VD.detach() - 0.1 * weight_VD.grad / (weight_VD.grad.abs() + 1e-8)  # AdamW's first step
    FusedAdamW([weight_VD], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(weight_VD.detach(), expected_VD)
    print("the ops work")


if __name__ == "__main__":
    main()
