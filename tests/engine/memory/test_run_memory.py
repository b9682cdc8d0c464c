"""Plans of whole runs against the models of a trainer, and what is advised where one does not fit."""

import re
from functools import partial
from itertools import product
from typing import Any

import pytest
import yaml

from rlft_fast.config import Config, RewardModelConfig
from rlft_fast.engine.memory import simulation
from rlft_fast.engine.memory.decisions import changed
from rlft_fast.engine.memory.engine import USABLE
from rlft_fast.engine.memory.fit import DoesNotFitError, advice, check_run, check_samples, fitting_changes
from rlft_fast.engine.memory.generator import GeneratorMemory
from rlft_fast.engine.memory.run import (
    MemoryPlan,
    largest_actor_max_tokens,
    plan_memory,
    surely_exceeds,
    surely_fits,
)
from rlft_fast.engine.memory.search import Search
from rlft_fast.models import load_policy, load_tokenizer
from rlft_fast.rollout import HFGenerator, Request, SamplingParams
from rlft_fast.trainer.ppo import PPOTrainer
from tests.engine.memory.planned import num_bytes, save_config, save_model
from tests.support.machine.memory import peak_allocated_bytes
from tests.support.tiny_models import save_tokenizer
from tests.trainer.toy import toy_config

GIB = 2**30
WEIGHTS = 159_360  # bytes of the tiny policy
ALL_MODELS = {"algorithm__advantage": "gae", "algorithm__kl_coef": 0.1, "critic__max_tokens": 64}


def phase_bytes(plan: MemoryPlan) -> dict[str, dict[str, int]]:
    return {phase.name: phase.memory for phase in plan.phases}


@pytest.fixture
def config_of(tiny_model, tmp_path):
    """A run with every model, changed by dotted keys."""

    def config(**changes: Any) -> Config:
        options = ALL_MODELS | {"reward__model": str(tiny_model("llama-reward"))} | changes
        return toy_config(tiny_model("llama"), tmp_path, **options)

    return config


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({"rollout__prompts_per_step": 10**9}, "4,000,000,000 answers at once (rollout.prompts_per_step * "),
        ({"rollout__samples_per_prompt": 10**9}, "4,000,000,000 answers at once (rollout.prompts_per_step * "),
        (
            {"evaluation": {"path": "-", "samples_per_prompt": 10**9, "temperature": 1.0}},
            "1,000,000,000 answers at once (evaluation.samples_per_prompt) take at least 256.0 GB",
        ),
    ],
)
def test_more_answers_than_memory_holds(change, keys, tmp_path):
    config = toy_config(tmp_path, tmp_path, **change)
    with pytest.raises(DoesNotFitError, match=re.escape(keys)):
        check_samples(config, 64 * GIB)
    check_samples(config, 2**20 * GIB)


@pytest.mark.slow
def test_phases_and_what_waits_are_those_of_the_trainer(config_of, tiny_model):
    scoring = {name: {"model": str(tiny_model("llama-reward")), "max_tokens": 64} for name in ("helpful", "safe")}
    config = config_of(reward={"models": scoring}, reward__model=None)
    plan = phase_bytes(plan_memory(config, 1, 80 * GIB))
    trainer = PPOTrainer(config)
    engines = trainer.models.engines
    waiting = {}
    for name, engine in engines.items():
        moments = []
        if engine.optimizer is not None:
            engine.optimizer.initialize_state()
            moments = [x for state in engine.optimizer.state.values() for x in state.values() if x.dim()]
        waiting[name] = num_bytes(engine.model.parameters()) + num_bytes(moments)
    assert [*plan] == [
        "generate", "score reward.models.helpful", "score reward.models.safe", "infer actor", "infer reference",
        "infer critic", "update critic", "update actor",
    ]  # fmt: skip
    for name, memory in plan.items():
        active = {"generate": "actor"}.get(name, name.split()[-1])
        assert memory[active] > waiting[active]
        assert {**memory, active: 0} == {**waiting, active: 0}, name
    trainer.close()


@pytest.mark.slow
def test_the_largest_cap_of_a_run_that_trains_a_reward_model(tmp_path):
    architectures = ["LlamaForSequenceClassification"]
    path = save_config(tmp_path, width=64, vocab_size=50_000, architectures=architectures, num_labels=1)
    config = RewardModelConfig.parse({
        "objective": "reward", "model": str(path), "output_dir": "runs/x", "steps": 1,
        "data": {"path": "pairs.jsonl", "max_sequence_tokens": 100}, "actor": {"max_tokens": 512},
    })  # fmt: skip
    largest = largest_actor_max_tokens(config, plan_memory(config, 1, 0.5e9), 1, 0.5e9)
    fits = [
        plan_memory(changed(config, {"actor.max_tokens": cap}), 1, 0.5e9).fits(0.5e9)
        for cap in (largest, int(1.1 * largest))
    ]
    assert fits == [True, False]


def test_an_adapter_needs_no_reference(config_of):
    memory = phase_bytes(plan_memory(config_of(actor__lora={"rank": 2}), 1, 80 * GIB))
    assert [*memory["generate"]] == ["actor", "critic", "reward"]


@pytest.mark.slow
def test_processes_on_one_device_add_up(config_of):
    """Each works at its peak beside the others'. With GPUs of their own they have the same bytes, one by one."""

    def planned(actor: dict[str, float], critic: dict[str, float], device_type: str = "cuda"):
        config = config_of(algorithm__kl_coef=0.0, reward__model=None, cluster={"actor": actor, "critic": critic})
        return phase_bytes(plan_memory(config, 2, 80 * GIB, device_type))

    whole, half, one = {"num_workers": 2, "gpus": 1}, {"num_workers": 2, "gpus": 0.5}, {"num_workers": 1, "gpus": 1}
    apart, shared = planned(whole, whole), planned(half, half)
    of_critic = {name: memory for name, memory in apart.items() if name.endswith("critic")}
    assert {*of_critic} == {"infer critic", "update critic"}
    assert all({*memory} == {"critic"} for memory in of_critic.values())
    assert all("critic" not in memory for name, memory in apart.items() if name not in of_critic)
    peak = max(memory["critic"] for memory in of_critic.values())
    actors_peak = max(sum(memory.values()) for name, memory in apart.items() if name not in of_critic)
    assert [*shared] == [*apart]
    for name, memory in shared.items():
        beside = actors_peak if name in of_critic else peak
        assert sum(memory.values()) == sum(apart[name].values()) + beside
    alone = planned(whole, one)  # a critic that is not sharded, beside the actor's two ranks
    assert alone["update actor"] == apart["update actor"]
    assert alone["update critic"]["critic"] > apart["update critic"]["critic"]
    on_cpus = planned({"num_workers": 2}, {"num_workers": 1}, "cpu")  # one critic for two ranks of the actor
    on_one_cpu = phase_bytes(plan_memory(config_of(algorithm__kl_coef=0.0, reward__model=None), 1, 80 * GIB, "cpu"))
    assert on_cpus["update critic"]["critic"] == -(-on_one_cpu["update critic"]["critic"] // 2)
    assert on_cpus["update actor"]["critic"] == max(memory["critic"] for memory in on_cpus.values())


# The reference and the reward model run as the policy does.
@pytest.mark.parametrize("name", ["actor", pytest.param("critic", marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["cpu_offload", "offload_between_phases"])
@pytest.mark.thin(2)
def test_offload_never_needs_more_in_any_phase(name, how, config_of):
    kept, moved = (plan_memory(config_of(**change), 2, 80 * GIB) for change in ({}, {f"{name}__{how}": True}))
    owners = ["critic"] if name == "critic" else ["actor", "reference", "reward"]
    state = {x: min(phase.memory[x] for phase in kept.phases) for x in owners}
    for before, after in zip(kept.phases, moved.phases, strict=True):
        active = {"generate": "actor", "score": "reward"}.get(after.name, after.name.split()[-1])
        waiting = [x for x in owners if x != active]
        assert [after.memory[x] for x in waiting] == [0] * len(waiting)
        assert after.total_bytes <= before.total_bytes
        on_host = sum(state[x] for x in waiting)
        if active in owners and how == "cpu_offload":
            gradients = moved.engines[active].host["gradients"] if after.name.startswith("update") else 0
            on_host += state[active] + gradients
        elif active in owners and not after.name.startswith("update"):  # weights alone are moved to the GPU
            on_host += moved.engines[active].memory["optimizer"] if active in moved.engines else 0
        assert after.host_bytes == on_host
    on_cpu = plan_memory(config_of(**{f"{name}__{how}": True}), 2, 80 * GIB, "cpu")
    assert on_cpu.host_bytes == 0
    assert on_cpu.phases[-1].memory[name] >= 0.9 * kept.phases[-1].memory[name]


TURNS = {"environment": {"name": "any:Class"}, "data__chat": True, "reward": {}}


@pytest.mark.slow
@pytest.mark.parametrize("has_turns", [False, True], ids=["answers", "turns"])
def test_what_generate_takes(has_turns, tmp_path):
    """The cache is most of it: 16 completions of 448 tokens, 4 layers, 4 heads of 32 keys and values.

    Turns of episodes are kept when they have ended, here all at once.
    """
    path = save_model(tmp_path, width=256, vocab_size=259)
    save_tokenizer(path)
    changes = {
        "rollout__prompts_per_step": 4, "rollout__samples_per_prompt": 4, "rollout__max_prompt_tokens": 64,
        "rollout__max_new_tokens": 384, "actor__max_tokens": 512, **(TURNS if has_turns else {}),
    }  # fmt: skip
    model = load_policy(path)
    planned = GeneratorMemory(toy_config(path, tmp_path, **changes), model, 1, GIB, "cpu").beside_policy_bytes
    generator = HFGenerator(model, load_tokenizer(path), batch_size=64)
    generator.eos_token_ids = []
    requests = [
        Request(row=i, token_ids=[7, i] * 32, seed=seed, max_new_tokens=384, episode=seed if has_turns else None)
        for seed, i in enumerate([i for i in range(4) for _ in range(4)])
    ]
    sample = partial(generator.generate, requests, SamplingParams())
    measured = peak_allocated_bytes(sample)
    assert measured < planned < 1.25 * measured


def test_the_cache_of_a_layer_has_its_own_heads(tiny_model, tmp_path):
    """Of two layers of each kind: two heads of 8 in a window of 4 tokens, and one head of 16."""
    path = tiny_model("gemma4")
    memory = GeneratorMemory(toy_config(path, tmp_path), load_policy(path), 1, GIB, "cpu")
    assert memory._sequence_bytes(10) == 4 * 2 * (2 * 2 * 8 * 4 + 2 * 16 * 10)


def test_samples_of_a_narrower_dtype_need_a_copy_of_the_weights(tmp_path):
    path = save_model(tmp_path, width=64)
    model, sizes = load_policy(path), {"rollout__prompts_per_step": 4, "rollout__batch_size": 1}
    weights = num_bytes(model.parameters())

    def planned(dtype: str, world_size: int) -> int:
        config = toy_config(path, tmp_path, **sizes, actor__compute_dtype="float32", rollout__dtype=dtype)
        return GeneratorMemory(config, model, world_size, GIB, "cpu").beside_policy_bytes

    cache = planned("float32", 1) - 3 * 4 * model.head.weight.shape[0]
    assert planned("bfloat16", 1) - planned("float32", 1) == weights // 2 - cache // 2
    assert [planned(dtype, 2) - planned(dtype, 1) for dtype in ("float32", "bfloat16")] == [weights, weights]


@pytest.mark.slow
def test_share_of_vllm(config_of):
    """It sleeps while the policy learns; a process with GPUs of its own takes nothing; on a CPU it never sleeps."""
    vllm = {
        "rollout__backend": "vllm",
        "rollout__vllm__gpu_memory_utilization": 0.25,
        "actor__compute_dtype": "float32",
    }
    colocated = phase_bytes(plan_memory(config_of(**vllm), 1, 8 * GIB))
    assert {name: memory["vLLM"] for name, memory in colocated.items() if memory["vLLM"]} == {
        "generate": 2 * GIB, "score": 2 * GIB, "sync": WEIGHTS,
    }  # fmt: skip
    apart = config_of(**vllm, rollout__vllm__process="separate", rollout__vllm__transfer="nccl")
    assert {memory["vLLM"] for memory in phase_bytes(plan_memory(apart, 1, 8 * GIB)).values()} == {0}
    on_cpu = phase_bytes(plan_memory(config_of(**vllm, rollout__vllm__cpu_cache_gib=0.5), 1, 8 * GIB, "cpu"))
    assert {memory["vLLM"] for memory in on_cpu.values()} == {GIB // 2 + WEIGHTS}


def test_servers_have_memory_of_their_own(config_of):
    servers = config_of(rollout__backend="vllm", rollout__servers=("http://127.0.0.1:8000",))
    found = phase_bytes(plan_memory(servers, 1, 8 * GIB))
    assert {memory["vLLM"] for memory in found.values()} == {0}
    with_cache = phase_bytes(plan_memory(config_of(), 1, 8 * GIB))  # transformers generates
    assert sum(found["generate"].values()) < sum(with_cache["generate"].values())


def test_vllm_without_room_for_its_weights_is_refused(config_of):
    config = config_of(rollout__backend="vllm", rollout__vllm__gpu_memory_utilization=0.001)
    with pytest.raises(DoesNotFitError, match=r"gpu_memory_utilization 0\.001 gives vLLM .* raise it, or"):
        check_run(config, 1, 0.02 * GIB, "cuda", GIB)
    plan = plan_memory(config, 1, 0.02 * GIB)
    expected = f"No other settings are enough: {plan.refusal}"
    assert advice(config, plan, 1, 0.02 * GIB) == expected


# ---- the gate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_run(tmp_path):
    """Sequences of 16k tokens, which the cap has to hold."""
    path = save_config(tmp_path, width=512, vocab_size=259)

    def config(**changes: Any) -> Config:
        return toy_config(path, tmp_path, **{
            "rollout__backend": "vllm", "rollout__max_new_tokens": 16000, "rollout__max_prompt_tokens": 384,
            "actor__max_tokens": 16384, "actor__compute_dtype": "bfloat16", "actor__workspace_mib": 16,
            "actor__activation_checkpointing": "none", "actor__reduce_every_micro_batch": False, **changes,
        })  # fmt: skip

    return config


def memory_for(config: Config, share: float = 1.0) -> float:
    """Of a device on which an update of the policy fits, or such a share of it."""
    return share * phase_bytes(plan_memory(config, 4, 80 * GIB))["update actor"]["actor"] / USABLE


def settings(message: str) -> dict[str, Any]:
    """What is advised, as it could be pasted behind a command."""
    words = message.split("It fits with ")[1].removesuffix(".").split()
    assert all(word.startswith("--") for word in words[::2])
    return {key.removeprefix("--"): yaml.safe_load(value) for key, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("needed", [{"sequence_parallel": 4}, {"activation_checkpointing": "full"}], ids=str)
def test_the_fastest_of_all_combinations_is_found(needed, long_run):
    """All of them are planned here, of which the search plans one or two."""
    config = long_run()
    memory = memory_for(long_run(**{f"actor__{key}": value for key, value in needed.items()}), 1.01)
    values = {
        "activation_checkpointing": ["selective", "full"], "sequence_parallel": [2, 4],
        "reduce_every_micro_batch": [True],
    }  # fmt: skip
    decisions = [[{}, *({f"actor.{key}": value} for value in few)] for key, few in values.items()]
    planned: list[dict[str, Any]] = []

    def plan(changes: dict[str, Any]) -> MemoryPlan:
        planned.append(changes)
        return plan_memory(changed(config, changes), 4, memory)

    search = Search(config, plan({}), 4, memory, "cuda", 80 * GIB)
    found = search.fastest(search.combinations(decisions), plan)
    assert found is not None
    assert len(planned) <= 4
    everything = [{key: x for part in parts for key, x in part.items()} for parts in product(*decisions)]
    fitting = [changes for changes in everything if plan(changes).fits(memory)]
    assert {} not in fitting
    assert found.changes == min(
        fitting, key=lambda changes: search.seconds(changed(config, changes).for_device("cuda"))
    )


def test_advice_simulates_one_more_step(long_run):
    """Hundreds of combinations are bounded by the plan that does not fit."""
    config = long_run(actor__reduce_every_micro_batch=True)
    memory = memory_for(config, 0.8)
    plan = plan_memory(config, 4, memory)
    before = simulation._simulate.cache_info().misses
    advised = settings(advice(config, plan, 4, memory))
    assert advised
    assert simulation._simulate.cache_info().misses == before + 1
    assert fitting_changes(config, 4, memory, "cuda", 80 * GIB) == advised  # what `train --fit` takes
    assert fitting_changes(changed(config, advised), 4, memory, "cuda", 80 * GIB) == {}


# One setting; several together; a cap that may be lowered; CPUs, which have nowhere to offload to.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "share", "device_type"),
    [({}, 0.8, "cuda"), ({}, 0.3, "cuda"), ({"actor__max_tokens": 40000}, 0.8, "cuda"), ({}, 0.8, "cpu")],
)
@pytest.mark.long
def test_advice_is_followed_by_a_run_that_fits(changes, share, device_type, long_run):
    vllm = {"rollout__vllm__cpu_cache_gib": 0.01, "rollout__vllm__gpu_memory_utilization": 0.8}
    config = long_run(**vllm, **changes)
    memory = memory_for(config, share)
    with pytest.raises(DoesNotFitError) as refused:
        check_run(config, 4, memory, device_type, 80 * GIB)
    advised = settings(str(refused.value))
    assert plan_memory(changed(config, advised), 4, memory, device_type).fits(memory)
    for key in advised:  # none of them can be left out
        fewer = {other: value for other, value in advised.items() if other != key}
        assert not plan_memory(changed(config, fewer), 4, memory, device_type).fits(memory), key
    assert not (device_type == "cpu" and re.search("offload", str(refused.value)))


@pytest.mark.slow
def test_more_ranks_are_named_where_they_help(long_run):
    """Weights and moments of a rank are most of its memory."""
    config = long_run(rollout__backend="hf", rollout__batch_size=1, actor__param_dtype="bfloat16")
    config = changed(config, {"actor.activation_checkpointing": "full", "actor.reduce_every_micro_batch": True})
    plan = plan_memory(config, 2, 80 * GIB)
    memory = plan.worst(80 * GIB).total_bytes / USABLE
    assert plan_memory(config, 2, 1.001 * memory).fits(1.001 * memory)
    assert Search(config, plan, 1, memory, "cuda", 80 * GIB).enough_ranks({}) == 2


@pytest.mark.slow
def test_where_nothing_helps_the_missing_memory_is_named(long_run):
    """At least so much is missing. Larger devices take the run, soon."""
    config, memory, named = long_run(rollout__backend="hf"), 2.0**20, []
    for _ in range(4):
        try:
            check_run(config, 1, memory, "cpu", 80 * GIB)
        except DoesNotFitError as error:
            if "It fits with" in str(error):
                break
            (gigabytes,) = re.findall(r" devices of at least ([\d.]+) GB", str(error))
            named.append(float(gigabytes) * 1e9)
            assert named[-1] > memory
            memory = named[-1] + 1e8
    else:
        pytest.fail(f"still refused with what it named: {named}")


@pytest.mark.slow
def test_what_is_off_the_gpus_must_fit_the_host(config_of):
    config = config_of(actor__cpu_offload=True)
    host = plan_memory(config, 1, GIB).host_bytes
    assert host > 0
    with pytest.raises(DoesNotFitError, match=r"models off the GPUs need .* of the CPU's memory"):
        check_run(config, 1, GIB, "cuda", host)


@pytest.mark.slow
def test_the_missing_memory_of_the_host_is_named(long_run):
    config = long_run(actor__cpu_offload=True, actor__max_tokens=16384, rollout__backend="hf", rollout__batch_size=1)
    with pytest.raises(
        DoesNotFitError, match=r"of the CPU's memory for each rank, and 0\.0 may be used: use .*more memory"
    ):
        fitting_changes(config, 1, 8 * GIB, "cuda", 2**20)


def test_a_rough_estimate_takes_any_shard_size(config_of):
    assert surely_fits(config_of(actor__shard_size=2), 2, 80 * GIB, "cuda", GIB)
    with pytest.raises(ValueError, match="shard_size is 3, which does not divide the 2 ranks"):
        surely_fits(config_of(actor__shard_size=3), 2, 80 * GIB, "cuda", GIB)


# The rough estimate never lets a run through that a plan would refuse. The bound never refuses a run that a plan lets
# through.
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__backend": "vllm"},
        *(
            pytest.param(slow, marks=pytest.mark.slow)
            for slow in ({}, {"actor__compute_dtype": "bfloat16"}, {"actor__max_tokens": 4096})
        ),
    ],
    ids=str,
)
@pytest.mark.thin(2)
def test_what_surely_fits_does_fit(changes, device_type, config_of):
    config, memory = config_of(**changes, rollout__vllm__cpu_cache_gib=0.001), 80.0 * GIB
    while plan_memory(config, 2, memory, device_type).fits(memory):
        assert not surely_exceeds(config, 2, memory, device_type)
        memory *= 0.7
    assert surely_exceeds(config, 2, WEIGHTS, device_type)  # half of the weights, with moments and gradients
    assert not surely_fits(config, 2, memory, device_type, GIB)
    assert surely_fits(config, 2, 80 * GIB, device_type, GIB)
