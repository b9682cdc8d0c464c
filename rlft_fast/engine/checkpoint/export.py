"""Export to Hugging Face folders, one file of weights after another."""

import contextlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from rlft_fast.config import Config, load_config, run_roles
from rlft_fast.engine.checkpoint.adapter import CONFIG, WEIGHTS, adapter_config, adapter_stream
from rlft_fast.engine.checkpoint.manager import CheckpointError, CheckpointManager
from rlft_fast.engine.checkpoint.storage import save_weights
from rlft_fast.engine.fsdp import FSDPEngine
from rlft_fast.files import (
    REPLACED,
    TEMPORARY,
    fsync,
    is_apple_double,
    one_at_a_time,
    publish,
    require_no_link,
    write_text,
)
from rlft_fast.models import (
    PolicyModel,
    ValueModel,
    end_token_ids,
    folder_dtype,
    keeps_float32,
    load_tokenizer,
    split_stop,
    token_classifier,
)
from rlft_fast.world import World, forked_rng

# Configuration, tokenizers, licences, and the code that a configuration may name.
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.spm", "*.tiktoken", "*.codes", "tokenizer*", "*.py", "*.md",
           "LICENSE*", "NOTICE*")  # fmt: skip
# An index of other weights, adapters, and what HF `Trainer` leaves.
_LEFT_OUT = ("*.index.json", "*.safetensors*", "adapter_*", "trainer_state.json", "*_results.json")
_CHAT_TEMPLATES = "additional_chat_templates"
OWN_FILES = ".export.json"  # lists the files that an export has written; the first file of an unfinished folder
_LOCK = ".lock"
Dtype = Literal["float32", "bfloat16", "float16"]


def export_hf(
    engine: FSDPEngine,
    output: str | Path,
    *,
    dtype: Dtype | None = None,
    stop: Sequence[str] = (),
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    adapter: bool = False,
) -> None:
    """Writes a folder that plain transformers (and vLLM) load: weights, configuration and tokenizer.

    A critic becomes a token classifier with one label, whose logits are the values.

    Every rank must call it; rank 0 writes. Beside the engine, rank 0 needs memory for one file of weights, and every
    other rank for one weight. Configuration, tokenizer and chat templates are copied from the engine's model folder,
    but no weights of other formats. ``generation_config.json`` of a policy names every token that ended a completion of
    a rollout: the end tokens of the model and of its tokenizer, and the special tokens of ``stop``. The output folder
    gets its name when it is complete.

    Args:
        engine: a policy or a critic, sharded or not.
        output: the folder to write.
        dtype: dtype of the exported weights; None: the dtype in which transformers loads the engine's model folder, or
            float32 if this is another dtype than float32, bfloat16 and float16.
        stop: ``rollout.stop`` of the run. Its texts are not exported, because a configuration has no place for them.
        max_shard_bytes: most bytes of a file of weights; a weight that is larger has a file of its own.
        overwrite: replace the files of an earlier export in the folder, and keep all other files in it.
        adapter: write the adapters alone, as PEFT reads them, in place of a model with the adapters merged.

    Raises:
        ValueError: the folder exists and is not empty; or there are no adapters, or they are a critic's.
        CheckpointError: the folder could not be written, or ``<output>.incomplete`` is not an export's.
    """
    output = _place(Path(output))
    if not overwrite and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists: choose another folder, or delete it")
    config = adapter_config(engine) if adapter else None
    temporary = output.with_name(output.name + TEMPORARY)
    replaced = output.with_name(temporary.name + REPLACED)  # a name that only adds .old may be a folder of the user
    if config is None:
        shards, weights = _ShardWriter(temporary, max_shard_bytes, "model"), engine.named_weights()
        begin = partial(_begin, engine, shards, dtype, stop)
    else:
        shards, weights = _ShardWriter(temporary, sys.maxsize, WEIGHTS), adapter_stream(engine).tensors()
        begin = partial(_begin_adapter, config, shards, dtype)
    attempt = partial(_attempt, engine.world)
    with contextlib.ExitStack() as stack:
        failure = attempt(stack.enter_context, one_at_a_time(output.with_name(output.name + _LOCK)))
        failure = failure or attempt(begin)
        for name, tensor in weights:  # after a failure, too: all ranks gather together
            failure = failure or attempt(shards.add, name, tensor)
        failure = failure or attempt(shards.finish) or attempt(_keep_others_files, output, temporary)
        failure = failure or attempt(publish, temporary, output, replaced)
        if failure is not None:
            attempt(_clear, temporary)

    def fail() -> None:
        if failure is not None:
            raise CheckpointError(f"could not export to {output}: {failure}") from failure

    engine.world.together(fail, CheckpointError)


def _attempt(world: World, function: Callable[..., None], *args: Any) -> Exception | None:
    """Calls the function on rank 0, and returns the error that it raised, if any."""
    try:
        if world.is_first:
            function(*args)
    except Exception as error:  # is raised later, on all ranks together
        return error
    return None


def _begin(engine: FSDPEngine, shards: "_ShardWriter", dtype: Dtype | None, stop: Sequence[str]) -> None:
    """Writes all files but weights, and tells the writer the dtype of weights."""
    source, model = Path(engine.path), engine.model
    _copy_model_files(source, shards.folder)
    own = folder_dtype(source) if dtype is None else None
    dtype = dtype or next((x for x in get_args(Dtype) if getattr(torch, x) == own), "float32")
    shards.dtype, shards.keeps_float32 = getattr(torch, dtype), partial(keeps_float32, model.pretrained)
    head = token_classifier(model.pretrained).config() if isinstance(model, ValueModel) else {}
    _change(shards.folder / "config.json", head | {"dtype": dtype})
    if isinstance(model, PolicyModel):
        _write_end_tokens(shards.folder, model, source, stop)


def _begin_adapter(config: dict[str, Any], shards: "_ShardWriter", dtype: Dtype | None) -> None:
    """As `_begin`, for adapters alone, which are kept in float32."""
    _clear(shards.folder)
    shards.folder.mkdir(parents=True)
    write_text(shards.folder / OWN_FILES, "{}\n")
    shards.dtype = getattr(torch, dtype or "float32")
    write_text(shards.folder / CONFIG, json.dumps(config, indent=2) + "\n")


class _ShardWriter:
    """Writes safetensors files of bounded size, and an index if there are several, under transformers' names."""

    def __init__(self, folder: Path, max_bytes: int, stem: str) -> None:
        self.folder = folder
        self.stem = stem
        self.max_bytes = max_bytes
        self.dtype = torch.float32
        self.keeps_float32: Callable[[str], bool] = lambda name: False
        self.pending: dict[str, Tensor] = {}
        self.shards: list[list[str]] = []
        self.num_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        dtype = torch.float32 if self.keeps_float32(name) else self.dtype
        tensor = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        if dtype == torch.float16 and tensor.isinf().any():
            raise ValueError(f"{name} has numbers above 65504, the largest in float16: name another dtype")
        pending_bytes = sum(weight.nbytes for weight in self.pending.values())
        if self.pending and pending_bytes + tensor.nbytes > self.max_bytes:
            self._flush()
        self.pending[name] = tensor
        self.num_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self._path(len(self.shards))
        save_weights(self.pending, path, {"format": "pt"})
        self.shards.append(list(self.pending))
        self.pending = {}

    def finish(self) -> None:
        self._flush()
        total = len(self.shards)
        if total == 1:
            os.rename(self._path(0), self.folder / f"{self.stem}.safetensors")
            return
        weight_map = {}
        for i, names in enumerate(self.shards):
            file = f"model-{i + 1:05d}-of-{total:05d}.safetensors"
            os.rename(self._path(i), self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        write_text(self.folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")

    def _path(self, index: int) -> Path:
        return self.folder / f"{index}.safetensors"


def _copy_model_files(source: Path, target: Path) -> None:
    _clear(target)
    target.mkdir(parents=True)
    write_text(target / OWN_FILES, "{}\n")
    copied = [path for path in source.iterdir() if _is(path, _COPIED) and not _is(path, (*_LEFT_OUT, OWN_FILES))]
    for path in (*copied, *(source / _CHAT_TEMPLATES).glob("*.jinja")):
        if path.is_file() and not is_apple_double(path):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
            fsync(copy)


def _is(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _change(file: Path, changes: dict[str, Any]) -> None:
    """Sets values in a file of JSON. ``torch_dtype`` is an old name of ``dtype``, and weights are not quantized."""
    values: dict[str, Any] = (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}) | changes
    for part in (values, values.get("text_config") or {}):
        for name in ("torch_dtype", "quantization_config"):
            part.pop(name, None)
    write_text(file, json.dumps(values, indent=2) + "\n")


def _write_end_tokens(folder: Path, model: PolicyModel, source: Path, stop: Sequence[str]) -> None:
    """Names the end tokens of a rollout in generation_config.json."""
    if not any(source.glob("*token*")) and not (source / "vocab.json").is_file():  # no rollout starts without these
        return
    try:
        tokenizer = load_tokenizer(source)
        ids = end_token_ids(model.model.generation_config, tokenizer)
    except ValueError as error:
        warnings.warn(f"generation_config.json of the exported model names no end tokens: {error}", stacklevel=2)
        return
    ids = sorted({*ids, *split_stop(tuple(stop), tokenizer)[0]})
    # transformers reads ids from config.json only where there is no such file.
    named = {name: getattr(model.model.generation_config, name) for name in ("bos_token_id", "pad_token_id")}
    named = {name: token for name, token in named.items() if token is not None}
    _change(folder / "generation_config.json", named | {"eos_token_id": ids[0] if len(ids) == 1 else ids})


def _place(output: Path) -> Path:
    """The folder that an export writes: a link, to another disk for instance, stays."""
    return output.resolve() if output.is_symlink() else output.absolute()


def require_exportable(output: Path) -> None:
    """Raises ValueError if the files of somebody else are where an export writes first. Writes nothing.

    Args:
        output: the folder to export to later.
    """
    output = _place(output)
    require_no_link(output.with_name(output.name + _LOCK))
    _require_own(output.with_name(output.name + TEMPORARY))


def _require_own(temporary: Path) -> None:
    is_own = temporary.is_dir() and ((temporary / OWN_FILES).is_file() or not any(temporary.iterdir()))
    if os.path.lexists(temporary) and (temporary.is_symlink() or not is_own):
        raise ValueError(f"{temporary}, where an export writes first, is not an export's: move it away, or delete it")


def _clear(temporary: Path) -> None:
    """Removes what an export that failed or was killed has left. Raises ValueError if it is somebody else's."""
    _require_own(temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _keep_others_files(output: Path, temporary: Path) -> None:
    """Copies files that no export has written from the old folder to the new one, and lists this export's own files."""
    own = {path.name for path in temporary.iterdir()} | {OWN_FILES}
    earlier = _exported(output)
    for path in output.iterdir() if output.is_dir() else []:
        if path.name not in own | earlier:
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, temporary / path.name)
    write_text(temporary / OWN_FILES, json.dumps({"files": sorted(own)}) + "\n")


def _exported(folder: Path) -> set[str]:
    """Names of what an export has written into the folder."""
    try:
        return {str(name) for name in json.loads((folder / OWN_FILES).read_text(encoding="utf-8"))["files"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # older versions wrote no list
        return {path.name for path in folder.glob("model*.safetensors*")}


def is_export(folder: Path) -> bool:
    """Whether an export has written the folder."""
    return (folder / OWN_FILES).is_file()


def remove_export(folder: Path) -> None:
    """Removes what an export has written into a folder, and the folder if nothing is left in it. A link stays."""
    if not is_export(folder):
        return
    found = {path.name: path for path in folder.iterdir()}
    for name in sorted(_exported(folder) & found.keys() - {OWN_FILES}):
        is_folder = found[name].is_dir() and not found[name].is_symlink()
        shutil.rmtree(found[name]) if is_folder else found[name].unlink()
    (folder / OWN_FILES).unlink()
    if not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()


def export_run(
    run: str | Path, output: str | Path | None = None, dtype: Dtype | None = None, world: World | None = None, *,
    adapter: bool = False,
) -> Path:  # fmt: skip
    """Exports the policy of a run's newest complete checkpoint, without its optimizer.

    Args:
        run: output folder of the run.
        output: folder to write, which must not exist; None: ``hf/`` in the run's folder, or ``adapter/`` for adapters
            alone, which is replaced.
        dtype: dtype of the exported weights, as in `export_hf`.
        world: the processes that export together; None: `World.current()`.
        adapter: see `export_hf`.

    Returns:
        The folder written.

    Raises:
        ValueError: the folder is no run, holds no complete checkpoint or no adapters, or the output exists.
        CheckpointError: the checkpoint cannot be read, or the output cannot be written.
    """
    run = Path(run)
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not the output folder of a run: it has no config.yaml")
    config = load_config(run / "config.yaml")
    manager = CheckpointManager(run / "checkpoints", world=world)
    if not manager.folders():
        raise ValueError(f"{run} has no complete checkpoint to export")
    # The float32 masters of bfloat16 weights are in the optimizer's state, so the engine needs an optimizer.
    num_training_steps = 1 if config.actor.param_dtype == "bfloat16" else None
    # The run may have had more processes than the export, and a schedule of its own is for its number of steps.
    optimizer = config.actor.optimizer.model_copy(update={"schedule": "constant"})
    alone = {"sequence_parallel": 1, "shard_size": -1, "optimizer": optimizer}
    actor = config.actor.model_copy(update=alone)
    head, stop = run_roles(config)["actor"].head, config.rollout.stop if isinstance(config, Config) else ()
    if adapter and actor.lora is None:
        raise ValueError(f"the run in {run} has no adapters, because it has no actor.lora: export its whole model")
    engine = FSDPEngine(config.model, actor, head=head, num_training_steps=num_training_steps, world=manager.world)
    engine.initialize()
    with forked_rng():  # loading a checkpoint would set the caller's random states
        _load_newest(manager, engine)
    target = Path(output) if output else run / ("adapter" if adapter else "hf")
    export_hf(engine, target, dtype=dtype, stop=stop, overwrite=output is None, adapter=adapter)
    return target


def _load_newest(manager: CheckpointManager, engine: FSDPEngine) -> None:
    """Loads the newest checkpoint of a run that may go on, and remove a checkpoint while it is read."""
    while True:
        before = manager.folders()
        try:
            manager.load({"actor": engine})
            return
        except (CheckpointError, ValueError):
            if manager.folders() == before:
                raise
