"""Decode steps in graphs, recorded on a CPU: the samples of steps without graphs, and the bits of launched steps."""

import pytest
import torch

from rlft_fast.config import EngineConfig, RolloutConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.sharding import CudaRecorder
from rlft_fast.models import load_policy, load_tokenizer
from rlft_fast.rollout import HFGenerator, SamplingParams, build_rollout
from rlft_fast.rollout.graphs import DecodeGraphs, can_step
from rlft_fast.rollout.types import make_requests
from tests.support.machine.tape import Tape, record_on_cpu
from tests.support.tiny_models import save_tiny_model

# One token, equal beginnings, and lengths that differ.
PROMPTS = [[5], [7, 8, 9, 10], [7, 8, 9, 11], [*range(10, 60)], [99, 3, 4]]
PARAMS = {
    "all": SamplingParams(n=3, max_new_tokens=24),
    "few": SamplingParams(n=3, max_new_tokens=24, top_k=4, temperature=0.7),
    "greedy": SamplingParams(n=2, max_new_tokens=24, temperature=0.0),
}


def generate(generator: HFGenerator, params: SamplingParams) -> list[tuple]:
    """Token ids, log-probabilities and supports of all completions."""
    seeds = [[3 * row + i for i in range(params.n)] for row in range(len(PROMPTS))]
    found = generator.generate(make_requests(PROMPTS, params, seeds), params)
    return [(x.token_ids, x.logprobs, None if x.support is None else x.support.tolist()) for x in found]


def make_generator(path, way, batch_size: int = 6) -> HFGenerator:
    model = load_policy(path)
    graphs = None if way == "plain" else DecodeGraphs(model, None if way == "launched" else way)
    return HFGenerator(model, load_tokenizer(path), batch_size, graphs)


@pytest.mark.thin(3)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("model", ["llama", "qwen2-tied"])
def test_samples_are_those_without_graphs(model, params, tiny_model):
    path, tape = tiny_model(model), Tape()
    plain, launched, recorded = (generate(make_generator(path, way), params) for way in ("plain", "launched", tape))
    assert recorded == launched
    assert tape.num_replayed > 3 * tape.num_recorded > 0
    for (tokens, logprobs, support), expected in zip(recorded, plain, strict=True):
        assert (tokens, support) == expected[::2]
        assert logprobs == pytest.approx(expected[1], abs=1e-5)


def test_a_step_is_one_replay(tiny_model):
    """Of batches of one size, once all sizes have come twice."""
    tape = Tape()
    generator = make_generator(tiny_model("shallow"), tape)
    for _ in range(2):
        generate(generator, PARAMS["all"])
    launched, num_replayed, num_recorded = [], tape.num_replayed, tape.num_recorded
    generator.graphs._launched = lambda *_: launched.append(1)
    found = generate(generator, PARAMS["all"])
    assert (launched, tape.num_recorded) == ([], num_recorded)
    assert tape.num_replayed - num_replayed >= max(len(tokens) for tokens, *_ in found)


def test_weights_that_move_are_recorded_again(tiny_model):
    path, tape = tiny_model("shallow"), Tape()
    generator, plain = make_generator(path, tape), make_generator(path, "launched")
    generate(generator, PARAMS["all"])
    for each in (generator, plain):
        for parameter in each.model.parameters():
            parameter.data = 1.1 * parameter.data
    num_recorded = tape.num_recorded
    assert generate(generator, PARAMS["all"]) == generate(plain, PARAMS["all"])
    assert tape.num_recorded > num_recorded


def test_a_generator_that_sleeps_has_no_cache(tiny_model):
    generator = make_generator(tiny_model("shallow"), Tape())
    before = generate(generator, PARAMS["all"])
    generator.load(None, 1)
    assert generator.graphs._cache is None
    assert generate(generator, PARAMS["all"]) == before


def test_nothing_of_a_batch_is_left_in_the_next(tiny_model):
    generator = make_generator(tiny_model("shallow"), Tape())
    found = [generate(generator, PARAMS["all"])]
    for layer in generator.graphs._cache.layers:
        for buffer in layer.buffers:
            buffer.fill_(torch.nan)
    found.append(generate(generator, PARAMS["all"]))
    assert found[0] == found[1]


def test_a_step_that_cannot_be_recorded_is_launched(tiny_model):
    def record(function):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    path = tiny_model("shallow")
    with pytest.warns(UserWarning, match=r"decode step could not be recorded.*: .*not permitted") as warned:
        found = generate(make_generator(path, record), PARAMS["all"])
    assert len(warned) == 1
    assert found == generate(make_generator(path, "launched"), PARAMS["all"])


def test_an_engine_with_graphs_samples_with_graphs(tiny_model, monkeypatch):
    """Its weights in bfloat16 are in the same memory in every call."""
    path, tape = tiny_model("shallow"), record_on_cpu(monkeypatch, Tape())
    config = EngineConfig(cuda_graphs=True, compute_dtype="bfloat16", compile=False)
    seeds = [[row] for row in range(len(PROMPTS))]
    found, num_recorded = [], []
    for is_recorded in (True, False):
        engine = FSDPEngine(str(path), config, num_training_steps=1).initialize()
        rollout = build_rollout(engine, load_tokenizer(path), RolloutConfig(batch_size=8), 64)
        if not is_recorded:
            rollout.generator.graphs._record = None
        rollout.sync()
        for _ in range(3):
            found.append(rollout.generate(PROMPTS, SamplingParams(max_new_tokens=8), seeds))
            num_recorded.append(tape.num_recorded)
    assert all(each == found[0] for each in found)
    assert num_recorded[2] == num_recorded[1] > 0


def test_models_that_have_no_graphs(tiny_model, tmp_path):
    """Layers with a window; scores that are capped or have sinks, without windows; frequencies that may change."""
    found = {name: can_step(load_policy(tiny_model(name))) for name in ("llama", "qwen2-sliding", "mistral", "phi3")}
    for name in ("gemma2", "gpt-oss"):
        path = save_tiny_model(name, tmp_path / name, layer_types=["full_attention"] * 3)
        found[name] = can_step(load_policy(path))
    assert [name for name, can in found.items() if can] == ["llama"]


def test_capped_scores_are_masked(tiny_model, tmp_path, monkeypatch):
    """An engine with graphs samples what one without does."""
    record_on_cpu(monkeypatch, Tape())
    path = save_tiny_model("gemma2", tmp_path, layer_types=["full_attention"] * 3)
    seeds, found = [[row] for row in range(len(PROMPTS))], []
    for graphs in (True, False):
        config = EngineConfig(cuda_graphs=graphs, compute_dtype="bfloat16", compile=False)
        engine = FSDPEngine(str(path), config, num_training_steps=1).initialize()
        rollout = build_rollout(engine, load_tokenizer(path), RolloutConfig(batch_size=8), 64)
        rollout.sync()
        found.append(rollout.generate(PROMPTS, SamplingParams(max_new_tokens=8), seeds))
    assert found[0] == found[1]


@pytest.mark.gpu
def test_samples_on_a_gpu(tiny_model):
    """Rounding differs from a CPU's: launched and replayed steps are compared."""
    found = []
    for record in (CudaRecorder(), None):
        model = load_policy(tiny_model("llama")).to("cuda", torch.bfloat16)
        generator = HFGenerator(model, load_tokenizer(tiny_model("llama")), 6, DecodeGraphs(model, record))
        found.append([generate(generator, PARAMS["all"]) for _ in range(3)])
        assert record is None or any(generator.graphs._steps.values())
    assert found[0] == found[1]
