"""Ulysses helpers: what N processes compute, and its gradients, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rlft_fast.ops import next_token_targets, ulysses
from tests.support.machine.distributed import run_distributed

WORLD_SIZE = 2
# Nothing; fewer tokens than ranks; one rank with padding; none.
NUM_TOKENS = [0, 1, 7, 8]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def check_slices_heads_and_back(rank: int) -> None:
    for num_tokens in NUM_TOKENS:
        for x_T in (numbers(num_tokens, 3), torch.arange(num_tokens), torch.ones(num_tokens, dtype=torch.bool)):
            rows = -(-num_tokens // WORLD_SIZE)
            padded = torch.cat([x_T, x_T.new_full((rows * WORLD_SIZE - num_tokens, *x_T.shape[1:]), 7)])
            mine = ulysses.slice_tokens(x_T, group(), value=7)
            assert torch.equal(mine, padded[rank * rows : (rank + 1) * rows])
            assert torch.equal(ulysses.gather_tokens(mine, num_tokens, group()), x_T)
    for tokens in (0, 1, 3):
        x_THd = numbers(WORLD_SIZE * tokens, 6, 5)
        mine = x_THd[rank * tokens : (rank + 1) * tokens]
        some_heads = ulysses.gather_tokens_scatter_heads(mine, group())
        assert torch.equal(some_heads, x_THd[:, 3 * rank : 3 * (rank + 1)])
        assert torch.equal(ulysses.gather_heads_scatter_tokens(some_heads, group()), mine)


def check_targets(rank: int) -> None:
    """Targets are right where ranks meet."""
    input_ids_T = torch.arange(100, 109)
    # One sequence goes on from rank 0 to rank 1, then one ends with the last row of rank 0; rank 1 has a padded row.
    for boundaries, first in (([0, 2, 9], [101, -100, 103, 104, 105]), ([0, 5, 9], [101, 102, 103, 104, -100])):
        target_T = next_token_targets(input_ids_T, torch.tensor(boundaries, dtype=torch.int32))
        mine = ulysses.slice_tokens(target_T, group(), value=-100)
        assert mine.tolist() == (first, [106, 107, 108, -100, -100])[rank]


# ---- a layer of attention ------------------------------------------------------------------------------------------


def causal_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """(T, H, d), each sequence on its own."""
    parts = zip(*(x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)), strict=True)
    outputs = [functional.scaled_dot_product_attention(*part, is_causal=True) for part in parts]
    return torch.cat(outputs, 1).transpose(0, 1)


def logprobs(x_S: Tensor, weights: list[Tensor], lengths: list[int], ranks: dist.ProcessGroup | None) -> Tensor:
    """(S,) from (S, D): one attention layer and a scalar head, on this rank's rows."""
    qkv_weight, head_weight = weights
    heads = (x_S @ qkv_weight).view(len(x_S), 3, 4, 2).unbind(1)
    q, k, v = (ulysses.gather_tokens_scatter_heads(x, ranks) for x in heads)
    attended = ulysses.gather_heads_scatter_tokens(causal_attention(q, k, v, lengths), ranks)
    return (attended.flatten(1) @ head_weight).tanh()


def make_problem() -> tuple[Tensor, list[Tensor]]:
    """(T, D) embeddings of sequences of 4 and 5 tokens, and the weights of the layer."""
    return numbers(9, 6).requires_grad_(), [
        numbers(6, 24, seed=1).requires_grad_(),
        numbers(8, seed=2).requires_grad_(),
    ]


def sequence_loss(logprob_T: Tensor) -> Tensor:
    """Not a sum over tokens, as in GSPO: needs all of a sequence's log-probabilities."""
    return sum(part.mean().exp() for part in logprob_T.split([4, 5]))


def check_gradients(rank: int) -> None:
    """Gradients summed over ranks are those of one process."""
    x_T, weights = make_problem()
    expected_T = logprobs(x_T, weights, [4, 5], None)
    token_weight_T = numbers(9, seed=3)
    one_process = {
        "own rows": torch.autograd.grad((expected_T * token_weight_T).sum(), [x_T, *weights], retain_graph=True),
        "same loss": torch.autograd.grad(sequence_loss(expected_T), [x_T, *weights]),
    }

    # The padded row is a sequence of its own.
    mine = logprobs(ulysses.slice_tokens(x_T, group()), weights, [4, 5, 1], group())
    gathered_T = ulysses.gather_tokens(mine, 9, group())
    torch.testing.assert_close(gathered_T, expected_T)
    losses = {
        "own rows": (mine * ulysses.slice_tokens(token_weight_T, group())).sum(),
        "same loss": sequence_loss(gathered_T) / WORLD_SIZE,
    }
    for name, loss in losses.items():
        for got, expected in zip(
            torch.autograd.grad(loss, [x_T, *weights], retain_graph=True), one_process[name], strict=True
        ):
            dist.all_reduce(got)
            torch.testing.assert_close(got, expected, msg=lambda text, name=name: f"{name}: {text}")


def check_adjoints(rank: int) -> None:
    """<f(x), y> summed over ranks equals <x, f'(y)>, and the same once more for the backward of the backward."""
    pairs = {
        "gather_tokens": (lambda x: ulysses.gather_tokens(x, 7, group()), (4, 6)),
        "gather_tokens_scatter_heads": (lambda x: ulysses.gather_tokens_scatter_heads(x, group()), (4, 6)),
        "gather_heads_scatter_tokens": (lambda x: ulysses.gather_heads_scatter_tokens(x, group()), (4, 6)),
    }
    for function, shape in pairs.values():
        x = numbers(*shape, seed=rank).requires_grad_()
        out = function(x)
        y = numbers(*out.shape, seed=10 + rank).requires_grad_()
        (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
        z = numbers(*shape, seed=20 + rank)
        (grad_of_grad,) = torch.autograd.grad(grad, y, z)
        products = torch.stack([(out * y).sum(), (x * grad).sum(), (grad_of_grad * y).sum(), (z * grad).sum()]).detach()
        dist.all_reduce(products)
        torch.testing.assert_close(products[0], products[1])
        torch.testing.assert_close(products[2], products[3])


def check_compiled(rank: int) -> None:
    x_T, weights = make_problem()

    def loss(x_T: Tensor) -> Tensor:
        mine = logprobs(ulysses.slice_tokens(x_T, group()), weights, [4, 5, 1], group())
        return sequence_loss(ulysses.gather_tokens(mine, 9, group()))

    values = [function(x_T) for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss)]
    torch.testing.assert_close(*values)
    torch.testing.assert_close(*(torch.autograd.grad(value, x_T)[0] for value in values))


@pytest.mark.dist
@pytest.mark.slow
def test_compiles():
    run_distributed(check_compiled, WORLD_SIZE)


def check_bad_input(rank: int) -> None:
    x = torch.ones(4, 3, 2)
    with pytest.raises(ValueError, match="3 heads, expected a multiple of the group's 2 ranks"):
        ulysses.gather_tokens_scatter_heads(x, group())
    with pytest.raises(ValueError, match="3 rows, expected a multiple of the group's 2 ranks"):
        ulysses.gather_heads_scatter_tokens(x[:3], group())
    with pytest.raises(ValueError, match=r"expected ceil\(9 / 2\) = 5 rows"):
        ulysses.gather_tokens(x, 9, group())
    only_first = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="not in the group"):
            ulysses.slice_tokens(x, only_first)
    else:
        assert ulysses.slice_tokens(x, only_first) is x


CHECKS = [check_slices_heads_and_back, check_targets, check_gradients, check_adjoints, check_bad_input]


def run_checks(rank: int) -> None:
    for check in CHECKS:
        check(rank)


@pytest.mark.dist
def test_two_processes():
    run_distributed(run_checks, WORLD_SIZE)  # all at once: starting the processes takes most of the time


def test_bad_input_is_named_without_a_group_too():
    with pytest.raises(ValueError, match="x_T is a scalar"):
        ulysses.slice_tokens(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"expected \(tokens, heads, \.\.\.\)"):
        ulysses.gather_heads_scatter_tokens(torch.ones(4))


def test_without_a_group_everything_is_the_identity():
    x = numbers(3, 2, 4)
    assert ulysses.slice_tokens(x) is x
    assert ulysses.gather_tokens(x, 3) is x
    assert ulysses.gather_tokens_scatter_heads(x) is x
    assert ulysses.gather_heads_scatter_tokens(x) is x
