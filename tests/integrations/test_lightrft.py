"""rlft_fast.integrations.lightrft in two processes, beside plain PyTorch on the whole batch."""

import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ConstantLR
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from rlft_fast.integrations import lightrft
from rlft_fast.integrations.lightrft import action_logprobs, enable
from rlft_fast.ops import FusedAdamW
from tests.support.machine.distributed import run_distributed

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightrft_fused.py"
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.3,
}  # fmt: skip
MAX_NORM = 0.5
TEMPERATURE = 0.7


def build(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def load_example() -> dict[str, Any]:
    """A new FSDPV2Strategy each time, since `enable` changes the class."""
    return runpy.run_path(str(EXAMPLE))


def plain_scores(model: PreTrainedModel, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor):
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = model(sequences, attention_mask=attention_mask, position_ids=positions).logits
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    actions = slice(-action_mask.shape[1] - 1, -1)
    logprob = log_p[:, :-1].gather(-1, sequences[:, 1:, None])[:, -action_mask.shape[1] :, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)[:, actions]
    return logprob * action_mask, entropy * action_mask


def loss_of(logprob: Tensor, entropy: Tensor) -> Tensor:
    return -(logprob + 0.1 * entropy).sum()


def check_step(rank: int, fused_linear_logprob: bool) -> None:
    """Rank r trains on batch r, in two micro-batches; the mean over ranks is what FSDP2 reduces to."""
    example = load_example()
    strategy_class = example["FSDPV2Strategy"]
    enable(strategy_class, max_norm=MAX_NORM)
    strategy = strategy_class(accumulated_gradient=2, fused_linear_logprob=fused_linear_logprob)
    batches = [example["make_batch"](each) for each in range(2)]

    plain = build()
    scores = [plain_scores(plain, **batch) for batch in batches]
    (sum(loss_of(*each) for each in scores) / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), MAX_NORM)
    assert norm > 2 * MAX_NORM
    gradients = [parameter.grad.clone() for parameter in plain.parameters()]

    model = build()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    assert type(optimizer) is FusedAdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    scheduler, norms = ConstantLR(optimizer, factor=1.0), []
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.full_tensor() for p in model.parameters()))
    for rows in (slice(0, 2), slice(2, 4)):
        part = {name: value[rows] for name, value in batches[rank].items()}
        logprob, entropy = action_logprobs(model, **part, temperature=TEMPERATURE)
        torch.testing.assert_close(logprob, scores[rank][0][rows], rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy, scores[rank][1][rows], rtol=0, atol=1e-5)
        strategy.backward(loss_of(logprob, entropy), model, optimizer)
        norms.append(strategy.optimizer_step(optimizer, model, scheduler, name="actor"))
    assert norms[0] is None
    torch.testing.assert_close(norms[1], norm, rtol=1e-5, atol=0)
    assert strategy.cur_step == {"actor": 2}
    for gradient, clipped in zip(seen, gradients, strict=True):
        torch.testing.assert_close(gradient * (MAX_NORM / norm), clipped, rtol=1e-4, atol=1e-6)

    # The step is that of torch's AdamW with the gradients of before, all clipped by one norm.
    wanted = [nn.Parameter(each) for each in before]
    for parameter, gradient in zip(wanted, seen, strict=True):
        parameter.grad = gradient * (MAX_NORM / (norms[1] + 1e-6))
    wide, flat = ([p for p in wanted if (p.dim() > 1) == is_wide] for is_wide in (True, False))
    torch.optim.AdamW([{"params": wide}, {"params": flat, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.01).step()
    for parameter, expected in zip(model.parameters(), wanted, strict=True):
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.shape == (1, 2)
        torch.testing.assert_close(parameter.full_tensor(), expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.dist
@pytest.mark.parametrize("fused_linear_logprob", [False, True], ids=["head in a unit", "head in the root"])
def test_a_step_in_the_units_of_the_strategy(fused_linear_logprob):
    run_distributed(check_step, 2, fused_linear_logprob)


def check_infinite_gradients(rank: int) -> None:
    example = load_example()
    enable(example["FSDPV2Strategy"], max_norm=1.0)
    strategy, model = example["FSDPV2Strategy"](), build()
    strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(model, lr=1e-2)
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]
    logprob, _ = action_logprobs(model, **example["make_batch"](rank))
    strategy.backward(logprob.sum() * (float("inf") if rank == 0 else 1.0), model, optimizer)
    norm = strategy.optimizer_step(optimizer, model, ConstantLR(optimizer, factor=1.0))
    assert not norm.isfinite()
    for parameter, expected in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.full_tensor(), expected)


@pytest.mark.dist
def test_a_step_that_is_not_finite_is_skipped_on_all_ranks():
    run_distributed(check_infinite_gradients, 2)


def check_tied(rank: int) -> None:
    strategy_class = load_example()["FSDPV2Strategy"]
    enable(strategy_class, max_norm=1.0)
    with pytest.raises(ValueError, match="has split the weight that embedding and head of LlamaForCausalLM share"):
        strategy_class().prepare_model(build(tied=True))


@pytest.mark.dist
def test_units_that_split_a_tied_weight():
    run_distributed(check_tied, 1)


def check_example(rank: int) -> None:
    example = load_example()
    enable(example["FSDPV2Strategy"], max_norm=1.0)
    rewards = example["train"](example["FSDPV2Strategy"](), steps=10)
    assert rewards[-1] > rewards[0] + 0.1


@pytest.mark.dist
def test_the_example_learns():
    run_distributed(check_example, 2)


class Strategy:
    """Makes no units, so that one process suffices."""

    def prepare_model(self, model):
        return model

    def create_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def optimizer_step(self, optimizer, model, scheduler, name):
        raise AssertionError("replaced")


def enabled() -> Strategy:
    strategy_class = type("Strategy", (Strategy,), {})
    enable(strategy_class, max_norm=1.0)
    return strategy_class()


def test_critics_keep_their_forward():
    critic = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    assert type(enabled().prepare_model(critic)) is LlamaForSequenceClassification
    assert critic.config._attn_implementation == "sdpa"


def test_offloaded_parameters_step_where_they_are(monkeypatch):
    """The norm is on a GPU then, and the parameters are in CPU memory. Here they are on two other devices."""
    monkeypatch.setattr(lightrft, "grad_norm", lambda _: torch.tensor(2.0))
    strategy, model = enabled(), nn.Linear(2, 2, device="meta")
    strategy.cur_step, strategy.accumulated_gradient = Counter(), 1
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = FusedAdamW(model.parameters())
    norm = strategy.optimizer_step(optimizer, model, ConstantLR(optimizer, factor=1.0))
    assert norm == 2.0
    assert len(optimizer.state) == 2


def test_a_second_call_changes_max_norm_alone():
    strategy_class = type("Strategy", (Strategy,), {})
    enable(strategy_class, max_norm=1.0)
    prepare_model = strategy_class.prepare_model
    enable(strategy_class, max_norm=2.0)
    assert strategy_class.prepare_model is prepare_model


def test_other_optimizers_are_refused():
    with pytest.raises(ValueError, match=r"Strategy made a SGD, expected AdamW: turn .* mixed-precision optimizer off"):
        enabled().create_optimizer(build())


def test_models_that_cannot_be_packed_are_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    with pytest.raises(ValueError, match="MambaForCausalLM carries a recurrent state"):
        enabled().prepare_model(MambaForCausalLM(MambaConfig(vocab_size=64, **sizes)))


def build_llama4(*, chunked: bool, scaled: bool) -> Llama4ForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size_mlp": 24, "num_local_experts": 2}
    kinds = ["chunked_attention" if chunked else "full_attention", "full_attention"]
    config = Llama4TextConfig(
        **SIZES, **sizes, layer_types=kinds, attention_chunk_size=3, no_rope_layers=[1, 0],
        attn_temperature_tuning=scaled, floor_scale=2,
    )  # fmt: skip
    return Llama4ForCausalLM(config).eval()


@pytest.mark.parametrize(("chunked", "scaled"), [(True, False), (False, True)])
def test_models_that_need_more_than_boundaries_are_refused(chunked, scaled):
    model = build_llama4(chunked=chunked, scaled=scaled)
    with pytest.raises(
        ValueError, match="Llama4ForCausalLM attends within chunks or scales queries by positions, which"
    ):
        enabled().prepare_model(model)


def test_a_llama4_that_needs_the_boundaries_alone():
    batch = load_example()["make_batch"](0)
    model = build_llama4(chunked=False, scaled=False)
    expected = plain_scores(model, **batch)
    found = action_logprobs(enabled().prepare_model(model), **batch, temperature=TEMPERATURE)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"prepare_model": None}, "Strategy.prepare_model is missing, expected prepare_model(model, ...)"),
        ({"optimizer_step": lambda self, optimizer: None},
         "Strategy.optimizer_step takes (self, optimizer), expected optimizer_step(optimizer, model, scheduler, name"),
    ],
)  # fmt: skip
def test_other_strategies_are_refused(members, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        enable(type("Strategy", (Strategy,), members), max_norm=1.0)


def test_a_negative_max_norm_is_refused():
    with pytest.raises(ValueError, match="max_norm is -1"):
        enable(Strategy, max_norm=-1.0)


def test_what_action_logprobs_refuses():
    model, ids, mask = build(), torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM attends by sdpa, expected rlft_packed: call enable"):
        action_logprobs(model, ids, mask, mask[:, 3:])
    for shapes in ((mask[:1], mask[:, 3:]), (mask, mask), (mask, mask[:1, 3:]), (mask, mask[:, :0])):
        with pytest.raises(ValueError, match=r"expected \(B, L\), \(B, L\) and \(B, A\) with 0 < A < L"):
            action_logprobs(model, ids, *shapes)
