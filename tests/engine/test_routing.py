"""Routers of experts: their auxiliary loss is transformers' own, and a replay is the recorded pass."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2Model

from rlft_fast.config import EngineConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.sharding.build import build_model
from rlft_fast.models import Routers, Routing
from tests.engine import reference
from tests.engine.reference import make_engine, near_policy, plain_model, policy_loss, random_batch, random_image_batch
from tests.support.machine.distributed import run_distributed
from tests.support.tiny_models import save_tiny_model

COEF = 0.5
# Packed; more than 256 experts and a dense layer; scores that are no probabilities; numbers first; padded; a tower.
FAMILIES = ["mixtral", "qwen3-moe", "gpt-oss", "granite-moe", "qwen3.5-moe", "qwen3-vl-moe"]


def balanced(path: Path, **options) -> FSDPEngine:
    return make_engine(path, config={"router_aux_loss_coef": COEF}, **options)


def tokens_that_run(batch: Batch) -> Tensor:
    """(B, L) the tokens of each sequence up to the last position of its loss mask."""
    mask, _ = reference.pad_right(batch.replace(input_ids_T=batch.loss_mask_T.long()))
    return mask.flip(1).cummax(1).values.flip(1)


@cache
def expected(path: Path) -> tuple[float, dict[str, Tensor]]:
    """transformers' auxiliary loss of the padded batch in float64, and its gradients times `COEF`."""
    model, batch = reference.plain_model(path), random_batch()
    ids, _ = reference.pad_right(batch)
    loss = model(input_ids=ids, attention_mask=tokens_that_run(batch), output_router_logits=True).aux_loss
    (COEF * loss).backward()
    return loss.item(), {f"model.{name}": x.grad for name, x in model.named_parameters() if x.grad is not None}


def step(engine: FSDPEngine, batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    metrics = engine.train_step(batch, policy_loss())
    return metrics, reference.gradients(engine)


# One micro-batch, and several. With sequences alone, prompts that are shared in one micro-batch run several times.
@pytest.mark.thin(3)
@pytest.mark.parametrize("max_tokens", [128, 24])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_auxiliary_loss_is_that_of_transformers(name, max_tokens, tiny_model):
    path, batch = tiny_model(name), random_batch()
    _, plain = step(make_engine(path, max_tokens=max_tokens), batch)
    metrics, with_loss = step(balanced(path, max_tokens=max_tokens), batch)
    value, wanted = expected(path)
    assert metrics["router_aux_loss"] == pytest.approx(value, rel=1e-6)
    assert max(x.abs().max() for x in wanted.values()) > 1e-2
    assert wanted.keys() < plain.keys()
    for name, gradient in plain.items():
        found = (with_loss[name] - gradient).double()
        torch.testing.assert_close(found, wanted.get(name, torch.zeros_like(found)), rtol=0, atol=2e-6)


def check_two(rank: int, path: Path, sequence_parallel: int, replays: bool) -> None:
    config = {"router_aux_loss_coef": COEF, "sequence_parallel": sequence_parallel}
    engine, batch = make_engine(path, config=config, max_tokens=24), random_batch()
    one = torch.load(path / "one.pt")
    experts_TK = engine.infer(batch, ("routed_experts",))["routed_experts"]
    assert torch.equal(experts_TK, one["experts"])
    metrics, found = step(engine, batch.replace(routed_experts_TK=experts_TK if replays else None))
    value, _ = expected(path)
    assert metrics["router_aux_loss"] == pytest.approx(value, rel=1e-6)
    assert metrics.get("routing_agreement", 1.0) == 1.0
    reference.assert_close(found, one["gradients"], 2e-6)


# Each rank has its own micro-batches, and counts in a pass before; both have a part of each, and replay.
@pytest.mark.dist
@pytest.mark.parametrize(("sequence_parallel", "replays"), [pytest.param(1, False, marks=pytest.mark.slow), (2, True)])
def test_two_processes(sequence_parallel, replays, tmp_path):
    path, batch = save_tiny_model("mixtral", tmp_path / "mixtral"), random_batch()
    engine = balanced(path, max_tokens=128)
    experts_TK = engine.infer(batch, ("routed_experts",))["routed_experts"]
    torch.save({"experts": experts_TK, "gradients": step(engine, batch)[1]}, path / "one.pt")
    run_distributed(check_two, 2, path, sequence_parallel, replays)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", "LlamaModel has no routers of experts that are known: leave router_aux_loss_coef"),
        ("deepseek-v3", "transformers has no auxiliary loss for the routers of DeepseekV3Model"),
        ("llama4", r"the routers of Llama4TextModel \(Llama4\w+\) do not choose by one topk"),
    ],
)
def test_models_without_an_auxiliary_loss(name, message, tiny_model):
    with pytest.raises(ValueError, match=message):
        build_model(str(tiny_model(name)), EngineConfig(router_aux_loss_coef=COEF), "logprob", trains=True)


# ---- replay ---------------------------------------------------------------------------------------------------------


def _weights_of(name: str, module, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights of chosen experts, by each family's equation."""
    if name in ("gpt-oss", "granite-moe"):
        return logits.gather(-1, chosen).softmax(-1)
    if name == "deepseek-v3":
        scores = logits.sigmoid().gather(-1, chosen)
        return module.routed_scaling_factor * scores / scores.sum(-1, keepdim=True)
    scores = logits.softmax(-1).gather(-1, chosen)
    return scores / scores.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else scores


def forced_model(name: str, path: Path, batch: Batch) -> torch.nn.Module:
    """The plain model in float64, whose routers are given the experts of one sequence of the batch after the other."""
    model = plain_model(path)
    routers = [x for x in model.modules() if type(x).__name__.lower().endswith("topkrouter")]
    lengths = batch.lengths.tolist()
    for layer, router in enumerate(routers):
        own = batch.routed_experts_TK.long().chunk(len(routers), -1)[layer].split(lengths)
        sequence = iter(own)

        def force(module, args, output, sequence=sequence):
            chosen, logits = next(sequence), output[-1 if name == "granite-moe" else 0]
            forced = logits, _weights_of(name, module, logits, chosen), chosen
            return forced[::-1] if name == "granite-moe" else forced

        router.register_forward_hook(force)
    return model


def random_experts(engine: FSDPEngine, batch: Batch) -> Tensor:
    """(T, L * K), different experts for each token. Tokens of a prompt that samples share have the same."""
    routers = engine.routers
    per_token = torch.rand(300, routers.num_layers, routers.num_experts, generator=torch.Generator().manual_seed(3))
    seen: dict[tuple, int] = {}
    rows = [seen.setdefault(tuple(ids[: i + 1]), len(seen)) for ids in _sequences(batch) for i in range(len(ids))]
    return per_token.argsort(-1)[rows, :, : routers.top_k].flatten(1).to(routers.dtype)


def _sequences(batch: Batch) -> list[list[int]]:
    return [ids.tolist() for ids in batch.input_ids_T.split(batch.lengths.tolist())]


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", [*FAMILIES, "deepseek-v3"])
def test_a_replay_is_the_model_with_these_experts(name, tiny_model, monkeypatch):
    path, batch = tiny_model(name), random_image_batch() if name == "qwen3-vl-moe" else random_batch()
    engine = make_engine(path, temperature=reference.TEMPERATURE, max_tokens=80 if batch.images else 48)
    batch = batch.replace(routed_experts_TK=random_experts(engine, batch))
    monkeypatch.setattr(reference, "plain_model", lambda *_: forced_model(name, path, batch))
    plain = reference.PlainPolicy(path, batch)
    batch, outputs = near_policy(batch, plain.logprob_T.float()), {}
    metrics = engine.train_step(batch, policy_loss(), outputs=outputs)
    torch.testing.assert_close(outputs["logprob"].double(), plain.logprob_T, rtol=0, atol=5e-5)
    expected = plain.gradients(batch, "token-mean")
    reference.assert_close(reference.gradients(engine), {k: g for k, g in expected.items() if g is not None}, 5e-5)
    assert metrics["routing_agreement"] < 0.9


def test_a_replay_weighs_experts_of_groups_that_are_not_chosen():
    """DeepSeek-V2 takes weights from scores that are 0 outside of the groups that it chooses now."""
    if "router_logits" not in DeepseekV2Model._can_record_outputs:
        pytest.skip("transformers 5.15 does not know the routers of DeepSeek-V2, so that a replay is refused")
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "moe_intermediate_size": 8}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 1}
    config = DeepseekV2Config(
        **sizes, **experts, num_hidden_layers=1, num_attention_heads=2, topk_method="group_limited_greedy",
        routed_scaling_factor=3.0,
    )  # fmt: skip
    backbone = DeepseekV2Model(config)
    router = backbone.layers[0].mlp.gate
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(router.weight, generator=generator)
    hidden = torch.randn(20, 16, generator=generator)
    replayed = torch.rand(20, 8, generator=generator).argsort(-1)[:, :2]
    routing = Routing(replayed)
    with Routers(backbone).following(routing):
        logits, weights, chosen = router(hidden)
    assert torch.equal(chosen, replayed)
    torch.testing.assert_close(weights, 3.0 * logits.softmax(-1).gather(-1, replayed))
    first, second = (routing.own[0] // 2).T
    assert torch.equal(first, second)  # the own choice is within a group
    assert not torch.equal(first, replayed[:, 0] // 2)


# Blocks that run again in the backward choose the same experts.
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_replay_of_the_own_experts_changes_no_bit(checkpointing, tiny_model):
    config = {"activation_checkpointing": checkpointing}
    engines = [make_engine(tiny_model("mixtral"), config=config, max_tokens=48) for _ in range(2)]
    batch = random_batch()
    found = engines[0].infer(batch, ("logprob", "routed_experts"))
    assert found["routed_experts"].dtype == torch.uint8
    replayed = batch.replace(routed_experts_TK=found["routed_experts"])
    (own, first), (metrics, second) = (step(e, b) for e, b in zip(engines, (batch, replayed), strict=True))
    assert metrics.pop("routing_agreement") == 1.0
    assert metrics == own
    reference.assert_equal(second, first)


def test_experts_of_another_model(tiny_model):
    engine, batch = make_engine(tiny_model("mixtral")), random_batch()
    before = reference.weights(engine)
    for experts_TK in (torch.zeros(batch.num_tokens, 5), torch.full((batch.num_tokens, 6), 12)):
        with pytest.raises(ValueError, match=r"expected 6 experts for each token \(3 layers, 2 of each\) from 0 to 11"):
            engine.train_step(batch.replace(routed_experts_TK=experts_TK.to(torch.uint8)), policy_loss())
    with pytest.raises(TypeError, match=r"routed_experts_TK must be a tensor of torch.uint8"):
        batch.replace(routed_experts_TK=torch.zeros(batch.num_tokens, 6))
    reference.assert_equal(reference.weights(engine), before)
