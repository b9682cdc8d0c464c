"""Rollouts by a real vLLM, in the training processes and beside them: its samples are those of the policy as it is now.

Processes of their own for each test: vLLM keeps much of its state in the process that it runs in.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from transformers import AddedToken

from rlft_fast.data import Batch
from rlft_fast.engine import FSDPEngine, Piece
from rlft_fast.models import load_tokenizer
from rlft_fast.rollout import Rollout, RolloutError, SamplingParams, Span
from rlft_fast.rollout.types import draw_seeds, make_requests
from rlft_fast.rollout.vllm import weight_sender
from rlft_fast.rollout.vllm.requests import completion_of, vllm_requests
from rlft_fast.trainer import train
from rlft_fast.world.process_group import leave_process_group
from tests.engine.models.test_model_folders import quantize_fp8, quantize_mxfp4
from tests.support.machine.distributed import run_distributed
from tests.support.machine.processes import ROOT
from tests.support.runs.vllm_rollouts import (
    HEADS,
    PROMPTS,
    SAMPLED,
    SMALL,
    check_logprobs,
    kill_generator,
    make_engine,
    make_rollout,
    needs_vllm,
    sample,
    update,
)
from tests.support.tiny_models import EOS_TOKEN_ID, save_tiny_model
from tests.trainer.toy import read_lines, toy_config, toy_values, write_rows


def check_supports(engine: FSDPEngine, rollout: Rollout, prompts: list[list[int]]) -> None:
    """Over what was sampled among the engine has vLLM's probabilities, and over all others."""
    params = SamplingParams(n=30, max_new_tokens=4, temperature=0.7, top_k=6, min_p=0.2, top_p=0.9)
    groups = rollout.generate(prompts, params)
    versions = {span.weight_version for group in groups for sample in group for span in sample.spans}
    assert versions == {rollout.weight_version}
    for batch in check_logprobs(engine, prompts, groups):
        size = (batch.support_TK >= 0).sum(1)[batch.loss_mask_T]
        assert size.min() >= 1
        assert 1 < size.max() <= 6
        over_all = engine.infer(batch.replace(support_TK=None), ("logprob",))["logprob"]
        ratio = (over_all - batch.rollout_logprob_T).exp()[batch.loss_mask_T]
        assert ratio.max() < 1
        assert ratio.mean() < 0.9
    (greedy,) = rollout.generate(prompts[:1], SamplingParams(max_new_tokens=4, temperature=0.0, top_k=6))
    assert greedy[0].support is None


# ---- in the training processes --------------------------------------------------------------------------------------


def vllm_weights(rollout: Rollout) -> dict[str, Tensor]:
    """What vLLM multiplies by, as the policy names it."""
    weights = {}
    for name, weight in rollout.generator.llm.apply_model(lambda model: dict(model.named_parameters()))[0].items():
        if "qkv_proj" in name:
            for part, rows in zip("qkv", weight.split([64, 32, 32]), strict=True):
                weights[name.replace("qkv_proj", f"{part}_proj")] = rows
        elif "gate_up_proj" in name:
            for part, rows in zip(("gate", "up"), weight.chunk(2), strict=True):
                weights[name.replace("gate_up_proj", f"{part}_proj")] = rows
        else:
            weights[name] = weight
    return weights


def check_bits(engine: FSDPEngine, rollout: Rollout) -> None:
    received = vllm_weights(rollout)
    for name, weight in engine.named_weights():
        assert torch.equal(received[name][: len(weight)], weight), name  # vLLM pads the vocabulary


def colocated(rank: int, folder: Path, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    share = [PROMPTS[:4], PROMPTS[4:]][rank]
    for name in names:
        engine = make_engine(folder / name)
        with pytest.raises(ValueError, match=r"max_num_batch_tokens, which vLLM .* did you mean max_num_batched_"):
            make_rollout(engine, engine_options={"max_num_batch_tokens": 512})
        rollout = make_rollout(engine, check_weights=True, engine_options={"max_num_batched_tokens": 512})
        engine_config = rollout.generator.llm.llm_engine.vllm_config  # pyrefly: ignore [missing-attribute]
        assert engine_config.scheduler_config.max_num_batched_tokens == 512
        with pytest.raises(ValueError, match="call sync"):
            rollout.generate(share, SAMPLED)
        for seed in range(3):
            rollout.sync()
            groups = sample(rollout, share)
            assert [len(group) for group in groups] == [3] * len(share)
            check_logprobs(engine, share, groups)
            update(engine, seed)
        rollout.sync()
        check_supports(engine, rollout, share)
        groups = sample(rollout, share)
        assert len({tuple(s.token_ids) for s in groups[0]}) == 3  # samples of a prompt are independent
        assert sample(rollout, share) == groups
        assert sample(rollout, share, seed=1) != groups
        if rank == 0:
            check_prefix_is_shared(rollout, long_prompt=PROMPTS[3])
        check_many_long_prompts(engine, rollout)
        assert torch.get_num_threads() == 1
        check_ends(rollout)
        if name == "llama":
            check_restart(engine, rollout, rank, share)
        check_logits_that_are_not_finite(engine, rollout, share)
        for _ in range(2):  # a run closes it at its end, also where a restart failed after closing it
            rollout.close()


def check_logits_that_are_not_finite(engine: FSDPEngine, rollout: Rollout, share: list[list[int]]) -> None:
    """vLLM samples all the same."""
    with torch.no_grad():
        engine.model.get_parameter("model.model.norm.weight").fill_(torch.nan)
    rollout.sync()
    with pytest.raises(RolloutError, match="the policy's logits are not finite"):
        sample(rollout, share)


def check_prefix_is_shared(rollout: Rollout, long_prompt: list[int]) -> None:
    """Samples of a prompt run its full blocks once, also those that start together."""
    generator, params = rollout.generator, SamplingParams(n=4, max_new_tokens=2)
    requests = make_requests([long_prompt], params, draw_seeds(1, 4))
    asked = vllm_requests(requests, params, generator.model, generator.tokenizer)
    generator.llm.reset_prefix_cache()
    outputs = generator.llm.generate(*asked, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0, 192, 192, 192]


def check_many_long_prompts(engine: FSDPEngine, rollout: Rollout) -> None:
    """More tokens than vLLM runs at once, which are 4096 on a CPU."""
    prompts = [[(i * j) % 256 for j in range(1, 200)] for i in range(1, 33)]
    check_logprobs(engine, prompts, rollout.generate(prompts, SamplingParams(max_new_tokens=7, temperature=0.7)))


def check_ends(rollout: Rollout) -> None:
    """Every rank asks for its own prompts, and one rank asks for none."""
    free = rollout.generate(PROMPTS[:2], SamplingParams(max_new_tokens=8, temperature=0.0))
    tokens = free[0][0].token_ids
    assert len(tokens) == 8
    assert free[0][0].finish_reason == "length"
    rollout.generator.model.eos_token_ids[:] = [tokens[4], EOS_TOKEN_ID]
    (group,) = rollout.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8, temperature=0.0))
    first = tokens.index(tokens[4])
    assert (group[0].token_ids, group[0].finish_reason) == (tokens[: first + 1], "stop")
    assert group[0].logprobs == pytest.approx(free[0][0].logprobs[: first + 1], abs=1e-5)
    rollout.generator.model.eos_token_ids[:] = [EOS_TOKEN_ID]
    name = rollout.generator.tokenizer.convert_ids_to_tokens(tokens[4])
    rollout.generator.tokenizer.add_tokens([AddedToken(name, special=True)])
    (group,) = rollout.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8, temperature=0.0, stop=(name,)))
    assert (group[0].token_ids, group[0].finish_reason) == (tokens[: first + 1], "stop")
    assert rollout.generate([], SAMPLED) == []
    check_stop_text(rollout)


def check_stop_text(rollout: Rollout) -> None:
    """One that is a token of its own: the random model's bytes are seldom text, and parts of characters are none."""
    decode = load_tokenizer(rollout.generator.model.path).decode
    params = SamplingParams(n=32, max_new_tokens=8)
    torch.manual_seed(0)
    free = [sample.token_ids for (group,) in [rollout.generate(PROMPTS[:1], params)] for sample in group]
    counts = Counter(decode([token]) for tokens in free for token in tokens if token < EOS_TOKEN_ID)
    text = next(text for text, _ in counts.most_common() if text.isascii() and text.isalnum())
    torch.manual_seed(0)
    (group,) = rollout.generate(PROMPTS[:1], SamplingParams(n=32, max_new_tokens=8, stop=(text,)))
    ends = [next((i + 1 for i, token in enumerate(tokens) if decode([token]) == text), None) for tokens in free]
    assert any(ends)
    for answer, tokens, end in zip(group, free, ends, strict=True):
        assert answer.token_ids == tokens[:end]
        assert end is None or answer.finish_reason == "stop"


def check_restart(engine: FSDPEngine, rollout: Rollout, rank: int, share: list[list[int]]) -> None:
    """One rank's vLLM breaks. All start theirs again, with the weights of now, and nothing is lost."""
    rollout.sync()
    before = sample(rollout, share)
    if rank == 1:
        del rollout.generator.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    assert sample(rollout, share) == before
    assert rollout.weight_version == 5  # a restart brings no new ones


@pytest.mark.dist
@needs_vllm
@pytest.mark.parametrize("names", [("llama",), pytest.param(("llama", "qwen2-tied"), marks=pytest.mark.long)])
def test_colocated_on_two_processes(names, tmp_path):
    for name in names:
        save_tiny_model(name, tmp_path / name, **HEADS)
    run_distributed(colocated, 2, tmp_path, names)


def bit_for_bit(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    import vllm._custom_ops

    vllm._custom_ops._supports_onednn = False  # its packed weights cannot be read back
    for name, config in (("llama", {"lora": {"rank": 4, "alpha": 8}}), ("qwen2-tied", {})):
        engine = make_engine(folder / name, **config)
        rollout = make_rollout(engine)
        for seed in range(2):
            update(engine, seed)
            rollout.sync()
            check_bits(engine, rollout)
        rollout.close()
        if dist.get_world_size() == 1:
            leave_process_group()  # as `rlft-fast train` does; the next vLLM of this process needs groups of its own


@needs_vllm
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_weights_arrive_bit_for_bit(world_size, tmp_path):
    for name in ("llama", "qwen2-tied"):
        save_tiny_model(name, tmp_path / name, **HEADS | {"attention_bias": False})
    run_distributed(bit_for_bit, world_size, tmp_path)


# ---- beside them ----------------------------------------------------------------------------------------------------


def separate(rank: int, path: Path) -> None:
    torch.set_num_threads(1)
    share = [PROMPTS[:4], PROMPTS[4:]][rank]
    engine = make_engine(path)
    rollout = make_rollout(engine, process="separate", check_weights=True)
    for seed in range(2):
        update(engine, seed)
        rollout.sync()  # compares checksums
        groups = sample(rollout, share)
        check_logprobs(engine, share, groups)
    if rank == 0:
        kill_generator()
    assert sample(rollout, share) == groups
    assert rollout.weight_version == 2  # a restart brings no new ones
    if rank == 1:
        kill_generator()
    update(engine, seed=2)
    rollout.sync()
    check_logprobs(engine, share, sample(rollout, share))
    assert rollout.weight_version == 3
    if rank == 1:
        corrupt_next_piece(pytest.MonkeyPatch())
    with pytest.raises(RolloutError, match=f"{'rank 1: ' * (rank == 0)}.*weights were not received as they were"):
        rollout.sync()
    for _ in range(2):
        rollout.close()


def corrupt_next_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flips a bit between the trainer and the vLLM that reads it."""
    content = weight_sender._content

    def corrupted(piece: Piece) -> tuple[bytes, memoryview]:
        header, data = content(piece)
        monkeypatch.undo()
        return header, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:]))

    monkeypatch.setattr(weight_sender, "_content", corrupted)


@pytest.mark.dist
@pytest.mark.long
@needs_vllm
def test_separate_on_two_processes(tmp_path):
    run_distributed(separate, 2, save_tiny_model("qwen2-tied", tmp_path / "tied", **HEADS))


# ---- mixtures of experts --------------------------------------------------------------------------------------------


def experts(rank: int, path: Path, process: str) -> None:
    torch.set_num_threads(1)
    share = [PROMPTS[:4], PROMPTS[4:]][rank]
    engine = make_engine(path)
    rollout = make_rollout(engine, process=process, check_weights=True)
    for seed in range(2):
        update(engine, seed)
        rollout.sync()
        check_logprobs(engine, share, sample(rollout, share))
    rollout.close()


@pytest.mark.dist
@needs_vllm
@pytest.mark.parametrize("process", [pytest.param("colocated", marks=pytest.mark.long), "separate"])
def test_experts_on_two_processes(process, tmp_path):
    """A layer's are one tensor of the policy, a few for each in its checkpoint, and packed by vLLM."""
    run_distributed(
        experts, 2, save_tiny_model("mixtral", tmp_path / "mixtral", **HEADS, intermediate_size=64), process
    )


# ---- in FP8 ---------------------------------------------------------------------------------------------------------

_QUANTIZED = {"quantization": "fp8_per_channel"}  # of the kinds of FP8, the one that vLLM has kernels for on any CPU


def fp8(rank: int, path: Path, process: str) -> None:
    """vLLM samples by the weights of now, not by those before, although its log-probabilities are 0.1 off."""
    torch.set_num_threads(1)
    engine, before = (make_engine(path, compute_dtype="bfloat16") for _ in range(2))
    rollout = make_rollout(engine, process=process, engine_options=_QUANTIZED)
    for seed in range(2):
        update(engine, seed)
        rollout.sync()
        samples = [
            (prompt, sample)
            for prompt, group in zip(PROMPTS, sample(rollout, PROMPTS), strict=True)
            for sample in group
        ]
        batch = Batch.from_samples(
            [prompt for prompt, _ in samples], [sample.token_ids for _, sample in samples],
            rollout_logprobs=[sample.logprobs for _, sample in samples],
        )  # fmt: skip
        off = [
            (policy.infer(batch, ("logprob",))["logprob"] - batch.rollout_logprob_T)[batch.loss_mask_T].square().mean()
            for policy in (engine, before)
        ]
        assert off[0].sqrt() < off[1].sqrt() / 5, off
        if process == "colocated":
            check_rounded(engine, rollout)
    rollout.close()


def check_rounded(engine: FSDPEngine, rollout: Rollout) -> None:
    """Each weight is the nearest number of e4m3 to the policy's, with a scale for each row."""
    found = rollout.generator.llm.apply_model(lambda model: dict(model.named_parameters()))[0]
    rows = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    weights = dict(engine.named_weights(torch.bfloat16))
    layers = [name.removesuffix("_scale") for name in found if name.endswith("weight_scale")]
    assert len(layers) == 4 * engine.model.backbone.config.num_hidden_layers
    for name in layers:
        layer = name.split(".")[-2]
        weight = torch.cat([weights[name.replace(layer, part)] for part in rows.get(layer, (layer,))]).float()
        scale = found[f"{name}_scale"].reshape(-1, 1)
        assert found[name].dtype == torch.float8_e4m3fn
        off = (found[name].t().float() * scale - weight).abs()
        assert (off <= 2.0**-4 * weight.abs() + 2.0**-10 * scale).all(), name  # half a unit in the last place


@needs_vllm
@pytest.mark.parametrize("process", ["colocated", pytest.param("separate", marks=pytest.mark.long)])
def test_weights_in_fp8_are_those_of_now(process, tmp_path):
    folder = save_tiny_model("llama", tmp_path / "llama", **HEADS, intermediate_size=128, initializer_range=0.1)
    run_distributed(fp8, 1, folder, process)


def policy_of_updates(rank: int, path: Path, process: str) -> None:
    """vLLM has the engine's probabilities, before and after an update."""
    torch.set_num_threads(1)
    engine = make_engine(path)
    rollout = make_rollout(engine, process=process)
    for seed in range(2):
        rollout.sync()
        check_logprobs(engine, PROMPTS, sample(rollout, PROMPTS))
        update(engine, seed)
    rollout.close()


@needs_vllm
@pytest.mark.parametrize("process", ["colocated", pytest.param("separate", marks=pytest.mark.long)])
def test_experts_and_sinks_of_gpt_oss(process, tmp_path):
    """Which vLLM's model writes into its parameters past their loaders."""
    folder = save_tiny_model("gpt-oss", tmp_path / "model", **HEADS, intermediate_size=64)
    run_distributed(policy_of_updates, 1, folder, process)


@needs_vllm
@pytest.mark.parametrize(
    ("name", "quantize", "process"),
    [
        ("llama", quantize_fp8, "colocated"),
        pytest.param("llama", quantize_fp8, "separate", marks=pytest.mark.long),
        pytest.param("gpt-oss", quantize_mxfp4, "separate", marks=pytest.mark.long),
    ],
)
def test_a_folder_of_quantized_weights(name, quantize, process, tmp_path):
    """The policy dequantizes them, and vLLM has the policy's."""
    folder = save_tiny_model(name, tmp_path / "model", **HEADS, intermediate_size=64)
    quantize(folder)
    run_distributed(policy_of_updates, 1, folder, process)


# ---- adapters -------------------------------------------------------------------------------------------------------

LORA = {"rank": 4, "alpha": 8}


def adapted(rank: int, path: Path, process: str) -> None:
    """vLLM gets the bytes of the adapters alone, and has the engine's probabilities after each update and a restart."""
    torch.set_num_threads(1)
    is_alone = dist.get_world_size() == 1
    share = PROMPTS if is_alone else [PROMPTS[:4], PROMPTS[4:]][rank]
    engine = make_engine(path, lora=LORA)
    rollout = make_rollout(engine, process=process, adapter=True, check_weights=not is_alone)
    numels = [p.numel() for name, p in engine.model.named_parameters() if "lora_" in name]
    for seed in range(3):
        rollout.sync()
        assert rollout.sync_bytes == 4 * sum(numels)
        groups = sample(rollout, share)
        batch = check_logprobs(engine, share, groups)[0]
        update(engine, seed)
        assert (engine.infer(batch, ("logprob",))["logprob"] - batch.rollout_logprob_T).abs().max() > 0.01
    rollout.sync()
    check_supports(engine, rollout, share)
    groups = sample(rollout, share)
    if process == "separate":
        kill_generator()
    else:
        del rollout.generator.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    assert sample(rollout, share) == groups
    assert not [*Path("/dev/shm").glob("rlft_fast_adapter_*")]
    rollout.close()


@pytest.mark.dist
@needs_vllm
@pytest.mark.parametrize(("process", "world_size"), [("colocated", 2), ("separate", 1)])
def test_adapters_in_place_of_merged_weights(process, world_size, tmp_path):
    run_distributed(adapted, world_size, save_tiny_model("qwen2-tied", tmp_path / "tied", **HEADS), process)


def adapted_run(rank: int, model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    vllm = {
        "backend": "vllm", "vllm": SMALL | {"adapter": True}, "prompts_per_step": 4, "samples_per_prompt": 8,
        "max_prompt_tokens": 8, "max_new_tokens": 6,
    }  # fmt: skip
    for steps in (8, 16):
        changes = {"actor__lora": LORA, "actor__optimizer__learning_rate": 3e-2}
        train(toy_config(model, folder, steps=steps, rollout=vllm, **changes), resume=steps > 8)
        if steps == 8:
            leave_process_group()


@pytest.mark.dist
@needs_vllm
def test_a_run_learns_with_adapters_in_vllm(tmp_path):
    """Also after it has gone on from a checkpoint."""
    model = save_tiny_model("llama", tmp_path / "model", **HEADS)
    toy_config(model, tmp_path)  # writes the data
    run_distributed(adapted_run, 1, model, tmp_path)
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 17)]
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    assert max(row["mismatch_max"] for row in rows if row["taught_share"]) < 1e-3
    assert {row["sync_mib"] for row in rows} == {rows[0]["sync_mib"]}
    assert rows[0]["sync_mib"] < 0.2


# ---- in a run -------------------------------------------------------------------------------------------------------


def learn(rank: int, model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    vllm = {"backend": "vllm", "vllm": SMALL, "prompts_per_step": 4, "samples_per_prompt": 8, "max_prompt_tokens": 8}
    train(toy_config(model, folder, steps=16, rollout=vllm | {"max_new_tokens": 6}))


@pytest.mark.dist
@pytest.mark.long
@needs_vllm
def test_a_run_learns(tmp_path):
    model = save_tiny_model("llama", tmp_path / "model", **HEADS)
    toy_config(model, tmp_path)  # writes the data
    run_distributed(learn, 2, model, tmp_path)
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 16
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15
    taught = [row for row in rows if row["taught_share"]]  # where all rewards are equal, the update computes nothing
    assert len(taught) > 8
    assert all(row["mismatch_max"] < 1e-3 for row in taught)  # every update arrives before the next samples


def one_after_the_other(rank: int, model: Path, folder: Path) -> None:
    for i, process in enumerate(("colocated", "separate", "colocated")):
        vllm = SMALL | {"process": process}
        changes = {"rollout__backend": "vllm", "rollout__vllm": vllm, "steps": 1}
        assert train(toy_config(model, folder / str(i), **changes))["steps"] == 1
        assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ  # nor does a vLLM of the user's inherit it


@needs_vllm
def test_runs_of_one_process_one_after_the_other(tmp_path):
    """vLLM keeps the environment that it was first started in."""
    run_distributed(one_after_the_other, 1, save_tiny_model("llama", tmp_path / "model", **HEADS), tmp_path)


def kill_generator_for_good(completions: list[str], model: list[str], **_) -> list[float]:
    """Judges held-out answers. After the first step the generator dies, and what it would be started from is gone."""
    kill_generator_for_good.calls += 1
    if kill_generator_for_good.calls == 2:
        kill_generator()
        (Path(model[0]) / "config.json").unlink()
    return [0.0] * len(completions)


kill_generator_for_good.calls = 0


def lose_generator(rank: int, model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    held_out = write_rows(folder / "held_out.jsonl", [{"prompt": "fog", "model": str(model)}])
    judge = f"{Path(__file__)}:kill_generator_for_good"
    evaluation = {"path": str(held_out), "max_new_tokens": 4, "every": 1, "function": judge}
    vllm = SMALL | {"process": "separate"}
    changes = {"evaluation": evaluation, "rollout__backend": "vllm", "rollout__vllm": vllm}
    with pytest.raises(RolloutError, match="could not start"):
        train(toy_config(model, folder, **changes))


@needs_vllm
def test_a_lost_generator_loses_no_step(tmp_path):
    run_distributed(lose_generator, 1, save_tiny_model("llama", tmp_path / "model", **HEADS), tmp_path)
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000001"]


# ---- errors ---------------------------------------------------------------------------------------------------------


TRAINER = """
import sys, time
from pathlib import Path
from tests.support.runs.vllm_rollouts import make_engine, make_rollout

if __name__ == "__main__":
    rollout = make_rollout(make_engine(Path(sys.argv[1])), process="separate")
    print("started", flush=True)
    time.sleep(600)
"""


@needs_vllm
@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the system tells of a parent's end on Linux alone")
def test_vllm_ends_with_a_trainer_that_is_killed(tmp_path):
    """It would hold the memory that the run needs when it goes on."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    command = [sys.executable, str(tmp_path / "trainer.py"), str(save_tiny_model("llama", tmp_path / "model", **HEADS))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        assert "started\n" in iter(trainer.stdout.readline, "")
        children = psutil.Process(trainer.pid).children(recursive=True)
        (engine,) = (child for child in children if "EngineCore" in " ".join(child.cmdline()))
        trainer.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        child.kill()
    assert engine not in alive


def refused(rank: int, path: Path) -> None:
    engine = make_engine(path)
    known = (path / "config.json").read_text()
    (path / "config.json").write_text(json.dumps(json.loads(known) | {"architectures": ["NobodyKnowsForCausalLM"]}))
    with pytest.raises(RolloutError, match="NobodyKnowsForCausalLM"):
        make_rollout(engine)
    (path / "config.json").write_text(known)
    with pytest.raises(RolloutError, match=r"(?s)cache blocks.*too small for one sequence: raise rollout\.vllm\."):
        make_rollout(engine, cpu_cache_gib=1e-5)
    values = toy_values(path, path.parent, rollout__backend="vllm", rollout__vllm={"cpu_cache_gib": 1e5})
    (path.parent / "run.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "rlft_fast", "train", str(path.parent / "run.yaml"), "--no-memory-check"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    message = r"(?s)error: vLLM could not start with .*kv.*lower rollout\.batch_size or rollout\.vllm\.cpu_cache_gib"
    assert re.search(message, ended.stderr), ended.stderr


@needs_vllm
def test_what_vllm_cannot_start(tmp_path):
    run_distributed(refused, 1, save_tiny_model("llama", tmp_path / "model", **HEADS))


@needs_vllm
def test_settings_that_need_gpus(tiny_model):
    engine = make_engine(tiny_model("llama"))
    with pytest.raises(ValueError, match="tensor_parallel is 2: on CPUs"):
        make_rollout(engine, tensor_parallel=2)
    with pytest.raises(ValueError, match="transfer ipc needs GPUs"):
        make_rollout(engine, process="separate", transfer="ipc")


def structured(rank: int, folder: Path) -> None:
    """Texts obey; over what structure and top-k both allow, the engine has vLLM's probabilities."""
    torch.set_num_threads(1)
    engine = make_engine(folder)
    structures = [
        ({"regex": "[a-d]{2,4}"}, lambda text: re.fullmatch("[a-d]{2,4}", text)),
        ({"json_schema": {"enum": ["ab", "cde"]}}, lambda text: json.loads(text) in ("ab", "cde")),
        ({"grammar": 'root ::= ("x" | "yz")+ "!"'}, lambda text: re.fullmatch("(x|yz)+!", text)),
    ]
    with pytest.raises(ValueError, match=r"rollout\.structured cannot be used"):
        make_rollout(engine, structured={"regex": "[a-"})
    rollout = make_rollout(engine, structured=structures[0][0])
    rollout.sync()
    tokenizer = load_tokenizer(engine.path)
    for given, obeys in structures:
        params = SamplingParams(n=30, max_new_tokens=9, temperature=0.7, top_k=6, structured=given)
        groups = rollout.generate(PROMPTS, params)
        whole = [sample for group in groups for sample in group if sample.finish_reason == "stop"]
        assert len(whole) > 20
        assert all(obeys(tokenizer.decode(sample.token_ids, skip_special_tokens=True)) for sample in whole)
        for batch in check_logprobs(engine, PROMPTS, groups):
            assert (batch.support_TK >= 0).sum(1)[batch.loss_mask_T].min() >= 1
    (greedy,) = rollout.generate(PROMPTS[:1], SamplingParams(max_new_tokens=9, temperature=0.0, structured=given))
    assert greedy[0].support is None
    rollout.close()


@needs_vllm
@pytest.mark.dist
def test_completions_obey_a_structure(tmp_path):
    run_distributed(structured, 1, save_tiny_model("llama", tmp_path / "model", **HEADS))


@needs_vllm
def test_one_process_has_no_weights_to_compare(tiny_model):
    with pytest.raises(ValueError, match=r"check_weights compares .* one process has nothing to compare with"):
        make_rollout(make_engine(tiny_model("llama")), check_weights=True)


@needs_vllm
@pytest.mark.parametrize(
    ("interface", "process"), [("start_weight_update", "separate"), ("reload_weights", "colocated")]
)
def test_a_vllm_without_an_interface_is_refused(tiny_model, monkeypatch, interface, process):
    from vllm import LLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if interface == "start_weight_update":
        monkeypatch.delattr(next(base for base in LLM.__mro__ if interface in vars(base)), interface)
    else:  # as it was before it took an iterator
        monkeypatch.setattr(GPUModelRunner, interface, lambda self: None)
    with pytest.raises(ValueError, match=rf"has no (LLM\.)?{interface}\(.*: install a version that does \(0\.30 to"):
        make_rollout(make_engine(tiny_model("llama")), process=process)


def test_a_missing_vllm_is_said(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(ValueError, match="which is not installed: pip install vllm"):
        make_rollout(make_engine(tiny_model("llama")))


# ---- what vLLM reports ----------------------------------------------------------------------------------------------


def test_a_support_is_what_vllm_kept():
    """Of each token: itself, then the most likely ones. The third was sampled among more equal ones than were told."""
    inf, most, rest = float("inf"), math.log(0.6), math.log(0.4)
    told = [[7, 9, 7, 5], [9, 9, 7, 5], [3, 9, 7, 5]]
    logprobs = [[rest, most, rest, -inf], [0.0, 0.0, -inf, -inf], [-1.5, -1.5, -1.5, -1.5]]
    flat_logprobs = SimpleNamespace(token_ids=[*chain(*told)], logprobs=[*chain(*logprobs)])
    output = SimpleNamespace(token_ids=[7, 9, 3], logprobs=flat_logprobs, finish_reason="length")
    with pytest.warns(UserWarning, match=r"a probability of 0\.8925 together"):
        found = completion_of(output, (Span(3, 4),))
    assert found.support.tolist() == [[9, 7, -1, -1], [9, -1, -1, -1], [9, 7, 5, 3]]
    assert found[:4] == ([7, 9, 3], [rest, 0.0, -1.5], "length", (Span(3, 4),))
    assert Batch.from_samples([[1]], [found.token_ids], supports=[found.support]).support_TK.shape == (4, 4)
