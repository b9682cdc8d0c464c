"""Exported folders are what plain transformers loads, and appear whole or not at all."""

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from rlft_fast.cli import main
from rlft_fast.config import Config
from rlft_fast.engine import CheckpointError, CheckpointManager, FSDPEngine, export_hf, export_run, remove_export
from rlft_fast.engine.checkpoint import manager
from rlft_fast.models import load_tokenizer
from tests.engine import reference
from tests.engine.reference import make_engine, names, policy_loss, random_batch
from tests.support.machine.distributed import run_distributed
from tests.support.machine.memory import keep_no_freed_memory, peak_mib, requires_proc
from tests.support.tiny_models import EOS_TOKEN_ID, save_tiny_model

SHARD_BYTES = 30_000  # more than a block's matrix, less than the embedding


def make_run(model: Path, run: Path, **actor) -> FSDPEngine:
    config = Config.parse(
        {
            "model": str(model), "output_dir": str(run), "steps": 1, "data": {"task": "sums"},
            "actor": {"max_tokens": 2000} | actor,
        }
    )  # fmt: skip
    run.mkdir()
    (run / "config.yaml").write_text(config.to_yaml())
    engine = make_engine(model, config={"max_tokens": 2000} | actor)
    engine.train_step(random_batch(), policy_loss())
    CheckpointManager(run / "checkpoints").save(1, {"actor": engine}, {})
    return engine


def trained(path: Path) -> FSDPEngine:
    engine = make_engine(path)
    engine.train_step(random_batch(), policy_loss())
    return engine


def test_the_umask_says_who_may_read(tiny_model, tmp_path):
    before = os.umask(0o027)
    try:
        export_hf(make_engine(tiny_model("llama")), tmp_path / "hf")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "hf").iterdir()} == dict.fromkeys(
        [path.name for path in (tmp_path / "hf").iterdir()], "0o640"
    )


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_files_of_bounded_size(name, tiny_model, tmp_path):
    engine = trained(tiny_model(name))
    export_hf(engine, tmp_path / "hf", max_shard_bytes=SHARD_BYTES)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    total = f"{len(files):05d}"
    assert [path.name for path in files] == [f"model-{i + 1:05d}-of-{total}.safetensors" for i in range(len(files))]
    for path in files:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dictionary)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= SHARD_BYTES
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    weights = reference.weights(engine)
    assert index["weight_map"].keys() == weights.keys()
    assert index["metadata"]["total_size"] == sum(weight.nbytes for weight in weights.values())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    reference.assert_equal(dict(model.named_parameters()), weights)
    ids = torch.arange(12)[None]
    engine.model.model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, engine.model.model(input_ids=ids).logits)


def test_bfloat16(tiny_model, tmp_path):
    """Of a folder with weights in another format, too, whose configuration names the dtype as it once was called."""
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    before = names(path)
    config = json.loads((path / "config.json").read_text()) | {"torch_dtype": "float16"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "pytorch_model.bin").write_bytes(b"weights")
    engine = trained(path)
    export_hf(engine, tmp_path / "hf", dtype="bfloat16")
    assert names(tmp_path / "hf") == [".export.json", *before]
    assert "torch_dtype" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    expected = {name: weight.bfloat16() for name, weight in reference.weights(engine).items()}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    reference.assert_equal(dict(model.named_parameters()), expected)


@pytest.mark.parametrize(
    ("stored", "named", "expected"),
    [
        ("bfloat16", "bfloat16", "bfloat16"), ("float16", "float16", "float16"), ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", None, "bfloat16"),  # old configurations name none
        ("float32", "float64", "float32"),  # the engine has no more digits
    ],
)  # fmt: skip
def test_the_dtype_is_that_of_the_model_folder(stored, named, expected, tiny_model, tmp_path):
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, stored)).save_pretrained(path)
    config = json.loads((path / "config.json").read_text()) | {"dtype": named}
    (path / "config.json").write_text(json.dumps(config))
    engine = trained(path)
    export_hf(engine, tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    weights = {name: weight.to(getattr(torch, expected)) for name, weight in reference.weights(engine).items()}
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, expected)}
    reference.assert_equal(dict(model.named_parameters()), weights)


def test_biases_of_routers_stay_in_float32(tiny_model, tmp_path):
    """As transformers loads them beside weights in bfloat16: experts are chosen by small differences."""
    engine = make_engine(tiny_model("deepseek-v3"))
    biases = {name: x for name, x in engine.model.model.named_buffers() if name.endswith("e_score_correction_bias")}
    for bias in biases.values():
        bias.copy_(torch.linspace(0.1, 0.2, len(bias)))
        assert not torch.equal(bias, bias.bfloat16().float())
    export_hf(engine, tmp_path / "hf", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    reference.assert_equal({name: model.get_buffer(name) for name in biases}, biases)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    narrow = make_engine(tmp_path / "hf", config={"param_dtype": "bfloat16", "compute_dtype": "bfloat16"})
    reference.assert_equal({name: narrow.model.model.get_buffer(name) for name in biases}, biases)


def test_numbers_that_float16_does_not_hold(tiny_model, tmp_path):
    engine = make_engine(tiny_model("llama"))
    with torch.no_grad():
        engine.model.model.model.norm.weight[0] = 70000.0
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has numbers above 65504, .* name another dtype"):
        export_hf(engine, tmp_path / "hf", dtype="float16")
    assert names(tmp_path) == []


def test_what_is_copied(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    foreign = ["tf_model.h5", "model.onnx", "pytorch_model.bin", "pytorch_model.bin.index.json", "rust_model.ot",
               "flax_model.msgpack", "model-Q4.gguf", "trainer_state.json", "training_args.bin", "consolidated.pth",
               "model.safetensors.index.json"]  # fmt: skip
    for name in foreign:
        (path / name).write_text("{}")
    other = ["LICENSE", "README.md", "merges.txt", "tekken.json", "tokenizer.model.v3"]
    for name in other:
        (path / name).write_text(name)
    templates = path / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("{{ messages }}")
    for name in ("config.json", "model.safetensors"):
        (path / f"._{name}").write_bytes(b"Mac OS X")
    export_hf(make_engine(path), tmp_path / "hf")
    assert names(tmp_path / "hf") == sorted([".export.json", templates.name, *names(tiny_model("llama")), *other])
    assert load_tokenizer(tmp_path / "hf").get_chat_template("rag") == "{{ messages }}"
    assert (tmp_path / "hf" / "tekken.json").read_text() == "tekken.json"


def test_a_damaged_tokenizer_is_told(tiny_model, tmp_path):
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    engine = make_engine(path)
    (path / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match=r"names no end tokens: cannot load a tokenizer from .*: tokenizer\.json is"):
        export_hf(engine, tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    reference.assert_equal(dict(exported.named_parameters()), reference.weights(engine))


def greedy(folder: Path, **options) -> list[int]:
    """By plain transformers with the folder's own end tokens, unless `options` have others."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"do_sample": False, "max_new_tokens": 16} | options
    return model.generate(torch.tensor([[5, 6, 7]]), **options)[0, 3:].tolist()


@pytest.mark.parametrize("file", [True, False], ids=["generation_config", "config"])
@pytest.mark.parametrize("by", ["the tokenizer", "rollout.stop", "the model"])
def test_the_exported_model_stops_where_the_rollout_did(by, file, tiny_model, tmp_path):
    """The sixth token ends completions, and only one of the three knows it."""
    path = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tokens = greedy(path, eos_token_id=None)
    end = next(token for token in tokens[5:] if token < EOS_TOKEN_ID)
    tokenizer = load_tokenizer(path)
    (text,) = tokenizer.convert_ids_to_tokens([end])
    tokenizer.add_special_tokens(
        {"eos_token": text} if by == "the tokenizer" else {"additional_special_tokens": [text]}
    )
    tokenizer.save_pretrained(path)
    for name in ("generation_config.json", "config.json"):
        values = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(values | {"eos_token_id": [end] if by == "the model" else [258]}))
    if not file:
        (path / "generation_config.json").unlink()
    until = tokens[: tokens.index(end) + 1]
    assert (greedy(path) == until) == (by == "the model")
    export_hf(make_engine(path), tmp_path / "hf", stop=[text] if by == "rollout.stop" else [])
    assert greedy(tmp_path / "hf") == until


def check_memory(rank: int, model: Path, output: Path) -> None:
    keep_no_freed_memory()  # before there is any
    engine = make_engine(model, num_training_steps=None)
    total_mib = sum(weight.numel() for weight in engine.model.parameters()) * 2 / 2**20

    def export() -> None:
        export_hf(engine, output, dtype="bfloat16", max_shard_bytes=8 << 20, overwrite=True)

    assert total_mib > 36
    # A file of at most 8 MiB, and the weight after it in bfloat16, 4 MiB. A copy of the weight in float32 has 8 MiB.
    assert peak_mib(export) < 13


@pytest.mark.dist
@requires_proc
def test_memory_is_that_of_one_file(tmp_path):
    """In a process of its own, because memory that earlier tests left to malloc moves the figure by megabytes."""
    sizes = {"hidden_size": 256, "intermediate_size": 8192, "num_hidden_layers": 3}
    model = save_tiny_model("llama", tmp_path / "model", **sizes)
    run_distributed(check_memory, 1, model, tmp_path / "hf")


def test_a_folder_in_use_is_not_replaced(tiny_model, tmp_path):
    engine = make_engine(tiny_model("llama"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("text")
    with pytest.raises(ValueError, match="mine exists: choose another folder, or delete it"):
        export_hf(engine, tmp_path / "mine")
    with pytest.raises(ValueError, match=r"thesis.tex exists: choose another folder"):
        export_hf(engine, tmp_path / "mine" / "thesis.tex")
    assert names(tmp_path) == ["mine"]
    assert names(tmp_path / "mine") == ["thesis.tex"]


def test_nothing_else_is_touched(tiny_model, tmp_path):
    """A folder that a user moved aside stays. The remains of a killed export go."""
    engine = make_engine(tiny_model("llama"))
    (tmp_path / "hf.old").mkdir()
    (tmp_path / "hf.incomplete").mkdir()
    (tmp_path / "hf.incomplete" / "7.safetensors").write_bytes(b"half of")
    (tmp_path / "hf.incomplete" / ".export.json").write_text("{}")
    for _ in range(2):  # a new folder, and one that is replaced
        export_hf(engine, tmp_path / "hf", overwrite=True)
        assert names(tmp_path) == ["hf", "hf.old"]
        assert names(tmp_path / "hf") == [".export.json", *names(tiny_model("llama"))]


def test_a_folder_with_the_name_of_an_unfinished_export_is_kept(tiny_model, tmp_path):
    engine = make_engine(tiny_model("llama"))
    notes = tmp_path / "hf.incomplete" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(
        CheckpointError, match=r"hf\.incomplete, where an export writes first, is not an export's: move"
    ):
        export_hf(engine, tmp_path / "hf")
    assert notes.read_text() == "mine"
    assert names(tmp_path) == ["hf.incomplete"]


def test_an_export_waits_for_another_one(tiny_model, tmp_path):
    engine = make_engine(tiny_model("llama"))
    holds = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", holds, str(tmp_path / "hf.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        exporting = threading.Thread(target=export_hf, args=(engine, tmp_path / "hf"), daemon=True)
        exporting.start()
        exporting.join(0.3)
        assert names(tmp_path) == ["hf.lock"]
        other.communicate("\n")
    exporting.join(30)
    assert names(tmp_path) == ["hf"]
    assert names(tmp_path / "hf") == [".export.json", *names(tiny_model("llama"))]


def test_a_run_that_goes_on_can_be_exported(tiny_model, tmp_path, monkeypatch):
    """Between the check of a checkpoint and its loading, the run saves the next one and removes this one."""
    engine = make_run(tiny_model("llama"), tmp_path / "run")
    load = CheckpointManager._load

    def overtaken(self, folder, engines):
        if folder.name == "step_00000001":
            engine.train_step(random_batch(seed=1), policy_loss())
            CheckpointManager(folder.parent, max_num=1).save(2, {"actor": engine}, {})
        return load(self, folder, engines)

    monkeypatch.setattr(CheckpointManager, "_load", overtaken)
    exported = AutoModelForCausalLM.from_pretrained(export_run(tmp_path / "run"))
    reference.assert_equal(dict(exported.named_parameters()), reference.weights(engine))


def test_a_checkpoint_that_a_run_removes_is_not_called_damaged(tiny_model, tmp_path, monkeypatch):
    engine, folder = make_run(tiny_model("llama"), tmp_path / "run"), tmp_path / "run" / "checkpoints"
    find_damage = manager.find_damage

    def overtaken(checkpoint, files):
        if checkpoint.name == "step_00000001":
            CheckpointManager(folder, max_num=1).save(2, {"actor": engine}, {})
        return find_damage(checkpoint, files)

    monkeypatch.setattr(manager, "find_damage", overtaken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_run(tmp_path / "run")
        monkeypatch.setattr(manager, "find_damage", lambda checkpoint, files: shutil.rmtree(checkpoint) or "gone")
        with pytest.raises(CheckpointError, match="step_00000002 was removed while it was read"):
            CheckpointManager(folder).load({"actor": engine})


def test_a_link_to_another_disk_stays(tiny_model, tmp_path):
    engine = make_engine(tiny_model("llama"))
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hf").symlink_to(tmp_path / "disk" / "hf")
    for _ in range(2):
        export_hf(engine, tmp_path / "run" / "hf", overwrite=True)
        assert (tmp_path / "run" / "hf").is_symlink()
        assert (names(tmp_path / "run"), names(tmp_path / "disk")) == (["hf"], ["hf"])
    (tmp_path / "run" / "hf" / "notes.txt").write_text("mine")
    remove_export(tmp_path / "run" / "hf")
    assert (names(tmp_path / "run"), names(tmp_path / "disk" / "hf")) == (["hf"], ["notes.txt"])


def test_a_list_of_files_names_none_outside(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "thesis.tex").touch()
    (tmp_path / "best" / ".export.json").write_text('{"files": ["../thesis.tex", "..", ".", "config.json", 3, null]}')
    remove_export(tmp_path / "best")
    assert names(tmp_path) == ["thesis.tex"]


def test_what_cannot_be_written_leaves_the_older_one(tiny_model, tmp_path):
    engine = make_engine(tiny_model("llama"))
    export_hf(engine, tmp_path / "hf")
    before = names(tmp_path / "hf")
    engine.path = str(tmp_path / "gone")  # the tokenizer's files cannot be copied
    with pytest.raises(CheckpointError, match=r"could not export to .*hf: .*gone"):
        export_hf(engine, tmp_path / "hf", overwrite=True)
    assert names(tmp_path) == ["hf"]
    assert names(tmp_path / "hf") == before
    (tmp_path / "file").write_text("where the folder should be")
    with pytest.raises(CheckpointError, match="could not export to"):
        export_hf(engine, tmp_path / "file" / "hf")


def test_export_run(tiny_model, tmp_path, capsys):
    engine = make_run(tiny_model("llama-tied"), tmp_path / "run")
    torch.manual_seed(3)
    expected_draw = torch.rand(2)
    torch.manual_seed(3)
    for _ in range(2):  # the run's own folder is replaced
        assert export_run(tmp_path / "run") == tmp_path / "run" / "hf"
    assert torch.equal(torch.rand(2), expected_draw)
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "elsewhere")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'elsewhere'}\n"
    for folder in (tmp_path / "run" / "hf", tmp_path / "elsewhere"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        reference.assert_equal(dict(model.named_parameters()), reference.weights(engine))
        assert (folder / "tokenizer.json").is_file()
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "half")]) == 1


@pytest.mark.parametrize(
    "actor", [{"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}, {"lora": {"rank": 4}}], ids=["masters", "lora"]
)
def test_export_run_of_masters_and_adapters(actor, tiny_model, tmp_path):
    """The float32 masters of bfloat16 weights, and adapters merged. A schedule of the run's own is not asked again."""
    engine = make_run(tiny_model("llama"), tmp_path / "run", **actor)
    (tmp_path / "schedules.py").write_text("def falling(step, num_steps):\n    return 1 - step / (num_steps - 1)\n")
    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    config["actor"]["optimizer"] = {"schedule": f"{tmp_path / 'schedules.py'}:falling"}
    (tmp_path / "run/config.yaml").write_text(yaml.safe_dump(config))
    folder = export_run(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = reference.weights(engine)
    reference.assert_equal(dict(model.named_parameters()), weights)
    start = reference.weights(make_engine(tiny_model("llama")))
    assert any(not torch.equal(weights[name], start[name]) for name in weights)


@pytest.mark.parametrize("name", ["gemma2", "deepseek-v3", "mixtral", "qwen2.5-vl", "qwen3-vl-moe"])
def test_other_architectures(name, tiny_model, tmp_path):
    """Also where a checkpoint's names and tensors are not those of the model in memory."""
    engine = make_engine(tiny_model(name))
    engine.train_step(random_batch(), policy_loss())
    export_hf(engine, tmp_path / "hf")
    kind = getattr(transformers, type(engine.model.model).__name__)
    model, report = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values())
    reference.assert_equal(model.state_dict(), engine.model.model.state_dict())
    files = [folder / "model.safetensors" for folder in (tmp_path / "hf", tiny_model(name))]
    with safe_open(files[0], "pt") as ours, safe_open(files[1], "pt") as original:
        assert {*original.keys()} >= {*ours.keys()} >= {*original.keys()} - {"lm_head.weight"}  # may be tied


def test_export_of_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.yaml"):
        export_run(tmp_path)
