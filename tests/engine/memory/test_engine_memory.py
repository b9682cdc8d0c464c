"""Plans against what a step really allocates, as torch's allocator reports it to the profiler."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlft_fast.config import EngineConfig, OptimizerConfig
from rlft_fast.data import Batch, Images
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.memory.engine import (
    USABLE,
    head_scratch_bytes,
    inference_bytes,
    largest_max_tokens,
    least_bytes,
    plan_engine_memory,
    prepare,
)
from rlft_fast.engine.memory.simulation import Workload
from rlft_fast.engine.sharding.build import build_model
from rlft_fast.ops.logprob.workspace import scratch_bytes
from rlft_fast.rl import PolicyLoss, ValueLoss
from rlft_fast.world import leaving_process_group
from tests.engine.memory.planned import (
    TOLERANCE,
    full_batch,
    measured_bytes,
    num_bytes,
    save_config,
    save_model,
    state_bytes,
)
from tests.support.machine.distributed import run_distributed
from tests.support.machine.memory import peak_allocated_bytes
from tests.support.tiny_models import IMAGE_TOKEN_ID, save_tiny_model

LLAMA_70B = Path(__file__).parents[3] / "examples" / "llama_70b"


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.thin(2)
def test_plan_is_what_one_process_allocates(tmp_path, checkpointing):
    path = save_model(tmp_path, width=256)
    config = EngineConfig(max_tokens=1024, workspace_mib=16, activation_checkpointing=checkpointing)
    plan = plan_engine_memory(str(path), config, world_size=1, num_micro_batches=2, device_type="cpu")
    engine = FSDPEngine(str(path), config, num_training_steps=9).initialize()
    assert plan.total_bytes == pytest.approx(measured_bytes(engine, full_batch(1024, 2), PolicyLoss()), rel=TOLERANCE)
    assert plan.sent_bytes == 0


def test_offloaded_inputs_leave_the_device(tmp_path):
    """One hidden state of each token and block."""
    path, num_layers = save_config(tmp_path, width=256, num_hidden_layers=2), 2
    full, offloaded = (
        plan_engine_memory(str(path), EngineConfig(max_tokens=1024, activation_checkpointing=mode), 2, 2)
        for mode in ("full", "offload")
    )
    assert offloaded.host == {"activations": 1024 * 256 * 2 * num_layers}
    assert full.host == {}
    assert full.total_bytes - offloaded.total_bytes == offloaded.host["activations"]


def test_plan_of_a_critic(tmp_path):
    path, config = save_model(tmp_path, width=256), EngineConfig(max_tokens=1024)
    plan = plan_engine_memory(str(path), config, world_size=1, device_type="cpu", head="value")
    engine = FSDPEngine(str(path), config, head="value", num_training_steps=9).initialize()
    assert plan.total_bytes == pytest.approx(measured_bytes(engine, full_batch(1024, 1), ValueLoss()), rel=TOLERANCE)


# Of the heads only a policy's has logits.
@pytest.mark.parametrize("head", ["logprob", "value"])
def test_what_inference_takes(head, tmp_path):
    path, config = save_model(tmp_path, width=256), EngineConfig(max_tokens=1024, workspace_mib=16)
    engine, batch = FSDPEngine(str(path), config, head=head).initialize(), full_batch(1024, 2)
    measured = peak_allocated_bytes(lambda: engine.infer(batch, (head,)))
    planned = inference_bytes(str(path), config, 1, "cpu", head)
    workspace = 16 * 2**20 if head == "logprob" else 0  # that it may take, and need not
    assert (1 - TOLERANCE) * measured < planned < (1 + TOLERANCE) * measured + workspace


# Sharded with one micro-batch; with two, between which whole gradients wait, or do not; two copies, nothing sharded;
# twice the tokens, which the two ranks share; and weights offloaded to the memory in which a CPU's are anyway.
CASES = [
    (1, {}), (2, {}), (2, {"reduce_every_micro_batch": True}), (1, {"shard_size": 1}),
    (1, {"sequence_parallel": 2, "max_tokens": 2048}),
    (2, {"sequence_parallel": 2, "max_tokens": 2048, "activation_checkpointing": "full"}), (1, {"cpu_offload": True}),
]  # fmt: skip


def sharded_config(options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(**{"max_tokens": 1024, "compute_dtype": "bfloat16", "workspace_mib": 16} | options)


def planned_bytes(path: Path, num_micro_batches: int, options: dict[str, Any]) -> int:
    arguments = str(path), sharded_config(options), 2, num_micro_batches, "cpu"
    planned = plan_engine_memory(*arguments).total_bytes
    assert least_bytes(*arguments, "logprob", 1 << 62) <= planned
    return planned


def compare(rank: int, path: Path, num_micro_batches: int, options: dict[str, Any], planned: int) -> None:
    config = sharded_config(options)
    engine = FSDPEngine(str(path), config, num_training_steps=9).initialize()
    batch = full_batch(config.max_tokens, 2 // config.sequence_parallel * num_micro_batches)
    # gloo's threads drop a finished collective's tensors when the system next runs them. On a busy machine that is
    # late, which adds to a step's peak and never takes away.
    assert planned == pytest.approx(measured_bytes(engine, batch, PolicyLoss(), steps=3), rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(("num_micro_batches", "options"), CASES, ids=str)
def test_plan_is_what_each_of_two_processes_allocates(num_micro_batches, options, tmp_path):
    path = save_model(tmp_path, width=256)
    planned = planned_bytes(path, num_micro_batches, options)
    run_distributed(compare, 2, path, num_micro_batches, options, planned)


@pytest.mark.slow
def test_ways_to_shard_need_different_memory(tmp_path):
    path = save_model(tmp_path, width=256)
    assert len({planned_bytes(path, *case) for case in CASES[:4]}) == 4


@pytest.mark.slow
def test_ranks_share_the_tokens(tmp_path):
    """Four of them have as many rows each as one has of a quarter of the tokens, and as much head to compute."""
    path, config = str(save_model(tmp_path, width=64)), EngineConfig(max_tokens=4096, compute_dtype="bfloat16")
    whole, quarter, shared = (
        plan_engine_memory(path, config.model_copy(update=changes), 4).memory
        for changes in ({}, {"max_tokens": 1024}, {"sequence_parallel": 4})
    )
    assert shared["activations"] < 0.3 * whole["activations"]
    assert quarter["activations"] <= shared["activations"] < 1.2 * quarter["activations"]  # all-to-all has buffers
    with pytest.raises(ValueError, match="sequence_parallel=3 must divide the 8 attention heads"):
        plan_engine_memory(path, config.model_copy(update={"sequence_parallel": 3}), 3)


# A GPU loses what the CPU's memory gains. bfloat16 weights have masters in the optimizer.
@pytest.mark.parametrize("dtypes", [{}, {"param_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
@pytest.mark.thin(2)
def test_offloaded_parts_are_those_of_the_engine(dtypes, tmp_path):
    path = save_model(tmp_path, width=128, num_hidden_layers=2)
    config = EngineConfig(max_tokens=256, compute_dtype="bfloat16", workspace_mib=16, cpu_offload=True, **dtypes)
    plan = plan_engine_memory(str(path), config, 1)
    with leaving_process_group():
        engine = FSDPEngine(str(path), config, num_training_steps=9).initialize()
        engine.optimizer.zero_grad = lambda **_: None  # to see the gradients after a step
        engine.train_step(full_batch(256, 1), PolicyLoss())
        gradients = num_bytes(parameter.grad for parameter in engine.model.parameters())
        assert plan.host == state_bytes(engine) | {"gradients": gradients}
    assert plan.memory["parameters"] == plan.memory["gradients"] == plan.memory["optimizer"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reduce_every_micro_batch": True}, {"shard_size": 1}], ids=str)
def test_offload_never_needs_more(options, tmp_path):
    path, config = str(save_model(tmp_path, width=128)), sharded_config(options)
    kept, offloaded = (
        plan_engine_memory(path, config.model_copy(update={"cpu_offload": offload}), 2, 2) for offload in (False, True)
    )
    assert kept.host == {}
    state = sum(kept.memory[part] for part in ("parameters", "optimizer"))
    assert offloaded.total_bytes < kept.total_bytes - 0.8 * state  # a unit on its way is there
    assert offloaded.total_bytes + sum(offloaded.host.values()) >= kept.total_bytes


def pictures(name: str) -> tuple[dict[str, Tensor], list[int]]:
    """Inputs of a tower that takes far more than the text does, and the tokens of each run of its images."""
    if name.startswith("qwen"):
        return {"pixel_values": torch.randn(48 * 64, 24), "image_grid_thw": torch.tensor([[1, 48, 64]])}, [12 * 64]
    if name == "mistral3":
        return {"pixel_values": torch.randn(150, 3, 4, 8), "image_sizes": torch.tensor([[4, 8]] * 150)}, [2] * 150
    if name == "gemma3-vision":
        return {"pixel_values": torch.randn(128, 3, 8, 8)}, [4] * 128
    none = torch.zeros(180, dtype=torch.int64)
    return {"pixel_values": torch.randn(180, 1, 3, 8, 8), "rows": none, "cols": none}, [4] * 180


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "idefics3", "mistral3", "gemma3-vision"])
def test_plan_of_a_vision_tower(name, tmp_path):
    path, config = save_tiny_model(name, tmp_path), EngineConfig(max_tokens=1024, workspace_mib=1)
    inputs, runs = pictures(name)
    num_patches = len(inputs["pixel_values"])
    prompt = [7, *chain.from_iterable([*[IMAGE_TOKEN_ID] * run, 8] for run in runs)]
    batch = Batch.from_samples([prompt], [[9] * (1024 - len(prompt))], images=[Images("a", inputs)])
    batch = batch.replace(advantage_T=torch.randn(1024), old_logprob_T=torch.randn(1024))
    with_images, without = (
        plan_engine_memory(str(path), config, 1, num_patches=count, images_per_sequence=len(runs), device_type="cpu")
        for count in (num_patches, 0)
    )
    engine = FSDPEngine(str(path), config, num_training_steps=9).initialize()
    measured = measured_bytes(engine, batch, PolicyLoss())
    # The plan takes all tokens for sampled ones, and the loss holds rows of these alone.
    not_held = with_images.memory["logits workspace"] * len(prompt) / 1024
    assert with_images.total_bytes - not_held == pytest.approx(measured, rel=TOLERANCE)
    assert without.total_bytes < 0.7 * with_images.total_bytes


@pytest.mark.slow
def test_plan_of_70b_on_1024_ranks():
    """The real model, wrapped for 1,024 ranks by the engine's own code."""
    config = EngineConfig(max_tokens=16384, compute_dtype="bfloat16", activation_checkpointing="full")
    plan = plan_engine_memory(str(LLAMA_70B), config, world_size=1024)
    assert plan.num_parameters == 70_553_706_496
    shard = plan.num_parameters / 1024
    assert plan.memory["parameters"] == pytest.approx(4 * shard, rel=0.01)
    assert plan.memory["optimizer"] == 2 * plan.memory["parameters"]
    # What recomputation keeps: each block's input, in two bytes. Beside it a block at work, the head's fields, ...
    inputs = 80 * 16384 * 8192 * 2
    assert inputs < plan.memory["activations"] < 1.6 * inputs
    # Weights in bfloat16 gathered forward and backward, the head only once, and float32 gradients reduced once.
    head = 128256 * 8192
    sent = 2 * (2 * plan.num_parameters - head) + 4 * plan.num_parameters
    assert plan.sent_bytes == pytest.approx(sent, rel=0.01)
    assert 30e9 < plan.total_bytes < 50e9


@pytest.mark.slow
def test_copies_add_up_their_gradients_once_a_step(tmp_path):
    path, options = str(save_model(tmp_path, width=64)), {"compute_dtype": "bfloat16", "shard_size": 2}
    once, every = (
        plan_engine_memory(path, EngineConfig(**options, reduce_every_micro_batch=every), 4, num_micro_batches=3)
        for every in (False, True)
    )
    # Of gradients in float32 a ring of two shards sends half, and after two more micro-batches here.
    assert every.sent_bytes - once.sent_bytes == 2 * 4 * once.num_parameters / 2


def test_gradients_are_as_wide_as_the_weights(tmp_path):
    """Those that are reduced: in float32, and then cast."""
    path, settings = str(save_config(tmp_path, width=64)), {"compute_dtype": "bfloat16", "param_dtype": "bfloat16"}
    config = EngineConfig(max_tokens=256, **settings, workspace_mib=16)
    plan = plan_engine_memory(path, config, 2, device_type="cpu")
    assert plan.memory["gradients"] == plan.memory["parameters"]
    assert plan.memory["optimizer"] == 6 * plan.memory["parameters"]


@pytest.mark.slow
def test_offloaded_moments_are_on_the_host_of_a_gpu(tmp_path):
    path = str(save_model(tmp_path, width=256))
    configs = [sharded_config({"optimizer": {"cpu_offload": moves}}) for moves in (False, True)]
    kept, moved = (plan_engine_memory(path, config, 2, 2, "cuda") for config in configs)
    assert moved.memory == kept.memory | {"optimizer": 0}
    assert (kept.host, moved.host) == ({}, {"optimizer": kept.memory["optimizer"]})
    assert kept.memory["optimizer"] == 8 * kept.num_parameters // 2
    kept, moved = (plan_engine_memory(path, config, 2, 2, "cpu") for config in configs)
    assert moved == kept


@pytest.mark.parametrize(("moment_dtype", "share"), [("bfloat16", 1.0), ("int8", 0.52)])
def test_narrow_moments_take_what_the_engine_allocates(moment_dtype, share, tmp_path):
    path = str(save_model(tmp_path, width=64))
    config = EngineConfig(max_tokens=256, optimizer=OptimizerConfig(moment_dtype=moment_dtype), compile=False)
    engine = FSDPEngine(path, config, num_training_steps=1).initialize()
    state = [x for name, x in engine.state_tensors().items() if name.startswith("optimizer.") and x.dim() > 0]
    plan = plan_engine_memory(path, config, 1, device_type="cpu")
    assert num_bytes(state) == plan.memory["optimizer"]
    assert plan.memory["optimizer"] == pytest.approx(share * plan.memory["parameters"], rel=0.1)


def test_smaller_moments_take_fewer_ranks(tmp_path):
    """Of 16 bytes for each weight, bfloat16 moments leave 12, and moments in the CPU's memory 8."""
    path = str(save_config(tmp_path, width=64))
    sizes = []
    for optimizer in ({}, {"moment_dtype": "bfloat16"}, {"cpu_offload": True}):
        model = build_model(path, sharded_config({"optimizer": optimizer}), "logprob", trains=True)
        memory = 13 * sum(parameter.numel() for parameter in model.parameters()) / 0.6  # of which the state gets 60 %
        for part in (1, 4 / 3):
            config = sharded_config({"optimizer": optimizer, "shard_size": "auto"})
            _, work = prepare(path, config, 4, "cuda", "logprob", trains=True, memory_bytes=int(memory / part))
            sizes.append(work.config.shard_size)
    assert sizes == [2, 2, 1, 2, 1, 1]


def needed_bytes(path: str, config: EngineConfig, max_tokens: int, world_size: int, num_micro_batches: int = 1) -> int:
    config = config.model_copy(update={"max_tokens": max_tokens})
    return plan_engine_memory(path, config, world_size, num_micro_batches).total_bytes


@pytest.mark.slow
def test_largest_cap_fits_and_hardly_more_does(tmp_path):
    path, memory = str(save_model(tmp_path, width=256)), 2.0 * 2**30
    config = EngineConfig(workspace_mib=16)
    largest = largest_max_tokens(path, config, 1, 2, memory)
    assert needed_bytes(path, config, largest, 1, 2) <= USABLE * memory
    assert needed_bytes(path, config, int(1.02 * largest), 1, 2) > USABLE * memory
    assert largest_max_tokens(path, config, 1, 2, memory, other_bytes=0.5 * memory) < 0.5 * largest
    assert largest_max_tokens(path, config, 1, 2, 0.1 * 2**30) == 0
    assert largest_max_tokens(path, config, 1, 2, 1e15) == 1 << 20


def test_on_a_gpu_an_adapted_head_is_copied(tmp_path):
    path, rank = str(save_config(tmp_path, width=64, vocab_size=5003)), 4
    config = EngineConfig(compute_dtype="bfloat16", lora={"rank": rank, "target_modules": ["q_proj", "lm_head"]})
    model = build_model(path, config, "logprob", trains=True)
    work = Workload(path=path, config=config, world_size=1, num_tokens=128)
    for device, copied in {"cuda": 5003 * (64 + rank) * 2, "cpu": 0}.items():
        scratch = scratch_bytes(128, 64 + rank, 5003, torch.bfloat16, device, None, trained_columns=rank)
        assert head_scratch_bytes(model, work, device) == scratch + copied


@pytest.mark.slow
def test_on_a_gpu_the_loss_takes_dlogits_of_all_rows(tmp_path):
    """Of as many as spare the accumulator, and more tokens need it: with a large vocabulary most of all memory."""
    path, dim, vocab = str(save_model(tmp_path, width=64, vocab_size=151936)), 64, 151936
    config = EngineConfig(compute_dtype="bfloat16", max_tokens=3000)
    on_gpu, on_cpu = (plan_engine_memory(path, config, 2, device_type=device) for device in ("cuda", "cpu"))
    scratch = scratch_bytes(3000, dim, vocab, torch.bfloat16, "cuda", None)
    assert on_gpu.memory["logits workspace"] == scratch > 2 * 3000 * vocab
    less = scratch - scratch_bytes(3000, dim, vocab, torch.bfloat16, "cpu", None)
    assert on_gpu.total_bytes - on_cpu.total_bytes == less
    for memory in (1.2e9, 1.8e9, 2.2e9):  # before the dlogits are a GiB, about then, and after
        largest = largest_max_tokens(path, config, 2, 1, memory)
        assert (
            needed_bytes(path, config, largest, 2)
            <= USABLE * memory
            < needed_bytes(path, config, int(1.1 * largest), 2)
        )


def test_ranks_must_divide(tmp_path):
    with pytest.raises(ValueError, match="shard_size is 3, which does not divide the 8 ranks"):
        plan_engine_memory(str(save_config(tmp_path, width=64)), EngineConfig(shard_size=3), 8)
