"""Weights go from safetensors files straight into the shards of a model that was built without memory.

    build_on_meta -> wrap by FSDP -> materialize: memory for this rank's shards -> load_weights: slices of files

No rank ever holds a whole model. transformers' conversion mapping translates the names of a checkpoint's tensors. It
also tells which tensors make up a parameter: the experts of a layer, for example, become one tensor.
"""

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.initialization import no_init_weights

from rlft_fast.errors import brief
from rlft_fast.files import is_apple_double
from rlft_fast.models.weights.quantized import dequantizer_of

_SHOWN = 3  # names in an error message
_SHOWN_KINDS = 12
_SHOWN_CHARACTERS = 200  # of each of them
_LARGE_BYTES = 2**30  # of a tensor that gets no memory while a model is built
_COMPARED_ROWS = 4096  # in one comparison
_BLOCK = re.compile(r".*?\.\d+\.")
# What config.json determines, under names that models had when they stored it.
_RECOMPUTED = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|masked_bias)$")
_HEAD = re.compile(r"(^|\.)lm_head\.(weight|bias)$")
_SHARD = re.compile(r"(?P<name>.+)-\d+-of-(?P<total>\d+)\.safetensors")
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}  # safetensors' names; other floats are scales or packed


def build_on_meta(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A transformers model whose parameters have no memory, but whose buffers (rotary frequencies, ...) are real."""
    # Without initial values, the memory of a parameter is never touched before the parameter moves to meta.
    with _parameters_on_meta(), _LargeOnMeta(), no_init_weights():
        model = build()
    model.tie_weights()  # no_init_weights skips tying, too
    return model.eval()


class _LargeOnMeta(TorchFunctionMode):
    """Inside, `torch.empty` gives no memory to a large tensor. The system refuses memory that it does not have, touched
    or not: the experts of one layer of DeepSeek-V3 are 30 GB in float32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs: dict[str, Any] = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            empty = torch.empty(*args, **kwargs | {"device": "meta"})
            if empty.nbytes > _LARGE_BYTES:
                return empty
        return func(*args, **kwargs)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.detach().to("meta"), param.requires_grad))

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def materialize(model: nn.Module, device: torch.device, buffer_device: torch.device | None = None) -> None:
    """Gives all parameters, or this rank's shards, undefined values on a device. Moves the buffers.

    Tied parameters stay tied.

    Args:
        model: built on the meta device.
        device: device of the parameters.
        buffer_device: device of the buffers; None: the same device.
    """
    created: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in created:
                    empty = torch.empty_like(parameter, device=device)
                    created[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = created[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(buffer_device or device)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._apply(lambda tensor: tensor, recurse=False)  # makes FSDP read its parameters anew


def load_weights(
    folder: str | Path,
    model: PreTrainedModel,
    into: Mapping[str, Tensor] | None = None,
    beside: Mapping[str, Tensor] | None = None,
) -> None:
    """Reads this rank's slices of the weights in a folder. All checks come before the first read.

    Args:
        folder: a folder with safetensors files.
        model: a model, sharded or not, with adapters or not. Its parameters and persistent buffers are filled in their
            own dtypes.
        into: tensors to fill in place of the model's, by the model's names, with the same shapes and placements.
            Tensors of the model that are not named here are not filled.
        beside: further tensors to fill, by their names in the folder. They are no part of the model.

    Raises:
        ValueError: a file is missing or unreadable, a tensor that the model needs is missing, is there twice, has
            another shape or integers in place of floating-point numbers, or the model has no place for a tensor.
    """
    targets = checkpoint_tensors(model) | dict(beside or {})
    sources = _match(Path(folder), model, targets)
    used = {stored.file for source in sources.values() for _, stored in source.parts}
    with contextlib.ExitStack() as stack, torch.no_grad():
        files = {file: stack.enter_context(safe_open(file, "pt")) for file in used}
        for name, source in sources.items():
            _read(files, name, source, model, targets if into is None else into)


def check_weights(folder: str | Path, model: PreTrainedModel, beside: Mapping[str, Tensor] | None = None) -> None:
    """The checks of `load_weights`, without reading. The model may be on the meta device."""
    _match(Path(folder), model, checkpoint_tensors(model) | dict(beside or {}))


def stored_names(folder: Path) -> set[str]:
    """Names of all tensors in a folder's files.

    Raises:
        ValueError: a file is missing or unreadable.
    """
    return {stored.key for stored in _stored(folder)}


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the first floating-point tensor in a folder's files.

    Raises:
        ValueError: a file is missing or unreadable, or has no such tensor.
    """
    for stored in _stored(folder):
        if stored.dtype in _FLOATS:
            with safe_open(stored.file, "pt") as tensors:
                return tensors.get_slice(stored.key)[:0].dtype
    raise ValueError(f"the weights in {folder} have no floating-point numbers")


def checkpoint_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in a checkpoint. Tensors of adapters are left out."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict(keep_vars=True).keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name.replace(".base_layer.", "."): tensor for name, tensor in tensors.items() if "lora_" not in name}


def keeps_float32(model: PreTrainedModel, name: str) -> bool:
    """Whether transformers keeps a tensor in float32 where it loads the model in 16 bits.

    Args:
        model: its class names such tensors, for example biases of routers, which choose experts by small differences.
        name: of the tensor, in the model or in its checkpoint.
    """
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


class CheckpointPart(NamedTuple):
    """Consecutive elements of a tensor of the model, in a tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    """Of the tensor of the checkpoint."""
    start: int
    """Position of the first element in the flattened tensor of the model."""
    is_transposed: bool = False
    """Whether the checkpoint has the last two dimensions in the other order. It is then a whole tensor of the model."""
    offset: int = 0
    """Position of the first element in the flattened tensor of the checkpoint."""
    size: int | None = None
    """Number of elements; None: the tensor of the checkpoint has no others."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape) if self.size is None else self.size


def checkpoint_parts(model: PreTrainedModel) -> dict[str, list[CheckpointPart]]:
    """What the model's original checkpoint format has of each of its `checkpoint_tensors`, by the model's names.

    The weights of each expert are an example, and queries, keys and values in one tensor. Readers other than
    transformers 5 know only the original format. A tensor stays whole, under the model's name, if the checkpoint has
    its elements in another order than transposed or in pieces of rows; and so do those that share a tensor with it.

    Args:
        model: on any device. Only its class, its configuration, and names and shapes of its tensors matter.
    """
    blocks: dict[str, dict[str, tuple[int, ...]]] = {}  # no tensor of a checkpoint is made of tensors of two
    for name, tensor in checkpoint_tensors(model).items():
        block = _BLOCK.match(name)
        blocks.setdefault(block[0] if block else "", {})[name] = tuple(tensor.shape)
    return {name: own for shapes in blocks.values() for name, own in _block_parts(model, shapes).items()}


def _block_parts(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[CheckpointPart]]:
    numbered = _Numbered({name: shape for name, shape in shapes.items() if math.prod(shape)})
    try:
        stored = revert_weight_conversion(model, dict(numbered.tensors))
    except (RuntimeError, ValueError, KeyError):
        stored = {}
    parts: dict[str, list[CheckpointPart]] = {name: [] for name in shapes}
    sharing: list[set[str]] = []  # tensors of the model that are in one tensor of the checkpoint
    for stored_name, made in stored.items():
        found = numbered.parts(stored_name, cast(Tensor, made[0] if isinstance(made, list) else made))
        sharing.append({*found})
        for name, own in found.items():
            parts[name] += own
    whole = {name for name, own in parts.items() if sum(part.numel for part in own) != math.prod(shapes[name])}
    whole |= {name for name, shape in shapes.items() if not math.prod(shape)}
    while more := {name for names in sharing if names & whole for name in names} - whole:
        whole |= more
    return {
        name: [CheckpointPart(name, shapes[name], 0)] if name in whole else sorted(own, key=lambda part: part.start)
        for name, own in parts.items()
    }


class _Numbered:
    """Numbers in place of weights, which show where each row goes.

    A row has two numbers, because converters squeeze dimensions of 1. A vector has one for each element.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.names, self.shapes = [*shapes], [*shapes.values()]
        self.tensors: dict[str, Tensor] = {}
        firsts = [0]
        for name, shape in shapes.items():
            own = (*shape[:-1], 2) if len(shape) > 1 else shape
            self.tensors[name] = torch.arange(firsts[-1], firsts[-1] + math.prod(own)).view(own)
            firsts.append(firsts[-1] + math.prod(own) + 1)  # a gap: no last row precedes a first row
        self.firsts = torch.tensor(firsts[:-1])

    def parts(self, stored_name: str, made: Tensor) -> dict[str, list[CheckpointPart]]:
        """The parts of a tensor of the checkpoint by owner. An owner has none if its elements are in another order."""
        numbers = made.flatten()
        ends = (numbers.diff() != 1).nonzero().flatten() + 1
        bounds = torch.cat([ends.new_zeros(1), ends, ends.new_tensor([len(numbers)])])
        begins, sizes = numbers[bounds[:-1]], bounds.diff()
        owners = torch.bucketize(begins, self.firsts, right=True) - 1
        found: dict[str, list[CheckpointPart]] = {self.names[i]: [] for i in owners.unique().tolist()}
        shapes = [self.shapes[self.names.index(name)] for name in found]
        shape = shapes[0]
        if len(found) == 1 < len(shape) and _equal_transposed(made, self.tensors[next(iter(found))]):
            part = CheckpointPart(stored_name, (*shape[:-2], shape[-1], shape[-2]), 0, is_transposed=True)
            return {next(iter(found)): [part]}
        row, width = (2, shape[-1]) if len(shape) > 1 else (1, 1)  # numbers and elements
        has_rows = all(x[-1:] == shape[-1:] and len(x) > 1 for x in shapes) and made.shape[-1:] == (2,)
        are_pieces = len(sizes) == len(found) or int(sizes.min()) > row  # not single rows in another order
        if not are_pieces or not (has_rows if row == 2 else all(len(x) < 2 for x in shapes)):
            return found
        whole = (*made.shape[:-1], width) if row == 2 else tuple(made.shape)
        starts = begins - self.firsts[owners]
        for owner, start, size, offset in zip(*(x.tolist() for x in (owners, starts, sizes, bounds[:-1])), strict=True):
            part = CheckpointPart(
                stored_name, whole, start // row * width, offset=offset // row * width,
                size=None if len(sizes) == 1 else size // row * width,
            )  # fmt: skip
            found[self.names[owner]].append(part)
        return found


def _equal_transposed(made: Tensor, tensor: Tensor) -> bool:
    return made.shape == tensor.mT.shape and torch.equal(made, tensor.mT)


# ---- which stored tensors make which tensor of the model -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The stored tensors, each with its pattern, that make one tensor of the model. Several need a converter."""

    converter: WeightConverter | None
    parts: list[tuple[str, _Stored]] = field(default_factory=list)

    @property
    def dequantizes(self) -> bool:
        """Whether the parts are quantized numbers and their scales."""
        operations = [] if self.converter is None else self.converter.operations
        return any("Dequantize" in type(operation).__name__ for operation in operations)

    def names(self, first: str) -> list[str]:
        """The names of all tensors that the source makes: a converter may split a stored tensor into several."""
        if self.converter is None:
            return [first]
        patterns = self.converter.target_patterns
        return [first.replace(patterns[0], pattern) for pattern in patterns]


def _match(folder: Path, model: PreTrainedModel, targets: dict[str, Tensor]) -> dict[str, _Source]:
    transforms = get_model_conversion_mapping(model, hf_quantizer=dequantizer_of(model))
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, _Source] = {}
    extra: list[str] = []
    known = dict(model.named_buffers()) | targets  # others than the targets follow from config.json
    # A converter joins experts in the order in which they come. In a file experts.10 comes before experts.2.
    for stored in sorted(_stored(folder), key=lambda stored: dot_natural_key(stored.key)):
        name, pattern = rename_source_key(stored.key, renamings, converters, model.base_model_prefix, known)
        if name not in targets and stored.key in targets:  # as in transformers: a renaming of other names fits it, too
            name, pattern = rename_source_key(stored.key, [], [], model.base_model_prefix, targets)
        if name in targets:
            source = sources.setdefault(name, _Source(None if pattern is None else by_pattern[pattern]))
            source.parts.append((pattern or stored.key, stored))
        elif name not in known:
            extra.append(stored.key)
    _keep_prefixes(model, transforms)
    tied = _tied(targets)
    _check_complete(folder, tied, sources)
    _check_once(folder, sources)
    _check_dtypes(folder, targets, sources)
    _check_tied(folder, tied, sources)
    _check_shapes(folder, targets, sources)
    _check_extra(folder, model, extra, [stored.key for source in sources.values() for _, stored in source.parts])
    return sources


def _keep_prefixes(model: PreTrainedModel, transforms: list[WeightTransform]) -> None:
    """Has `checkpoint_parts` restore the prefixes that the folder's names have and the model's do not.

    transformers writes them for models of ``from_pretrained`` alone. A published LLaVA or Gemma 3 has ``vision_model``
    before the names of its tower, and other readers expect it.
    """
    used = [t.source_patterns for t in transforms if isinstance(t, PrefixChange) and t.was_used()]
    if used:
        own = get_model_conversion_mapping(model, add_legacy=False)
        kept = [t for t in own if not isinstance(t, PrefixChange) or t.source_patterns in used]
        cast(Any, model)._weight_conversions = kept


def _tied(targets: dict[str, Tensor]) -> list[list[str]]:
    """A list of the names of every different tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _check_complete(folder: Path, tied: list[list[str]], sources: dict[str, _Source]) -> None:
    made = {name for first, source in sources.items() for name in source.names(first)}
    missing = [names[0] for names in tied if made.isdisjoint(names)]  # a checkpoint may hold any one of tied tensors
    if missing:
        raise ValueError(
            f"the weights in {folder} lack {name_some(missing)}, which config.json asks for: they would be random; "
            "save or download the model again"
        )


def _check_once(folder: Path, sources: dict[str, _Source]) -> None:
    """Refuses different tensors that are the same tensor of the model, by two of its names."""
    whole = [[stored for _, stored in source.parts] for source in sources.values() if source.converter is None]
    if twice := [f"{x[0].key} and {other.key}" for x in whole for other in x[1:] if not _equal(x[0], other)]:
        raise ValueError(
            f"the weights in {folder} hold different values for one tensor of the model, as {name_some(twice)}: save "
            "or download the model again"
        )


def _check_dtypes(folder: Path, targets: dict[str, Tensor], sources: dict[str, _Source]) -> None:
    wrong = [
        f"{stored.key} in {stored.dtype}"
        for name, source in sources.items()
        for _, stored in source.parts
        if not source.dequantizes and (stored.dtype in _FLOATS) != targets[name].is_floating_point()
    ]
    if wrong:
        raise ValueError(
            f"the weights in {folder} have dtypes that the model's tensors cannot take: {name_some(wrong)}, expected "
            "floating-point numbers for weights. Quantized weights cannot be trained: dequantize the model"
        )


def _check_tied(folder: Path, tied: list[list[str]], sources: dict[str, _Source]) -> None:
    for names in tied:
        stored = [sources[name].parts[0][1] for name in names if name in sources]
        if different := [other.key for other in stored[1:] if not _equal(stored[0], other)]:
            raise ValueError(
                f"config.json ties {name_some([stored[0].key])} and {name_some(different[:1])}, but the weights in "
                f"{folder} hold different values: if the model was trained without the tie, set "
                "tie_word_embeddings to false in config.json"
            )


def _check_shapes(folder: Path, targets: dict[str, Tensor], sources: dict[str, _Source]) -> None:
    pairs = [
        (name, source.parts[0][1].shape, tuple(targets[name].shape))
        for name, source in sources.items()
        if source.converter is None
    ]
    if wrong := [f"{name} {stored} instead of {asked}" for name, stored, asked in pairs if stored != asked]:
        raise ValueError(f"the weights in {folder} have other shapes than config.json asks for: {name_some(wrong)}")


def _check_extra(folder: Path, model: PreTrainedModel, extra: list[str], used: list[str]) -> None:
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()] + [_RECOMPUTED]
    extra = [key for key in extra if not any(pattern.search(key) for pattern in ignored)]
    prefix = f"{model.base_model_prefix}."
    if model.base_model is model:  # which has no head, whatever the names around it are
        extra = [key for key in extra if not _HEAD.search(key)]
    if model.base_model is model and any(key.startswith(prefix) for key in used):  # files of a model with a head
        extra = [key for key in extra if key.startswith(prefix)]
    if extra:
        raise ValueError(
            f"the weights in {folder} hold {name_some(extra)}, for which the {type(model).__name__} of config.json "
            "has no place: weights and config.json are of different models"
        )


def name_some(names: Sequence[str], most: int = _SHOWN) -> str:
    """The first few of many names, for a message."""
    shown = ", ".join(brief(name, _SHOWN_CHARACTERS) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def name_kinds(names: Iterable[str]) -> str:
    """Names for a message that says which there are. What follows the first number in a name is left out."""
    return name_some([*dict.fromkeys(re.sub(r"\.\d+\..*", ".*", name) for name in names)], _SHOWN_KINDS)


# ---- files ----------------------------------------------------------------------------------------------------------


def _stored(folder: Path) -> list[_Stored]:
    """The tensors of the files. If two files have a tensor, it is read from the file that the index names for it."""
    files, named = _files(folder)
    found: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as tensors:
                for key in [*tensors.keys()]:
                    part = tensors.get_slice(key)
                    stored = _Stored(key, file, tuple(part.get_shape()), part.get_dtype())
                    if key in found and named.get(key) not in (file, found[key].file):
                        name = name_some([key])
                        raise ValueError(f"{found[key].file.name} has {name}, too, and the index names neither file")
                    if key not in found or named.get(key) == file:
                        found[key] = stored
        except (OSError, SafetensorError, ValueError) as error:
            raise ValueError(f"cannot load the model in {folder}: {file.name}: {brief(error)}") from error
    return [*found.values()]


def _files(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files of weights, and the file that the index names for each tensor.

    Without a file or an index of the usual name, the folder's only index is read, or all of its files.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single], {}
    if not index.is_file():
        others = [path for path in folder.glob("*.safetensors.index.json") if not is_apple_double(path)]
        if len(others) != 1:
            return _files_without_index(folder), {}
        index = others[0]
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"it names files outside of the folder ({name_some(outside)})")
        paths = [folder / name for name in names]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"cannot load the model in {folder}: {index.name} is damaged: {error}") from error
    if absent := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"cannot load the model in {folder}: {name_some(absent)} of {index.name} are missing")
    return paths, {key: folder / name for key, name in weight_map.items()}


def _files_without_index(folder: Path) -> list[Path]:
    """All files of weights, but the files of Mistral's own format, which hold the weights a second time."""
    found = [path for path in sorted(folder.glob("*.safetensors")) if not is_apple_double(path)]
    files = [path for path in found if not path.name.startswith(("consolidated", "adapter_model"))]
    if not files:
        raise ValueError(
            f"cannot load the model in {folder}: it holds no model.safetensors; save it with save_pretrained "
            "(other formats are not read)"
        )
    shards = [match for path in files if (match := _SHARD.fullmatch(path.name))]
    for name, total in {(match["name"], match["total"]) for match in shards}:
        number = sum((match["name"], match["total"]) == (name, total) for match in shards)
        if number != int(total):
            raise ValueError(
                f"cannot load the model in {folder}: it holds {number} of the {int(total)} files "
                f"{name}-?????-of-{total}.safetensors: download the others"
            )
    return files


def _equal(first: _Stored, other: _Stored) -> bool:
    with safe_open(first.file, "pt") as files, safe_open(other.file, "pt") as other_files:
        own, its = files.get_slice(first.key), other_files.get_slice(other.key)
        return first.shape == other.shape and all(
            torch.equal(own[row : row + _COMPARED_ROWS], its[row : row + _COMPARED_ROWS])
            for row in range(0, first.shape[0], _COMPARED_ROWS)
        )


def _read(
    files: dict[Path, Any], first: str, source: _Source, model: PreTrainedModel, targets: Mapping[str, Tensor]
) -> None:
    if source.converter is None:
        if first in targets:
            stored = source.parts[0][1]
            local, region = local_part(targets[first])
            file = files[stored.file]
            local.copy_(file.get_slice(stored.key)[region] if region else file.get_tensor(stored.key))
        return
    converter = copy.deepcopy(source.converter)
    for pattern, stored in source.parts:
        read = partial(files[stored.file].get_tensor, stored.key)
        converter.add_tensor(first, stored.key, pattern, cast(Any, read))  # convert() reads it
    folder = source.parts[0][1].file.parent
    try:
        # Without a model, dequantized numbers are not rounded to the dtype of its weights.
        made = converter.convert(first, model=None if source.dequantizes else model, config=model.config)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the weights in {folder} that make up {first} do not fit together: {error}") from error
    if empty := [name for name in source.names(first) if name in targets and name not in made]:
        raise ValueError(f"the weights in {folder} that make up {first} have nothing for {name_some(empty)}")
    for name, whole in made.items():
        if name in targets:
            whole = whole[0] if isinstance(whole, list) else whole
            if whole.shape != targets[name].shape:  # some of its parts are missing, or of another model
                shapes = f"{tuple(whole.shape)} instead of {tuple(targets[name].shape)}"
                raise ValueError(f"the weights in {folder} make a {name} of shape {shapes}, which config.json asks for")
            local, region = local_part(targets[name])
            local.copy_(whole[region])


def local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and the region of the whole tensor that the part covers."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(o, o + size) for o, size in zip(offset, shape, strict=True))
