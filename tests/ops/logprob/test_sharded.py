"""linear_logprob and its loss with a vocabulary that is sharded over processes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.ops.problems import make_inputs
from rlft_fast.ops import linear_logprob, linear_logprob_loss, support_logprob
from tests.ops.logprob.problems import loss_problem, ppo_clip, weighted_by
from tests.support.machine.distributed import run_distributed

SHARDS = {2: [1500, 1503], 3: [1, 2000, 1002]}  # uneven, one of a single token


def check_vocab_group(rank: int, world_size: int) -> None:
    bounds = [0, *torch.tensor(SHARDS[world_size]).cumsum(0).tolist()]
    own = slice(bounds[rank], bounds[rank + 1])
    hidden, weight, target, old, advantage = loss_problem(T=60, V=3003)
    target[:3] = torch.tensor([0, 1, 3002])  # the first and the last row of shards
    bias = torch.linspace(-1, 1, 3003)
    target[3:9] = (hidden[3:9] @ weight.T + bias).argmax(-1)

    def results(rows: slice, **group) -> list[Tensor]:
        h, w, b = (x.clone().requires_grad_() for x in (hidden, weight[rows], bias[rows]))
        options = {"bias_V": b, "softcap": 20.0, "temperature": 0.7, "return_entropy": True, "workspace_mib": 1} | group
        some = torch.full((60,), -torch.inf).index_fill_(0, torch.arange(20), 0.0)
        more = {"return_sum_prob_squared": True, "return_top1": True}
        mean_logits = linear_logprob(h, w, target, **options, **more, return_mean_logits=True).mean_logits
        out = linear_logprob(h, w, target, **options, **more, threshold_T=some)
        ((out.logprob * old).sum() + (out.entropy * advantage).sum()).backward()
        grads = [h.grad, w.grad, b.grad]
        h.grad, w.grad, b.grad = None, None, None
        fused = linear_logprob_loss(h, w, target, ppo_clip, old, advantage, **options)
        fused.loss.backward()
        return [*out[:4], mean_logits, *fused[:3], *grads, h.grad, w.grad, b.grad]

    whole = results(slice(None))
    sharded = results(own, vocab_group=dist.group.WORLD)
    for actual, expected in zip(sharded, whole, strict=True):
        expected = expected[own] if expected.dim() and expected.shape[0] == 3003 else expected
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
        assert actual.any()
    with pytest.raises(ValueError, match="outside the vocabulary of 3003"):
        linear_logprob(hidden, weight[own], target.fill_(3003), vocab_group=dist.group.WORLD)
    rows = 60 - rank
    with pytest.raises(ValueError, match="disagree"):
        linear_logprob(hidden[:rows], weight[own], target[:rows], vocab_group=dist.group.WORLD)
    with pytest.raises(ValueError, match="gather the weight"):
        linear_logprob(hidden, weight[own], target, vocab_group=dist.group.WORLD, backend="reference")


def check_uneven_shards(rank: int, sizes: list[int]) -> None:
    """Two MiB hold one row of the larger shard's logits and four of the smaller's: both reduce row by row."""
    bounds = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    own = slice(bounds[rank], bounds[rank + 1])
    hidden, weight, target, _ = make_inputs(8, 4, sum(sizes))
    advantage = torch.linspace(-1, 1, 8)

    def results(rows: slice, compiles: bool = False, **group) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        call = torch.compile(linear_logprob_loss, fullgraph=True, backend="aot_eager", disable=not compiles)
        fused = call(h, w, target, weighted_by, advantage, workspace_mib=2, active_index=torch.arange(8), **group)
        fused.loss.backward()
        out = linear_logprob(h, w, target, workspace_mib=1, **group).logprob
        x, adapter = hidden.clone().requires_grad_(), weight[rows][:, 2:].clone().requires_grad_()
        how = {"workspace_mib": 2, "active_index": torch.arange(8), "adapter_VE": adapter, **group}
        call(x, weight[rows][:, :2], target, weighted_by, advantage, **how).loss.backward()
        return [fused.loss.detach(), fused.logprob, out.detach(), h.grad, x.grad, w.grad, adapter.grad]

    *expected, dweight, dadapter = results(slice(None))
    for compiles in (False, True):
        actual = results(own, compiles, vocab_group=dist.group.WORLD)
        for ours, whole in zip(actual, [*expected, dweight[own], dadapter[own]], strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def check_logits_that_one_rank_alone_could_keep(rank: int) -> None:
    """One MiB holds 200 rows of 64 logits, and not of 3000: ranks that keep logits reduce all rows at once."""
    hidden, weight, target, _ = make_inputs(200, 4, 3064)
    own = (slice(64), slice(64, None))[rank]

    def results(rows: slice, **group) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        logprob = linear_logprob(h, w, target, workspace_mib=1, **group).logprob
        logprob.sum().backward()
        return [logprob.detach(), h.grad, w.grad]

    *expected, dweight = results(slice(None))
    for ours, whole in zip(results(own, vocab_group=dist.group.WORLD), [*expected, dweight[own]], strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-4, atol=1e-5)


def check_shards_that_all_ranks_refuse(rank: int) -> None:
    hidden, target = torch.randn(2, 1), torch.zeros(2, dtype=torch.int64)
    options = {"vocab_group": dist.group.WORLD, "workspace_mib": 1}
    for sizes, message in (([300_000, 5], "cannot hold one row of logits .300000"), ([10, 0], r"they hold \[10, 0\]")):
        with pytest.raises(ValueError, match=message):
            linear_logprob_loss(hidden, torch.randn(sizes[rank], 1), target, weighted_by, torch.ones(2), **options)
    with pytest.raises(ValueError, match=r"they hold \[10, 0\]"):
        linear_logprob(hidden, torch.randn([10, 0][rank], 1), target, **options)


@pytest.mark.dist
@pytest.mark.slow
def test_uneven_shards():
    run_distributed(check_uneven_shards, 2, [400_000, 120_000])
    run_distributed(check_logits_that_one_rank_alone_could_keep, 2)


@pytest.mark.dist
@pytest.mark.slow
def test_shards_that_all_ranks_refuse():
    run_distributed(check_shards_that_all_ranks_refuse, 2)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("world_size", SHARDS)
def test_sharded_vocabulary(world_size):
    run_distributed(check_vocab_group, world_size, world_size)


def check_targets_that_no_shard_can_give(rank: int) -> None:
    """A target of probability 0, also in a shard of such tokens alone; an unchecked target outside the vocabulary."""
    own = [slice(0, 4), slice(4, 10)][rank]
    hidden, weight, target, _ = make_inputs(6, 4, 10)
    target[:2] = torch.tensor([2, 7])
    for impossible in ([2], range(4, 10)):
        bias = torch.zeros(10).index_fill_(0, torch.tensor([*impossible]), -torch.inf)
        whole = linear_logprob(hidden, weight, target, bias_V=bias, return_entropy=True)
        assert whole.logprob.isneginf().any()
        sharded = linear_logprob(
            hidden, weight[own], target, bias_V=bias[own], return_entropy=True, vocab_group=dist.group.WORLD
        )
        torch.testing.assert_close(sharded[:2], whole[:2])
    compiled = torch.compile(linear_logprob, fullgraph=True, backend="eager")  # checks no values, like a GPU
    outside = target.clone().index_fill_(0, torch.tensor([3]), 10)
    ours = compiled(hidden, weight[own], outside, active_index=torch.arange(6), vocab_group=dist.group.WORLD).logprob
    expected = linear_logprob(hidden, weight, target).logprob.index_fill(0, torch.tensor([3]), torch.nan)
    torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.dist
@pytest.mark.slow
def test_targets_that_no_shard_can_give():
    run_distributed(check_targets_that_no_shard_can_give, 2)


def check_sharded_tensors(rank: int) -> None:
    """A DTensor argument is named before torch itself fails, and the advice of the error works."""
    mesh = init_device_mesh("cpu", (2,))
    hidden, weight, target = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
    dist.broadcast(hidden, 0), dist.broadcast(weight, 0)
    sharded = distribute_tensor(weight, mesh, [Shard(0)])
    calls = (
        partial(linear_logprob),
        partial(linear_logprob_loss, loss_fn=lambda logprob, _: logprob),
        partial(support_logprob, support_TK=torch.zeros(4, 1, dtype=torch.int64)),
        partial(support_logprob, threshold_T=torch.zeros(4)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"weight_VD is a DTensor.*Shard\(dim=0\).*LogprobHead.*vocab_group"):
            call(hidden_TD=hidden, weight_VD=sharded, target_T=target)
        with pytest.raises(ValueError, match=r"hidden_TD is a DTensor"):
            call(hidden_TD=distribute_tensor(hidden, mesh, [Replicate()]), weight_VD=weight, target_T=target)
    expected = linear_logprob(hidden, weight, target).logprob
    whole = linear_logprob(hidden, sharded.full_tensor(), target).logprob
    local = linear_logprob(hidden, sharded.to_local(), target, vocab_group=mesh.get_group()).logprob
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(local, expected)


@pytest.mark.dist
def test_sharded_tensors_are_named():
    run_distributed(check_sharded_tensors, 2)
