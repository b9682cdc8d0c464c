"""``EngineState``: the model and the optimizer of an engine on this rank. They are built, moved and read here."""

import contextlib
import warnings
import zlib
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlft_fast.config import EngineConfig, HeadKind
from rlft_fast.engine.optimizer import Optimizer, build_optimizer, load_masters, named_parameters
from rlft_fast.engine.schedule import Schedule
from rlft_fast.engine.sharding import (
    build_model,
    describe_units,
    drop_graphs,
    freeze,
    move_gradients,
    multiply_in_float8,
    prepare_blocks,
    require_float8,
    require_graphs,
    require_own_numbers,
    require_same_model,
    reshard,
    run_in_graphs,
    shard,
)
from rlft_fast.engine.torch_optim import end_parameters, require_trainable
from rlft_fast.engine.weight_sync import BUCKET_BYTES, WeightStream, weight_sources
from rlft_fast.models import (
    CheckpointPart,
    PolicyModel,
    RLModel,
    Routers,
    ValueModel,
    adapter_parameters,
    checkpoint_parts,
    disabled_lora,
    load,
    local_part,
    token_classifier,
)
from rlft_fast.world import World


class EngineState:
    """The model and the optimizer that `FSDPEngine` runs. Checkpoints and generators need no more of an engine.

    Arguments and attributes are those of `FSDPEngine`.
    """

    def __init__(
        self,
        path: str,
        config: EngineConfig,
        *,
        head: HeadKind | None = "logprob",
        num_training_steps: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        world: World | None = None,
    ) -> None:
        self.path = path
        self.world = world or World.current()
        self.config = config.for_device(self.world.device.type)
        self.head = head
        self.num_training_steps = num_training_steps
        self.temperature = temperature
        self.top_k = top_k
        self.step = 0
        self.skipped_steps = 0
        self.units = ""
        self.model: RLModel
        self.optimizer: Optimizer | None = None
        self._users = 0  # phases that need the model on the device now
        self.sequence_group: dist.ProcessGroup | None = None

    def initialize(self) -> Self:
        """Builds the model without memory, shards it, loads this rank's slices, and builds the optimizer.

        Returns:
            The engine itself.

        Raises:
            ValueError: the model folder cannot be used, its weights do not fit its configuration, ranks disagree on
                the model or the configuration, or the shard size or `sequence_parallel` does not fit the number of
                ranks or heads, a schedule of one's own or an optimizer cannot be used, or a pattern of
                `optimizer.groups` fits nothing.
        """
        if self.device.type == "cuda" and self.config.compute_dtype == "float32":
            warnings.warn(
                "compute_dtype is float32 on a GPU, where matrix products of bfloat16 are several times faster: set "
                "compute_dtype: auto, unless you compare numbers",
                stacklevel=2,
            )
        self._check_settings()
        self.model = build_model(self.path, self.config, self.require_head(), trains=self.trains)
        multiply_in_float8(self.model, self.config, self.device)
        self._shard()
        load(self.path, self.model, self._home, self.device)
        require_own_numbers(self.model, self.config)
        run_in_graphs(self.model, self.config)
        self._make_optimizer()
        return self

    def _check_settings(self) -> None:
        """What all ranks can find wrong before there is a model."""
        if (default := torch.get_default_device()).type != "cpu":
            raise ValueError(
                f"torch's default device is {default}, expected cpu: the engine plans in CPU memory, and moves what "
                "runs to its own device; call torch.set_default_device(None)"
            )
        require_same_model(self.path, self.config, self.head, self.num_training_steps, self.world)
        self.world.together(lambda: require_float8(self.config, self.device), ValueError)
        require_graphs(self.config, self.world)
        self.sequence_group = self.world.sequence_group(self.config.sequence_parallel)
        if self.trains:
            self.world.together(lambda: self.schedule, ValueError)

    def _shard(self) -> None:
        """Shards the model. An optimizer that cannot step shards is refused."""
        units = shard(self.model, self.config, self.world)
        self.units = describe_units(self.model, units) if units else ""
        if self.trains and self.config.optimizer.name != "adamw":
            like = next((p for p in self.model.parameters() if p.requires_grad), None)
            require_trainable(self.config.optimizer, like, self._home)

    def _make_optimizer(self) -> None:
        """Builds the optimizer of a model that trains, and moves everything to where it waits."""
        if self.trains:
            named, ends = named_parameters(self.model), end_parameters(self.model)
            self.optimizer = build_optimizer(named, self.config.optimizer, ends)
            if self.config.param_dtype == "bfloat16" and self.head is not None:
                load_masters(self.path, self.model, self.optimizer)
        if self.config.offload_between_phases:
            self.to("cpu")

    def require_head(self) -> HeadKind:
        """The kind of the head. Raises ValueError for a module of the caller's, which has none."""
        if self.head is None:
            raise ValueError(
                "this engine has a module of your own, which has no head: run engine.model, and give the loss to "
                "engine.backward"
            )
        return self.head

    @classmethod
    def from_module(
        cls, module: nn.Module, config: EngineConfig, *, num_training_steps: int | None = None,
        world: World | None = None,
    ) -> Self:  # fmt: skip
        """An engine around a module of one's own with its weights, which is sharded in place.

        Units are the members of the module's lists of blocks, or the classes of ``config.wrap``. The engine has no
        head: the caller runs ``engine.model`` as the module was run, and gives the loss to `FSDPEngine.backward`.
        Optimizer, schedule, clipping, checkpoints, offloading and activation checkpointing are those of every engine.

        Args:
            module: with the same weights on all ranks, in ``config.param_dtype``. Its mode (train or eval) stays. It
                computes in ``config.compute_dtype``, in which the caller gives it floats: they are not cast.
            config: as for every engine, without ``lora``, ``init_from`` and ``sequence_parallel``.
            num_training_steps: optimizer steps of the whole run, for the schedule; None: the module is frozen.
            world: the processes that share the module; None: `World.current()`.

        Raises:
            ValueError: a setting is for models of transformers alone, ranks have other weights, or see `initialize`.
            TypeError: weights have another dtype than ``config.param_dtype``.
        """
        engine = cls("", config, head=None, num_training_steps=num_training_steps, world=world)
        _check_module(module, engine.config)
        if engine.world.size > 1:
            weights = {name: zlib.crc32(_bytes(tensor)) for name, tensor in module.state_dict().items()}
            engine.world.require_agreement("checksum of the module's weights", weights)
        engine._check_settings()
        freeze(module, engine.config.freeze)
        prepare_blocks(module, engine.config, trains=engine.trains, is_random=True)
        engine.model = cast(Any, module)
        engine._shard()
        if not engine.config.cpu_offload:  # else FSDP has moved the weights to the CPU, and the buffers to the device
            module.to(engine.device)
        engine._make_optimizer()
        return engine

    @property
    def _home(self) -> torch.device:
        """Where weights are when they train, gradients and optimizer state with them."""
        return torch.device("cpu") if self.config.cpu_offload else self.device

    @cached_property
    def schedule(self) -> Schedule:
        """Of an engine that trains."""
        assert self.num_training_steps is not None
        return Schedule(self.config.optimizer, self.num_training_steps)

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def trains(self) -> bool:
        return self.num_training_steps is not None

    @property
    def is_padded(self) -> bool:
        """Whether sequences run padded instead of packed."""
        self.require_head()
        return bool(self.model.padded_because)

    @cached_property
    def routers(self) -> Routers:
        """The routers of the model's experts. Raises ValueError for a model without experts."""
        self.require_head()
        return Routers(self.model.backbone)

    # ---- where it lives -----------------------------------------------------------------------------------------

    def to(self, device: torch.device | str, *, params: bool = True, optimizer: bool = True) -> None:
        """Moves weights, and optimizer state, to the engine's device or the CPU, and frees their old memory.

        Args:
            device: where to.
            params: move the weights.
            optimizer: move the optimizer's state.
        """
        if params:
            reshard(self.model)
            drop_graphs(self.model)
            self.model.to(device)
            move_gradients(self.model, device)
        if optimizer and self.optimizer is not None:
            self.optimizer.move_state(device)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # other processes and vLLM can use only memory that the allocator gives back

    def report_memory(self, tag: str) -> dict[str, int]:
        """Says on the first rank what this process holds on the engine's device now.

        Args:
            tag: tells the line from other lines.

        Returns:
            Bytes of ``weights``, ``gradients`` and ``optimizer`` on the device. On a GPU also of all tensors, now
            (``allocated``) and at the peak (``peak``).
        """
        states = () if self.optimizer is None else self.optimizer.state.values()
        own = {
            "weights": [*self.model.parameters(), *self.model.buffers()],
            "gradients": [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None],
            "optimizer": [tensor for state in states for tensor in state.values()],
        }
        found = {name: sum(_bytes_on(self.device, tensor) for tensor in tensors) for name, tensors in own.items()}
        if self.device.type == "cuda":
            found["allocated"] = torch.cuda.memory_allocated(self.device)
            found["peak"] = torch.cuda.max_memory_allocated(self.device)
        if self.world.is_first:
            print(f"{tag}: " + ", ".join(f"{name} {size / 1e9:.3f} GB" for name, size in found.items()), flush=True)
        return found

    def train_mode(self) -> contextlib.AbstractContextManager[None]:
        """A phase in which weights and optimizer state are on the device; `train_step` opens its own if none is."""
        return self._phase(optimizer=True)

    def eval_mode(self) -> contextlib.AbstractContextManager[None]:
        """A phase in which the weights are on the device; `infer` and `score` open their own if none is."""
        return self._phase(optimizer=False)

    @contextlib.contextmanager
    def _phase(self, optimizer: bool) -> Iterator[None]:
        if not self.config.offload_between_phases:
            yield
            return
        # Inside of another phase weights are where they belong, and their forward may have run: its graph holds them.
        self.to(self.device, params=self._users == 0, optimizer=optimizer)
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                self.to("cpu")

    def disable_adapter(self) -> contextlib.AbstractContextManager[None]:
        """The model without its adapters, which is the reference of a LoRA run.

        Raises:
            ValueError: the engine has no adapters.
        """
        if self.config.lora is None or not isinstance(self.model, PolicyModel):
            raise ValueError("this engine has no adapters to disable: set lora in its configuration")
        return disabled_lora(self.model)

    # ---- weights and state --------------------------------------------------------------------------------------

    def weight_stream(self, dtype: torch.dtype | None = None, bucket_bytes: int = BUCKET_BYTES) -> WeightStream:
        """The weights of now for a generator, by the names of the model's checkpoint; adapters are merged.

        Args:
            dtype: of the parameters, as the forward pass has them in ``compute_dtype``; None: as they are kept, which
                is their float32 master where they have one. Buffers keep theirs.
            bucket_bytes: memory of the bucket, through which sharded weights are gathered.
        """
        self.require_head()
        reshard(self.model)
        sources = partial(weight_sources, self.model, self.optimizer, dtype)
        return WeightStream(sources, self.checkpoint_parts, bucket_bytes, self.device)

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full weights one after the other, as the model's checkpoint has them; tied ones once, adapters merged.

        Every rank must iterate to the end: sharded weights are gathered by all, a bucket at a time.

        Args:
            dtype: see `weight_stream`.
        """
        return self.weight_stream(dtype).tensors()

    @cached_property
    def checkpoint_parts(self) -> dict[str, list[CheckpointPart]]:
        """What the model's checkpoint has of each of its tensors, by their names in the model."""
        model = self.model.pretrained
        parts = checkpoint_parts(model)
        return token_classifier(model).parts(parts, self.model) if isinstance(self.model, ValueModel) else parts

    @torch.no_grad()
    def non_finite_weights(self) -> list[str]:
        """Names of the parameters that hold a NaN or an infinity, on any rank. Every rank must call it."""
        reshard(self.model)
        flags = {
            f"{name}_max": local_part(parameter)[0].isfinite().logical_not().any().float()
            for name, parameter in self.model.named_parameters()
        }
        found = torch.stack([*self.world.all_reduce(flags).values()]).tolist()  # one read
        return [name.removesuffix("_max") for name, is_bad in zip(flags, found, strict=True) if is_bad]

    def state_tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer state by name; they alias the engine's own (sharded) tensors.

        A run with adapters has the trained parameters alone: the model's folder has the others. A module of the
        caller's own has its buffers, too, such as running means.
        """
        reshard(self.model)
        lora = self.config.lora is not None
        parameters = adapter_parameters(self.model) if lora else dict(self.model.named_parameters())
        state = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
        if self.head is None:
            kept = self.model.state_dict()
            state |= {f"model.{name}": buffer for name, buffer in self.model.named_buffers() if name in kept}
        if self.optimizer is not None:
            self.optimizer.initialize_state()
            for name, parameter in parameters.items():
                moments = self.optimizer.state.get(parameter, {})  # none of a frozen weight
                state |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        return state

    def counters(self) -> dict[str, int]:
        return {"step": self.step, "skipped_steps": self.skipped_steps}

    def load_counters(self, counters: dict[str, int]) -> None:
        self.step, self.skipped_steps = counters["step"], counters["skipped_steps"]


def _check_module(module: nn.Module, config: EngineConfig) -> None:
    """Refuses what `EngineState.from_module` cannot do."""
    for name, is_set in (
        ("lora", config.lora is not None), ("init_from", config.init_from is not None),
        ("router_aux_loss_coef", config.router_aux_loss_coef > 0), ("float8", config.float8 is not None),
        ("sequence_parallel", config.sequence_parallel > 1), ("cuda_graphs", config.cuda_graphs),
    ):  # fmt: skip
        if is_set:
            raise ValueError(f"{name} is for models of transformers in folders: leave it out for a module of your own")
    expected = getattr(torch, config.param_dtype)
    for name, parameter in module.named_parameters():
        if parameter.dtype != expected:
            raise TypeError(
                f"{name} is {parameter.dtype}, and param_dtype is {config.param_dtype}: set it, or cast the module"
            )


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _bytes_on(device: torch.device, tensor: Tensor) -> int:
    """Bytes of this rank's part of a tensor; 0 on another kind of device."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.itemsize if local.device.type == device.type else 0
