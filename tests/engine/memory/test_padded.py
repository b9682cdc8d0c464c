"""Plans of models that run padded."""

from transformers import Mamba2Config, Mamba2ForCausalLM

from rlft_fast.config import run_roles
from rlft_fast.engine.memory import plan_memory
from rlft_fast.engine.memory.decisions import _stronger
from tests.trainer.toy import toy_config


def test_a_model_without_attention_is_planned_and_gets_no_sequence_parallelism(tmp_path):
    config = Mamba2Config(
        vocab_size=259, hidden_size=32, num_heads=8, head_dim=8, n_groups=1, num_hidden_layers=1, state_size=8,
        chunk_size=16,
    )  # fmt: skip
    Mamba2ForCausalLM(config).save_pretrained(tmp_path / "model")
    run = toy_config(tmp_path / "model", tmp_path, actor__activation_checkpointing="none")
    assert plan_memory(run, 2, 1e9).fits(1e9)
    assert dict(_stronger(run, run_roles(run)["actor"], 2, set()))["sequence_parallel"] == []


def test_a_tower_that_never_runs_is_planned(tiny_model, tmp_path):
    plan = plan_memory(toy_config(tiny_model("llava-next"), tmp_path), 2, 1e9)
    assert plan.fits(1e9)
