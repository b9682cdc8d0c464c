"""One pass of each kind on this machine's device: what a GPU's own kernels, FSDP and copies might do otherwise.

On a CPU the same functions run. Where there is a GPU they are marked gpu.
"""

import math

import pytest
import torch
from torch import Tensor

from rlft_fast import demo
from rlft_fast.data import Batch
from rlft_fast.engine import CheckpointManager
from rlft_fast.engine.weight_sync import join_pieces
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import HFGenerator, SamplingParams
from rlft_fast.rollout.types import draw_seeds
from rlft_fast.trainer import train
from tests.engine import reference
from tests.engine.reference import PlainPolicy, make_engine, policy_loss, random_batch
from tests.support.machine.devices import DEVICE, on_device
from tests.support.runs.rollouts import completions_of
from tests.trainer.toy import read_lines, toy_config

pytestmark = on_device
BFLOAT16 = {"compute_dtype": "bfloat16"}
PURE = BFLOAT16 | {"param_dtype": "bfloat16"}
PROMPTS = [[5], [7, 8], [1, 2], list(range(10, 30)), [99, 3, 4]]


def relative_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all tensors as one vector."""
    assert actual.keys() == expected.keys()
    squares = [
        ((actual[n].double().cpu() - x.double().cpu()).square().sum(), x.double().square().sum().cpu())
        for n, x in expected.items()
    ]
    error, size = (sum(column) for column in zip(*squares, strict=True))
    return math.sqrt(error / size)


@pytest.mark.parametrize("model", ["llama", "qwen2-sliding"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_a_step(dtype, model, tiny_model):
    """Hardly further from float64 than plain transformers in the same dtype.

    Fewer key heads, a window, shared prompts, entropy and KL terms; in bfloat16 beside float32 weights.
    """
    engine = make_engine(tiny_model(model), temperature=reference.TEMPERATURE, dtype=dtype)
    assert {parameter.device.type for parameter in engine.model.parameters()} == {DEVICE}
    batch = random_batch()
    engine.train_step(batch, policy_loss())
    actual = reference.gradients(engine)
    exact, plain = (
        PlainPolicy(tiny_model(model), batch, each).gradients(batch, "token-mean")
        for each in (torch.float64, getattr(torch, dtype))
    )
    errors = [relative_error({n: x[n] for n in actual}, {n: exact[n] for n in actual}) for x in (actual, plain)]
    assert errors[0] < 2 * errors[1]  # one is 0.5 to 1.5 times the other by chance


@pytest.mark.parametrize("config", [BFLOAT16, PURE], ids=["mixed", "pure"])
def test_checkpoint_continues(config, tiny_model, tmp_path):
    """The states bit for bit, the step after them but for the order in which a GPU adds."""
    engine, resumed = (make_engine(tiny_model("qwen2-tied"), config=config) for _ in range(2))
    engine.train_step(random_batch(), policy_loss())
    CheckpointManager(tmp_path).save(1, {"actor": engine}, {})
    CheckpointManager(tmp_path).load({"actor": resumed})
    states = [reference.state_of({"actor": each}) for each in (engine, resumed)]
    reference.assert_equal(*states)
    reports = [each.train_step(random_batch(seed=1), policy_loss()) for each in (engine, resumed)]
    for key in ("loss", "grad_norm", "entropy"):
        assert reports[1][key] == pytest.approx(reports[0][key], rel=1e-2, abs=1e-3)


def test_weights_that_are_sent_are_the_masters(tiny_model):
    engine = make_engine(tiny_model("llama"), config=PURE)
    engine.train_step(random_batch(), policy_loss())
    assert engine.optimizer is not None
    masters = {
        name: reference.full(engine.optimizer.state[parameter]["master"]).bfloat16()
        for name, parameter in engine.model.pretrained.named_parameters()
    }
    sent = dict(join_pieces(engine.weight_stream(torch.bfloat16, bucket_bytes=1000).pieces()))
    assert {weight.device.type for weight in sent.values()} == {DEVICE}
    reference.assert_equal(sent, masters)


@pytest.mark.parametrize(("config", "bound"), [({}, 1e-4), (BFLOAT16, 0.2)], ids=["float32", "bfloat16"])
def test_what_is_generated_is_as_likely_as_the_engine_says(config, bound, tiny_model):
    """Padding on the left with a key-value cache, against packed sequences."""
    path = tiny_model("llama")
    engine = make_engine(path, config=config)
    params = SamplingParams(n=2, max_new_tokens=12)
    torch.manual_seed(3)
    seeds = draw_seeds(len(PROMPTS), params.n)
    generator = HFGenerator(engine.model, load_tokenizer(path), batch_size=3)
    groups = completions_of(generator, PROMPTS, params, seeds)
    completions = [each for group in groups for each in group]
    batch = Batch.from_samples([ids for ids in PROMPTS for _ in range(2)], [each.token_ids for each in completions])
    logprob_T = engine.infer(batch, ("logprob",))["logprob"].cpu()
    generated = torch.cat([torch.tensor(each.logprobs) for each in completions])
    assert len(generated) > 20
    assert (logprob_T[batch.loss_mask_T] - generated).abs().max() < bound


def test_run(tiny_model, tmp_path):
    """Two steps of GRPO, a checkpoint, two more, and the export."""
    settings = {"checkpoint__every": 2} | ({} if DEVICE == "cuda" else {"actor__compute_dtype": "bfloat16"})
    train(toy_config(tiny_model("llama"), tmp_path, steps=2, **settings))
    train(toy_config(tiny_model("llama"), tmp_path, steps=4, **settings), resume=True)
    rows = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert (tmp_path / "run" / "hf" / "model.safetensors").is_file()


@pytest.mark.gpu
def test_demo(tmp_path):
    """Three steps of it; `make test-slow` runs all of it on a CPU."""
    try:
        model = demo.smollm2_folder()
    except (ValueError, ImportError) as error:
        pytest.skip(f"the demo's model is not there: {error}")
    paths = demo.write_problems(tmp_path)
    config = demo.demo_config(model, tmp_path / "run", *paths, seed=0)
    train(config.model_copy(update={"steps": 3}))
    rows = [row for row in read_lines(tmp_path / "run" / "metrics.jsonl") if "grad_norm" in row]
    assert len(rows) == 3
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
