"""Rollouts against plain transformers and against the engine's own log-probabilities."""

import json
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AddedToken,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    MinPLogitsWarper,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlft_fast.config import EngineConfig, OptimizerConfig, RolloutConfig
from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine
from rlft_fast.models import PACKED_ATTENTION, Ends, PolicyModel, load_policy, load_tokenizer, padded_attention
from rlft_fast.rl import PolicyLoss
from rlft_fast.rollout import (
    Completion,
    HFGenerator,
    Request,
    Rollout,
    RolloutError,
    SamplingParams,
    Span,
    build_rollout,
    sample_seeds,
)
from rlft_fast.rollout.by_transformers import _RoundEnd
from rlft_fast.rollout.sampling import choose, draw, most_likely
from rlft_fast.rollout.types import draw_seeds
from rlft_fast.world import World
from tests.support.machine.distributed import run_distributed
from tests.support.runs.rollouts import completions_of
from tests.support.tiny_models import (
    EOS_TOKEN_ID,
    MODELS,
    PAD_TOKEN_ID,
    PADDED_MODELS,
    ROPE_LIMIT,
    VISION_MODELS,
    save_tiny_model,
)

# One token (nothing is left for the shared prefill), equal lengths, and one far longer than the sliding window.
PROMPTS = [[5], [7, 8], [1, 2], [10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110], [99, 3, 4]]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)
IN_BFLOAT16 = RolloutConfig(dtype="bfloat16")


def make_generator(path: Path, batch_size: int = 64) -> HFGenerator:
    return HFGenerator(load_policy(path), load_tokenizer(path), batch_size)


def draw_samples(generator: HFGenerator, prompts: list[list[int]], params: SamplingParams) -> list[list[Completion]]:
    return completions_of(generator, prompts, params)


def of_engine(engine: FSDPEngine, batch_size: int = 64) -> Rollout:
    return build_rollout(engine, load_tokenizer(engine.path), RolloutConfig(batch_size=batch_size), 64)


@lru_cache(maxsize=1)
def plain_model(path: Path, **how: str) -> PreTrainedModel:
    has_tower = path.name in [*VISION_MODELS, "llava-next"]
    auto_class = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    return auto_class.from_pretrained(path, **how)


@cache  # several tests ask for the same
def plain_greedy(path: Path, prompt: tuple[int, ...], max_new_tokens: int) -> list[int]:
    model = plain_model(path)
    ids = torch.tensor([prompt])
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=EOS_TOKEN_ID, pad_token_id=EOS_TOKEN_ID
    )
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, len(prompt) :].tolist()


def test_a_padding_token_that_has_no_embedding(tiny_model):
    path = tiny_model("shallow")
    expected = draw_samples(make_generator(path), PROMPTS, GREEDY)
    policy, tokenizer = load_policy(path), load_tokenizer(path)
    tokenizer.add_tokens(["[OTHER]"])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == policy.model.config.vocab_size
    assert draw_samples(HFGenerator(policy, tokenizer, 64), PROMPTS, GREEDY) == expected


def test_a_model_that_was_saved_to_return_more(tiny_model, tmp_path):
    """Such as the logits of its routers, by config.json of a training with an auxiliary loss."""
    folder = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "mixtral"))
    config = json.loads((folder / "config.json").read_text())
    more = {"output_router_logits": True, "output_hidden_states": True, "output_attentions": True}
    (folder / "config.json").write_text(json.dumps(config | more))
    expected, generator = draw_samples(make_generator(tiny_model("mixtral")), PROMPTS, GREEDY), make_generator(folder)
    assert draw_samples(generator, PROMPTS, GREEDY) == expected
    with padded_attention(generator.model.model):
        found = generator.model.backbone(torch.tensor([PROMPTS[3]]))
    assert found.hidden_states is found.router_logits is found.attentions is None


# Drawn from all, from a few, and not drawn.
@pytest.mark.parametrize("params", [{}, {"top_k": 4, "top_p": 0.9}, {"temperature": 0.0}], ids=["all", "few", "greedy"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite(params, bad, tiny_model):
    """Of one prompt of several, in a later batch."""
    generator = make_generator(tiny_model("shallow"), batch_size=2)
    rollout = Rollout(lambda: generator, World())
    with torch.no_grad():
        generator.model.backbone.get_input_embeddings().weight[99] = bad
    rollout.generate(PROMPTS[:4], SamplingParams(max_new_tokens=1, **params))
    with pytest.raises(RolloutError, match=r"^the policy's logits are not finite$"):
        rollout.generate(PROMPTS, SamplingParams(max_new_tokens=3, **params))


def log_softmax(path: Path, sequence: list[int], temperature: float) -> Tensor:
    """(L, V)"""
    with torch.no_grad():
        model = plain_model(path, attn_implementation="eager")  # Gemma 2 needs it
        logits = model(input_ids=torch.tensor([sequence])).logits[0]
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("name", [*MODELS, "gpt-oss", "llama4", *PADDED_MODELS, *VISION_MODELS])
def test_greedy_is_that_of_plain_transformers_one_by_one(tiny_model, name):
    path = tiny_model(name)
    found = draw_samples(make_generator(path), PROMPTS, GREEDY)
    assert [group[0].token_ids for group in found] == [plain_greedy(path, tuple(prompt), 8) for prompt in PROMPTS]


# Everything at once, two prompts at a time, and fewer than one prompt's samples.
@pytest.mark.parametrize("batch_size", [64, 4, 1])
@pytest.mark.parametrize("name", ["llama", "qwen2-vl"])  # the latter keeps positions from one batch to the next
def test_batch_size_changes_nothing(tiny_model, name, batch_size):
    path = tiny_model(name)
    params = SamplingParams(n=2, max_new_tokens=8, temperature=0.0)
    found = draw_samples(make_generator(path, batch_size), PROMPTS, params)
    assert [len(group) for group in found] == [2] * len(PROMPTS)
    for prompt, group in zip(PROMPTS, found, strict=True):
        assert [sample.token_ids for sample in group] == [plain_greedy(path, tuple(prompt), 8)] * 2


# Fewer than one prompt's samples, evenly and with a rest, as many, and two prompts.
@pytest.mark.parametrize("batch_size", [2, 4, 6, 13])
def test_no_more_completions_than_the_batch_size_run_at_once(tiny_model, batch_size):
    torch.manual_seed(0)  # no two samples of a prompt begin alike, so each has a row
    params, seeds = SamplingParams(n=6, max_new_tokens=3), draw_seeds(len(PROMPTS), 6)
    whole = completions_of(make_generator(tiny_model("shallow")), PROMPTS, params, seeds)
    generator, rows = make_generator(tiny_model("shallow"), batch_size), []
    generator.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = completions_of(generator, PROMPTS, params, seeds)
    assert max(rows) == min(batch_size // 6 * 6 or batch_size, 6 * len(PROMPTS))
    assert [[x.token_ids for x in group] for group in found] == [[x.token_ids for x in group] for group in whole]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])  # greedy reports the log-probability at temperature 1
@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen2-sliding", "gemma2"])
@pytest.mark.filterwarnings("error::FutureWarning")  # of names that transformers is about to drop
def test_logprobs_are_those_of_the_engine(tiny_model, name, temperature):
    path = tiny_model(name)
    engine = FSDPEngine(str(path), EngineConfig(max_tokens=64), temperature=temperature or 1.0).initialize()
    rollout = of_engine(engine)
    groups = rollout.generate(PROMPTS, SamplingParams(n=3, max_new_tokens=9, temperature=temperature))
    batch = to_batch(PROMPTS, groups)
    inferred = engine.infer(batch, ("logprob",))["logprob"]
    torch.testing.assert_close(batch.rollout_logprob_T, inferred, rtol=0, atol=1e-4)
    if temperature:
        assert len({tuple(sample.token_ids) for sample in groups[3]}) == 3  # samples of a prompt are independent
        sample = groups[3][0]
        expected = log_softmax(path, PROMPTS[3] + sample.token_ids, temperature)
        positions = torch.arange(len(sample.token_ids)) + len(PROMPTS[3]) - 1
        wanted = expected[positions, torch.tensor(sample.token_ids)]
        torch.testing.assert_close(torch.tensor(sample.logprobs), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["longrope", "default"])
def test_sequences_of_a_batch_wider_than_rotary_embeddings_stay(kind, tmp_path):
    """There transformers drops a cache of Phi-3. No sequence is that long, or nothing changes there."""
    is_default = kind == "default"
    path = save_tiny_model("phi3", tmp_path, **({"rope_parameters": {"rope_theta": 1e4}} if is_default else {}))
    generator, longest = make_generator(path), ROPE_LIMIT + 8 * is_default
    generator.eos_token_ids = []
    requests = [
        Request(row=row, token_ids=prompt, seed=row, max_new_tokens=longest - len(prompt))
        for row, prompt in enumerate([PROMPTS[1], PROMPTS[3], [*PROMPTS[3], *PROMPTS[3][:7]]])
    ]
    for request, completion in zip(requests, generator.generate(requests, SamplingParams()), strict=True):
        tokens = completion.token_ids
        assert len(tokens) == request.max_new_tokens
        expected = log_softmax(path, [*request.token_ids, *tokens], 1.0)[len(request.token_ids) - 1 : -1]
        wanted = expected.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.logprobs), wanted, rtol=0, atol=1e-4)


def test_a_sequence_whose_length_changes_rotary_embeddings_is_refused(tiny_model):
    """Before anything runs, as in training. A vLLM would start with the frequencies of long sequences for all."""
    path, refusal = tiny_model("phi3"), "have up to 25 tokens, but the longrope rotary .* of Phi3Model change beyond 24"
    engine = FSDPEngine(str(path), EngineConfig(max_tokens=64), num_training_steps=1).initialize()
    for backend in ("hf", "vllm"):
        with pytest.raises(ValueError, match=refusal):
            build_rollout(engine, load_tokenizer(path), RolloutConfig(backend=backend), ROPE_LIMIT + 1)
    request = Request(row=0, token_ids=PROMPTS[3], seed=0, max_new_tokens=ROPE_LIMIT + 1 - len(PROMPTS[3]))
    with pytest.raises(ValueError, match=refusal):
        make_generator(path).generate([request], SamplingParams())
    batch = Batch.from_samples([PROMPTS[3]], [[1] * request.max_new_tokens])
    with pytest.raises(ValueError, match=refusal):
        engine.infer(batch, ("logprob",))


def to_batch(prompts: list[list[int]], groups: list[list[Completion]]) -> Batch:
    samples = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    return Batch.from_samples(
        [prompt for prompt, _ in samples],
        [sample.token_ids for _, sample in samples],
        rollout_logprobs=[sample.logprobs for _, sample in samples],
        supports=[sample.support for _, sample in samples],
    )


# Settings that instruction-tuned models bring along. None may change the samples, or the ratio is no longer 1.
DEFAULTS = {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 5.0, "do_sample": True}


@pytest.mark.parametrize("defaults", [{}, DEFAULTS])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_whole_softmax(tiny_model, temperature, defaults):
    generator = make_generator(tiny_model("llama"), batch_size=2000)
    generator.model.model.generation_config.update(**defaults)
    torch.manual_seed(0)
    prompt = PROMPTS[3]
    samples = draw_samples(generator, [prompt], SamplingParams(n=2000, max_new_tokens=1, temperature=temperature))[0]
    expected = log_softmax(tiny_model("llama"), prompt, temperature)[-1]
    found = torch.tensor([sample.token_ids[0] for sample in samples])
    logprobs = torch.tensor([sample.logprobs[0] for sample in samples])
    torch.testing.assert_close(logprobs, expected[found], rtol=0, atol=1e-4)
    # The mean log-probability of samples is minus the entropy, here within five standard errors.
    entropy = -(expected.exp() * expected).sum()
    error = ((expected.exp() * expected.square()).sum() - entropy.square()).sqrt() / 2000**0.5
    assert abs(logprobs.mean() + entropy) < 5 * error


# ---- top-k, min-p and top-p -----------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 99), vocab=st.integers(1, 40), top_k=st.integers(1, 50), spread=st.floats(0.1, 10),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1)), top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
)  # fmt: skip
def test_the_cut_is_that_of_transformers(seed, vocab, top_k, min_p, top_p, spread):
    """In the order of vLLM's samplers: min-p, top-k, top-p."""
    z = spread * torch.randn(4, vocab, generator=torch.Generator().manual_seed(seed))
    expected = TopKLogitsWarper(top_k)(None, MinPLogitsWarper(min_p)(None, z))
    expected = TopPLogitsWarper(top_p)(None, expected) if top_p < 1 else expected
    logits, ids = most_likely(z, top_k, min_p, top_p)
    assert logits.shape[1] == min(top_k, vocab)
    found = torch.full_like(z, -torch.inf).scatter_(1, ids, logits)
    assert torch.equal(found, expected)


def test_the_cut_by_hand():
    """Probabilities of 0.4, 0.3, 0.2 and 0.1: of the first three 0.7 needs two, and 0.8 all three.

    Half as likely as the first are three of four; of these, 0.9 is more than the first two have: 0.7 / 0.9.
    """
    z = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert most_likely(z, 3, 0.0, 1.0)[1].tolist() == [[1, 3, 2]]
    for top_p, count in ((0.3, 1), (0.7, 2), (0.8, 3)):
        assert most_likely(z, 3, 0.0, top_p)[0].isfinite().sum() == count
    for min_p, top_p, count in ((0.24, 1, 4), (0.26, 1, 3), (0.49, 0.9, 3), (0.49, 0.77, 2), (0.76, 1, 1), (1, 1, 1)):
        assert most_likely(z, 4, min_p, top_p)[0].isfinite().sum() == count
    assert most_likely(torch.zeros(1, 9), 4, 1.0, 1.0)[1].shape == (1, 4)  # of equal ones no more than asked for


@pytest.mark.parametrize(("min_p", "top_p"), [(0.0, 1.0), (0.0, 0.7), (0.3, 0.9)])
def test_ratios_average_one_over_the_support(tiny_model, min_p, top_p):
    """Ratios average 1 over the support, under the policy that sampled and the next, but not over the vocabulary."""
    config = EngineConfig(max_tokens=4096, optimizer=OptimizerConfig(learning_rate=1e-3))
    engine = FSDPEngine(str(tiny_model("llama")), config, num_training_steps=4, temperature=0.8).initialize()
    rollout = of_engine(engine)
    rollout.sync()
    torch.manual_seed(0)
    params = SamplingParams(n=400, max_new_tokens=5, temperature=0.8, top_k=7, min_p=min_p, top_p=top_p)
    groups = rollout.generate(PROMPTS[3:], params)
    batch = to_batch(PROMPTS[3:], groups)
    assert all(sample.spans == (Span(len(sample.token_ids), 1),) for group in groups for sample in group)
    check_supports(engine.path, PROMPTS[3] + groups[0][0].token_ids, groups[0][0].support, min_p, top_p)

    on_policy, vocabulary = (engine.infer(b, ("logprob",))["logprob"] for b in (batch, batch.replace(support_TK=None)))
    torch.testing.assert_close(batch.rollout_logprob_T, on_policy, rtol=0, atol=1e-5)
    engine.train_step(batch.replace(advantage_T=torch.randn(batch.num_tokens), old_logprob_T=on_policy), PolicyLoss())
    moved = engine.infer(batch, ("logprob",))["logprob"]
    ratio = (moved - batch.rollout_logprob_T).exp()[batch.loss_mask_T]
    assert ratio.std() > 0.01  # the step was one
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / len(ratio) ** 0.5
    assert (vocabulary - batch.rollout_logprob_T).exp()[batch.loss_mask_T].mean() < 0.9


def check_supports(path: str, sequence: list[int], support: Tensor, min_p: float, top_p: float) -> None:
    log_p = log_softmax(Path(path), sequence, 0.8)[-len(support) - 1 : -1]
    kept = TopKLogitsWarper(7)(None, MinPLogitsWarper(min_p)(None, log_p))
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    expected = [sorted(row.isfinite().nonzero().squeeze(1).tolist()) for row in kept]
    assert [sorted(i for i in row if i >= 0) for row in support.tolist()] == expected


def test_greedy_has_no_support(tiny_model):
    generator = make_generator(tiny_model("llama"))
    cut = SamplingParams(max_new_tokens=8, temperature=0.0, top_k=2, top_p=0.5)
    assert draw_samples(generator, PROMPTS, cut) == draw_samples(generator, PROMPTS, GREEDY)
    assert draw_samples(generator, PROMPTS, cut)[0][0].support is None


def test_log_probabilities_are_those_of_the_definition():
    """π(v) = p(v) / sum of p over the tokens kept, p = softmax(z / T), in float64 from the sums of p alone."""
    z = 3 * torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    p = (z.double() / 2).softmax(-1)[0]
    order = p.argsort(descending=True)[:20].tolist()
    order = [v for v in order if p[v] >= 0.05 * p.max()]
    sums = p[order].cumsum(0) / p[order].sum()
    kept = order[: int((sums < 0.9).sum()) + 1]
    assert 3 < len(kept) < len(order) < 20  # each cut is one
    params = SamplingParams(temperature=2.0, top_k=20, min_p=0.05, top_p=0.9)
    uniform = torch.linspace(0, 0.999, 300, dtype=torch.float64)
    chosen = choose(z.clone(), torch.zeros(300, dtype=torch.int64), uniform, params)
    assert {*chosen.token_B.tolist()} == {*kept}
    assert all([v for v in row if v >= 0] == kept for row in chosen.support_BK.tolist())
    expected = (p[chosen.token_B] / p[kept].sum()).log().float()
    torch.testing.assert_close(chosen.logprob_B, expected, rtol=0, atol=2e-6)  # logits up to 5, a few 2^-24 of it


def test_top_p_needs_a_top_k():
    with pytest.raises(ValueError, match=r"min_p is 0\.1 without a top_k: bound the number"):
        SamplingParams(min_p=0.1)
    with pytest.raises(ValueError, match="min_p is 2: expected at least 0 and at most 1"):
        SamplingParams(top_k=5, min_p=2)
    with pytest.raises(ValueError, match=r"top_p is 0\.9 without a top_k: bound the number"):
        SamplingParams(top_p=0.9)
    with pytest.raises(ValueError, match="top_k is 0: expected at least 1"):
        SamplingParams(top_k=0)
    with pytest.raises(ValueError, match="top_p is 0: expected more than 0"):
        SamplingParams(top_k=5, top_p=0)


@pytest.mark.parametrize("vocab", [3, 256, 700])  # less than a block, one block, a ragged end
def test_draws_follow_the_probabilities(vocab):
    torch.manual_seed(0)
    probability = torch.rand(vocab)
    probability[torch.rand(vocab) < 0.3] = 0.0
    probability[-1] = 0.0
    probability /= probability.sum()
    uniform = torch.rand(10, 4000, dtype=torch.float64)
    row = torch.zeros(4000, dtype=torch.int64)
    draws = torch.cat([draw(probability[None], row, uniform[i]) for i in range(10)])
    count = torch.bincount(draws, minlength=vocab)
    assert (count[probability == 0] == 0).all()
    z = (count - 40_000 * probability) / (40_000 * probability * (1 - probability)).sqrt().clamp(min=1e-3)
    assert z.abs().max() < 4.5
    assert 0.8 < z[probability > 0].square().mean() < 1.25 or vocab == 3


def test_draws_keep_rare_tokens():
    """Half of the mass on the first token, the rest on 100,000 tokens in hundreds of blocks."""
    probability = torch.full((1, 100_001), 5e-6)
    probability[0, 0] = 0.5
    torch.manual_seed(0)
    draws = draw(probability, torch.zeros(2000, dtype=torch.int64), torch.rand(2000, dtype=torch.float64))
    assert (draws > 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (draws > 50_000).float().mean().item() == pytest.approx(0.25, abs=0.05)


def test_the_models_own_defaults_are_kept(tiny_model):
    generator = make_generator(tiny_model("llama"))
    defaults = generator.model.model.generation_config
    draw_samples(generator, [[1, 2]], GREEDY)
    assert generator.model.model.generation_config is defaults
    assert generator.model.model.config._attn_implementation == PACKED_ATTENTION


def test_the_model_runs_while_it_is_on_its_device(tiny_model):
    """A policy that leaves the device between phases is back while it samples."""
    engine = FSDPEngine(str(tiny_model("llama")), EngineConfig(max_tokens=64)).initialize()
    rollout = of_engine(engine, batch_size=1)
    events: list[str] = []
    eval_mode = engine.eval_mode

    @contextmanager
    def noted():
        with eval_mode():
            events.append("begin")
            yield
            events.append("end")

    engine.eval_mode = noted
    engine.model.backbone.register_forward_pre_hook(lambda *_: events.append("run"))
    rollout.generate([[1, 2]] * 2, GREEDY)
    assert (events[0], set(events[1:-1]), events[-1]) == ("begin", {"run"}, "end")


def test_seed_repeats_samples(tiny_model):
    generator = make_generator(tiny_model("llama"))
    params = SamplingParams(n=4, max_new_tokens=6, temperature=1.0)
    runs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        runs.append(draw_samples(generator, PROMPTS, params))
    assert runs[0] == runs[2]
    assert runs[0] != runs[1]


@pytest.mark.parametrize("params", [{}, {"top_k": 4}], ids=["all", "few"])
def test_a_sample_depends_on_its_own_seed_alone(tiny_model, params):
    """Not on the other prompts and samples of the batch, nor on torch's random state."""
    sampling = SamplingParams(n=3, max_new_tokens=8, **params)
    seeds = sample_seeds(seed=5, step=2, rows=range(len(PROMPTS)), num_samples=3)
    assert len({seed for own in seeds for seed in own}) == 3 * len(PROMPTS)
    together = completions_of(make_generator(tiny_model("llama")), PROMPTS, sampling, seeds)
    one, generator = replace(sampling, n=1), make_generator(tiny_model("llama"), 1)
    for i, prompt in enumerate(PROMPTS):
        for number in range(3):
            torch.manual_seed(number)
            ((alone,),) = completions_of(generator, [prompt], one, [[seeds[i][number]]])
            assert alone.token_ids == together[i][number].token_ids
            assert alone.logprobs == pytest.approx(together[i][number].logprobs, abs=1e-5)


def test_requests_of_unequal_numbers_and_limits_are_those_of_each_alone(tiny_model):
    """Three of one prompt and one of another, in one batch; a request ends at its own limit."""
    generator, params = make_generator(tiny_model("llama")), SamplingParams(temperature=1.0)
    generator.eos_token_ids = []
    prompts, limits = [PROMPTS[2]] * 3 + [PROMPTS[0]], (2, 5, 8, 7)
    requests = [
        Request(row=0, token_ids=prompt, seed=seed, max_new_tokens=limit)
        for seed, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    together = generator.generate(requests, params)
    assert [len(completion.token_ids) for completion in together] == [*limits]
    for request, completion in zip(requests, together, strict=True):
        (alone,) = generator.generate([request], params)
        assert (alone.token_ids, alone.finish_reason) == (completion.token_ids, "length")
        assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_seeds_are_those_of_their_place():
    """Of seed, step, row and number; wide enough that no two samples of a run meet."""
    assert sample_seeds(0, 1, [4, 2], 2) == [sample_seeds(0, 1, [row], 2)[0] for row in (4, 2)]
    everywhere = [sample_seeds(seed, step, range(20), 5) for seed in (0, 1) for step in (0, 1)]
    assert len({x for run in everywhere for own in run for x in own}) == 400
    assert sample_seeds(0, 0, [0], 1) == [[7896617691693857887]]  # also with the next version of numpy


def test_a_support_ends_with_its_completion(tiny_model):
    generator = make_generator(tiny_model("llama"))
    params = SamplingParams(n=20, max_new_tokens=8, top_k=3)
    seeds = draw_seeds(1, params.n)
    free = [sample.token_ids for sample in completions_of(generator, PROMPTS[3:4], params, seeds)[0]]
    generator.eos_token_ids = [next(token for token in free[0] if any(token not in ids for ids in free))]
    ended = completions_of(generator, PROMPTS[3:4], params, seeds)[0]
    assert {sample.finish_reason for sample in ended} == {"stop", "length"}
    for sample in ended:
        assert sample.support.shape == (len(sample.token_ids), 3)
        assert (sample.support == torch.tensor(sample.token_ids)[:, None]).any(1).all()


def test_end_token_stops(tiny_model):
    generator = make_generator(tiny_model("llama"))
    free = [group[0] for group in draw_samples(generator, PROMPTS, GREEDY)]
    assert all(sample.finish_reason == "length" and len(sample.token_ids) == 8 for sample in free)
    end = free[3].token_ids[4]
    generator.eos_token_ids = [end, EOS_TOKEN_ID]
    for sample, before in zip(draw_samples(generator, PROMPTS, GREEDY), free, strict=True):
        stops = end in before.token_ids
        length = before.token_ids.index(end) + 1 if stops else 8
        assert sample[0].finish_reason == ("stop" if stops else "length")
        assert sample[0].token_ids == before.token_ids[:length]  # the end token itself is a choice of the policy
        assert sample[0].logprobs == pytest.approx(before.logprobs[:length], abs=1e-5)


# Tied and sliding-window layers, soft-capped scores, values of another width than keys, and positions of images.
@pytest.mark.parametrize("name", ["llama", "qwen2-sliding", "gemma2", "deepseek-v3", "qwen2-vl"])
def test_both_loops_sample_the_same_and_drop_ended_rows(tiny_model, name, monkeypatch):
    """Rows that leave disturb no other. Our loop runs each beginning once; transformers' has a third too many rows."""
    generator = make_generator(tiny_model(name), 80)
    assert generator.model.decodes_in_place
    params = SamplingParams(n=16, max_new_tokens=24, top_k=8)
    seeds = [[16 * prompt + number for number in range(16)] for prompt in range(len(PROMPTS))]
    free = [*chain.from_iterable(completions_of(generator, PROMPTS, params, seeds))]
    counts = Counter(chain.from_iterable(sample.token_ids for sample in free))
    generator.eos_token_ids = [*generator.eos_token_ids, *counts.most_common(1)[0][:1]]
    num_rows: list[int] = []
    generator.model.backbone.register_forward_pre_hook(
        lambda _, args, inputs: num_rows.append(len(inputs["input_ids"])), with_kwargs=True
    )
    ended = [*chain.from_iterable(completions_of(generator, PROMPTS, params, seeds))]
    assert_begin_as(ended, free)
    lengths = [len(sample.token_ids) for sample in ended]
    assert len(set(lengths)) > 8
    assert max(lengths) == params.max_new_tokens
    beginnings = [
        {(i // 16, *sample.token_ids[:n]) for i, sample in enumerate(ended) if len(sample.token_ids) > n}
        for n in range(max(lengths))
    ]
    assert num_rows == [len(PROMPTS), *map(len, beginnings)]  # the prefill, and each token
    assert len(beginnings[1]) < 80

    num_rows.clear()
    monkeypatch.setattr(PolicyModel, "decodes_in_place", False)
    by_transformers = [*chain.from_iterable(completions_of(generator, PROMPTS, params, seeds))]
    assert [len(sample.token_ids) for sample in by_transformers] == lengths
    assert_begin_as(by_transformers, ended)
    left = [sum(length > position for length in lengths) for position in range(max(lengths))]
    assert all(rows >= unended > 0.75 * rows for rows, unended in zip(num_rows[1:], left, strict=True))


def assert_begin_as(samples: list[Completion], wholes: list[Completion]) -> None:
    for sample, whole in zip(samples, wholes, strict=True):
        length = len(sample.token_ids)
        assert sample.token_ids == whole.token_ids[:length]
        assert torch.equal(sample.support, whole.support[:length])
        assert sample.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-5)


def test_stop_texts_end_a_completion(tiny_model):
    generator = make_generator(tiny_model("llama"))
    free = [group[0] for group in draw_samples(generator, PROMPTS, GREEDY)]
    decode = generator.tokenizer.decode
    text = decode(free[3].token_ids[3:5])
    params = SamplingParams(max_new_tokens=8, temperature=0.0, stop=("never", text))
    for (sample,), before in zip(draw_samples(generator, PROMPTS, params), free, strict=True):
        ends = [i for i in range(1, 9) if text in decode(before.token_ids[:i])]
        assert sample.token_ids == before.token_ids[: min(ends, default=8)]  # the text's own tokens are kept
        assert sample.finish_reason == ("stop" if ends else "length")
        assert len(sample.logprobs) == len(sample.token_ids)
    (sample,) = draw_samples(generator, [PROMPTS[3]], params)[0]
    assert sample.finish_reason == "stop"


def test_a_stop_text_is_found_as_it_is_complete(tiny_model):
    tokenizer = load_tokenizer(tiny_model("llama"))
    text = tokenizer.encode("never; so stop")
    # The prompt has the text, too.
    rows = torch.tensor([[*text, *range(60, 100), *text, 65], [*text, *range(40, 80), *text[:-1], 65, 65]])
    ends = Ends(tokenizer, [], ("nonsense", "so stop"))
    criteria = _RoundEnd(ends, len(text), torch.tensor([999, 999]))
    ended = []
    for length in range(len(text) + 1, rows.shape[1] + 1):
        criteria(rows[:, :length], torch.empty(0))
        ended.append(criteria.ended_B.tolist())
    assert [one for one, _ in ended].index(True) == len(ended) - 2
    assert not any(other for _, other in ended)
    assert ends.has_text([*text[:-4], *[PAD_TOKEN_ID] * 8, *text[-4:]])  # special tokens are no text


def test_a_special_token_as_a_stop_text_is_an_end_token(tiny_model):
    """Decoding removes a special token, so a search of the text would never find it."""
    generator = make_generator(tiny_model("llama"))
    free = draw_samples(generator, [PROMPTS[3]], GREEDY)[0][0]
    name = generator.tokenizer.convert_ids_to_tokens(free.token_ids[4])
    generator.tokenizer.add_tokens([AddedToken(name, special=True)])
    params = SamplingParams(max_new_tokens=8, temperature=0.0, stop=("never", name))
    (sample,) = draw_samples(generator, [PROMPTS[3]], params)[0]
    assert sample.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[4]) + 1]
    assert sample.finish_reason == "stop"
    with pytest.raises(ValueError, match="is a special token: give the token or the text alone"):
        draw_samples(generator, [PROMPTS[3]], SamplingParams(stop=(f"a {name}",)))
    with pytest.raises(ValueError, match="has an empty text"):
        draw_samples(generator, [PROMPTS[3]], SamplingParams(stop=("",)))


def test_one_new_token(tiny_model):
    params = SamplingParams(n=2, max_new_tokens=1)
    for group in draw_samples(make_generator(tiny_model("llama")), PROMPTS, params):
        assert [(len(sample.token_ids), len(sample.logprobs)) for sample in group] == [(1, 1)] * 2


def test_no_prompts(tiny_model):
    assert draw_samples(make_generator(tiny_model("llama")), [], GREEDY) == []


def test_end_tokens_of_model_and_tokenizer_count(tiny_model, tmp_path):
    path = save_tiny_model("llama", tmp_path / "two", eos_token_id=[3, 9])
    assert make_generator(path).eos_token_ids == [3, 9, EOS_TOKEN_ID]
    GenerationConfig(eos_token_id=[4, 9]).save_pretrained(path)  # as from_pretrained does: instead of config.json's
    assert make_generator(path).eos_token_ids == [4, 9, EOS_TOKEN_ID]
    policy, tokenizer = load_policy(tiny_model("llama")), load_tokenizer(tiny_model("llama"))
    policy.model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="set eos_token_id"):
        HFGenerator(policy, tokenizer, 1)


# ---- sharded --------------------------------------------------------------------------------------------------------

# Different numbers of prompts, batches and lengths on each rank, and one time no prompt at all on one of them.
SHARES = [(PROMPTS[:3], PROMPTS[3:]), ([PROMPTS[0]], []), (PROMPTS[:1], PROMPTS[1:])]


def generate_on_two(rank: int, path: Path, expected: Path) -> None:
    config = EngineConfig(max_tokens=64, optimizer=OptimizerConfig(learning_rate=1e-2))
    engine = FSDPEngine(str(path), config, num_training_steps=2).initialize()
    rollout = of_engine(engine, batch_size=2)
    wanted = torch.load(expected)
    for share in SHARES:  # before anything else has run through the model, as evaluation does
        found = rollout.generate(share[rank], GREEDY)
        assert [group[0].token_ids for group in found] == [wanted[tuple(prompt)] for prompt in share[rank]]
        assert all(isinstance(parameter, DTensor) for parameter in engine.model.parameters())  # sharded again
    # After a step the samples are those of the new weights, and the engine still works.
    batch = Batch.from_samples([[1, 2, 3]], [[4, 5, 6]])
    batch = batch.replace(advantage_T=torch.ones(6), old_logprob_T=engine.infer(batch, ("logprob",))["logprob"])
    engine.train_step(batch, PolicyLoss())
    found = rollout.generate(PROMPTS, SamplingParams(max_new_tokens=8, temperature=1.0))
    sampled = to_batch(PROMPTS, found)
    # Each rank drew its own samples, and infer takes the same batch on all ranks: look at each in turn.
    shared: list = [None, None]
    torch.distributed.all_gather_object(shared, sampled)
    for batch in shared:
        inferred = engine.infer(batch, ("logprob",))["logprob"]
        torch.testing.assert_close(batch.rollout_logprob_T, inferred, rtol=0, atol=1e-4)
    before = [x.full_tensor() for x in engine.model.parameters()]
    narrow = build_rollout(engine, load_tokenizer(path), IN_BFLOAT16, 64)
    (group,) = narrow.generate([PROMPTS[3]], SamplingParams(max_new_tokens=8))
    batch = to_batch([PROMPTS[3]], [group])
    distance = (batch.rollout_logprob_T - engine.infer(batch, ("logprob",))["logprob"]).abs().max()
    assert distance > 1e-4
    assert all(torch.equal(x.full_tensor(), old) for x, old in zip(engine.model.parameters(), before, strict=True))


def test_a_policy_in_float32_samples_in_bfloat16(tiny_model):
    """Samples are those of a policy that computes in bfloat16. Weights and log-probabilities stay as they were."""
    path, params = tiny_model("qwen2-tied"), SamplingParams(n=3, max_new_tokens=9)
    engine, narrow = (
        FSDPEngine(str(path), EngineConfig(max_tokens=64, compute_dtype=dtype)).initialize()
        for dtype in ("float32", "bfloat16")
    )
    before = {name: (x.data_ptr(), x.clone()) for name, x in engine.model.named_parameters()}
    seeds = sample_seeds(0, 1, range(len(PROMPTS)), params.n)
    groups = build_rollout(engine, load_tokenizer(path), IN_BFLOAT16, 64).generate(PROMPTS, params, seeds)
    assert groups == of_engine(narrow).generate(PROMPTS, params, seeds)
    for name, parameter in engine.model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])
    batch = to_batch(PROMPTS, groups)
    inferred = engine.infer(batch, ("logprob",))["logprob"]
    expected = log_softmax(path, PROMPTS[0] + groups[0][0].token_ids, 1.0)
    wanted = expected[torch.arange(9), torch.tensor(groups[0][0].token_ids)]
    own = inferred[batch.loss_mask_T.bool()][:9]
    torch.testing.assert_close(own, wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(torch.tensor(groups[0][0].logprobs), wanted, rtol=0, atol=1e-4)  # 8 bits, not 24


def test_hf_takes_no_wider_dtype_than_the_policy(tiny_model):
    path = tiny_model("llama")
    engine = FSDPEngine(str(path), EngineConfig(max_tokens=64, compute_dtype="bfloat16")).initialize()
    with pytest.raises(
        ValueError, match=r"rollout\.dtype is float32, but hf samples .* compute_dtype, bfloat16: leave"
    ):
        build_rollout(engine, load_tokenizer(path), RolloutConfig(dtype="float32"), 64)


@pytest.mark.dist
def test_two_processes_generate_what_one_does(tiny_model, tmp_path):
    path = tiny_model("qwen2-tied")
    greedy = {prompt: plain_greedy(path, prompt, 8) for prompt in map(tuple, PROMPTS)}
    torch.save(greedy, tmp_path / "greedy.pt")
    run_distributed(generate_on_two, 2, path, tmp_path / "greedy.pt")
