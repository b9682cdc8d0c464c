"""A few blocks of a model tell what all of them need."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AttentionInterface, BloomForCausalLM

from rlft_fast.config import EngineConfig
from rlft_fast.engine import FSDPEngine
from rlft_fast.engine.memory import simulation
from rlft_fast.engine.memory.engine import largest_max_tokens, plan_engine_memory
from rlft_fast.engine.memory.repeats import Repeats, find_repeats
from rlft_fast.engine.memory.simulation import Peaks, Workload, build, pretended_world, run_blocks, simulate
from rlft_fast.engine.memory.trace import MANY_ROWS, Note, Trace
from rlft_fast.engine.memory.tracker import MemoryTracker
from rlft_fast.engine.sharding.build import build_model
from tests.engine.memory.planned import save_config, save_model
from tests.engine.models.every_architecture import small_model
from tests.support.machine.distributed import start_processes
from tests.support.tiny_models import save_tiny_model

LLAMA_70B = Path(__file__).parents[3] / "examples" / "llama_70b"
WINDOWS = ["sliding_attention", "full_attention"]


def all_blocks(work: Workload) -> Peaks:
    with pretended_world(work.world_size) as world:
        trace = run_blocks(work, build(work), world)
    return Peaks(*(max(trace.peaks(at_operator=here).values(), default=0) for here in (False, True)))


def repeats_of(folder: Path) -> Repeats | None:
    return find_repeats(build_model(str(folder), EngineConfig(compute_dtype="bfloat16"), "logprob", trains=True))


@pytest.mark.slow
def test_few_blocks_tell_of_all(tmp_path):
    path = save_model(tmp_path, width=64, num_hidden_layers=12)
    config = EngineConfig(compute_dtype="bfloat16")
    work = Workload(path=str(path), config=config, world_size=4, num_tokens=512, num_micro_batches=2)
    assert repeats_of(path).number == 12
    assert simulate(work) == all_blocks(work)


# The most is needed at the last block's end, at the first one's, or in the head: each grows by other bytes per block.
# Offloaded, gradients do not count; in inference nothing is kept.
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"num_tokens": 2048},
        {"num_tokens": 8, "num_micro_batches": 2},
        {"num_tokens": 8, "config": {"reshard_after_forward": False}},
        {"num_tokens": 512, "config": {"activation_checkpointing": "full", "sequence_parallel": 2}},
        {"num_tokens": 64, "config": {"lora": {"rank": 2}}, "num_micro_batches": 2},
        {"num_tokens": 64, "config": {"lora": {"rank": 2, "target_modules": ["q_proj", "lm_head"]}}},
        {"num_tokens": 64, "config": {"cpu_offload": True}, "offloaded": True},
        {"num_tokens": 512, "trains": False},
        {"num_tokens": 512, "head": "value"},
        {"num_tokens": 512, "config": {"compute_dtype": "float32"}, "world_size": 1},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_few_blocks_tell_of_all_whenever_most_is_needed(options: dict[str, Any], tmp_path):
    path = save_model(tmp_path, width=64, num_hidden_layers=14)
    config = EngineConfig(**{"compute_dtype": "bfloat16"} | options.pop("config", {}))
    work = Workload(path=str(path), config=config, **({"world_size": 4} | options))
    assert simulate(work) == all_blocks(work)


# A pattern of two with one left over; a dense block before the others; blocks of a vision-language model; sliding ones
# after one that sees all.
PATTERNS = {
    "gemma2": ({"num_hidden_layers": 13, "layer_types": [*6 * WINDOWS, WINDOWS[0]]}, (0, 2, 6, 1)),
    "deepseek-v3": ({"num_hidden_layers": 12}, (1, 1, 11, 0)),
    "qwen2-sliding": ({"num_hidden_layers": 12}, (1, 1, 11, 0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_of_blocks(name, tmp_path):
    options, pattern = PATTERNS[name]
    path = save_tiny_model(name, tmp_path, **options)
    found = repeats_of(path)
    assert (found.first, found.period, found.number, found.num_behind) == pattern
    work = Workload(path=str(path), config=EngineConfig(compute_dtype="bfloat16"), world_size=2, num_tokens=256)
    assert simulate(work) == all_blocks(work)


# Too few to leave any out; and enough, but in no order.
@pytest.mark.parametrize("types", [6 * WINDOWS[:1], [WINDOWS[i] for i in (0, 1, 1, 0, 1, 0, 0, 0, 1, 1, 0, 1)]])
def test_without_a_pattern_all_blocks_run(types, tmp_path):
    path = save_tiny_model("gemma2", tmp_path, num_hidden_layers=len(types), layer_types=types)
    assert repeats_of(path) is None


@pytest.mark.slow
@pytest.mark.long
def test_few_blocks_tell_of_80():
    config = EngineConfig(compute_dtype="bfloat16", activation_checkpointing="full")
    work = Workload(path=str(LLAMA_70B), config=config, world_size=1024, num_tokens=16384)
    assert simulate(work) == all_blocks(work)


def test_one_pass_tells_of_all_numbers_of_tokens(tmp_path):
    """A plan and its largest cap ask for five. The slow tests compare with all blocks at other numbers, from 8 on."""
    path = str(save_config(tmp_path, width=64))
    config = EngineConfig(compute_dtype="bfloat16", max_tokens=512)
    simulation._simulate.cache_clear()
    plan_engine_memory(path, config, 4)
    largest_max_tokens(path, config, 4, 1, 2**30)
    assert simulation._simulate.cache_info().misses == 1


def masked_attention(module, query, key, value, attention_mask, **options):
    rows = query.shape[2]
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    output, weights = simulation.whole_sequence_attention(module, query, key, value, attention_mask, **options)
    return output + mask.sum(), weights


def test_a_mask_of_rows_by_rows_is_counted_at_its_size(tmp_path, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, simulation.WHOLE_SEQUENCE, masked_attention)
    path, config = str(save_config(tmp_path, width=32, num_hidden_layers=2)), EngineConfig(compute_dtype="bfloat16")
    for num_tokens in (512, 2048):
        work = Workload(path=path, config=config, world_size=2, num_tokens=num_tokens, trains=False)
        assert simulate(work) == all_blocks(work)
        assert simulate(work).anywhere > num_tokens**2


def test_latent_attention_grows_with_the_tokens(tmp_path):
    """Its values are narrower than its queries, for which torch has only an attention with a matrix of all scores."""
    path, config = str(save_tiny_model("deepseek-v3", tmp_path)), EngineConfig(compute_dtype="bfloat16")
    few, more, most = (
        simulate(Workload(path=path, config=config, world_size=2, num_tokens=num_tokens, trains=False)).anywhere
        for num_tokens in (1 << 12, 1 << 13, 1 << 14)
    )
    assert most - more == 2 * (more - few)


@pytest.mark.slow
def test_a_padded_model_is_planned_from_short_sequences(tmp_path):
    """Its scores grow with the square of the length: in the longest of the short sequences they take a quarter."""
    small_model("bloom", BloomForCausalLM).save_pretrained(tmp_path)
    config = EngineConfig(compute_dtype="bfloat16")
    work = Workload(path=str(tmp_path), config=config, world_size=1, num_tokens=1600)
    assert simulate(work) == all_blocks(work)


# Rows more and rows less a constant: a convolution pads its rows, and differences have one row less.
@pytest.mark.parametrize(("constant", "per_row"), [(7, 2), (0, 3), (-4, 4), (10**12, 10**7)])
def test_a_trace_of_other_rows(constant, per_row):
    many = Trace((Note(("a",), False, constant + per_row * MANY_ROWS), Note(("b",), False, 9)))
    assert many.at(1000).peaks() == {("a",): constant + per_row * 1000, ("b",): 9}


def test_another_model_in_the_same_folder_is_another(tmp_path):
    work = Workload(path=str(tmp_path), config=EngineConfig(), world_size=1, num_tokens=256)
    narrow, wide = (simulate(work) for width in (32, 64) if save_config(tmp_path, width=width))
    assert wide.anywhere > 1.5 * narrow.anywhere


def plan_then_load(rank: int, path: Path, store: Path) -> None:
    simulate(Workload(path=str(path), config=EngineConfig(max_tokens=64), world_size=2, num_tokens=8))
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    engine = FSDPEngine(str(path), EngineConfig(max_tokens=64), num_training_steps=1).initialize()
    loaded = dict(engine.named_weights())
    dist.destroy_process_group()
    assert all(torch.equal(loaded[name], weight) for name, weight in load_file(path / "model.safetensors").items())


@pytest.mark.dist
@pytest.mark.slow
def test_a_plan_leaves_nothing_to_the_run(tiny_model, tmp_path):
    """The plan pretends to be rank 0. Rank 1 loaded rank 0's rows, out of DTensor's cache."""
    start_processes(plan_then_load, 2, tiny_model("llama"), tmp_path / "store")


def test_what_the_setup_made_counts_until_it_is_freed():
    with MemoryTracker("") as tracker:
        kept, freed = torch.zeros(256), torch.zeros(64)
        tracker.begin_pass(offloaded=False)
        made = torch.add(kept, 1)
        del freed
        tracker.mark(("after",))
        del made
        tracker.mark(("end",))
    assert [note.num_bytes for note in tracker.notes] == [1280, 2304, 2048, 1024]
