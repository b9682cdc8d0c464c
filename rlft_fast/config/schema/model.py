"""How a model is held in memory, run and trained."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from rlft_fast.config.base import Section, rule
from rlft_fast.config.paths import FunctionName, LocalPath, ModelPath, known_or_function
from rlft_fast.config.resume import MayChange

Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
SCHEDULES = ("constant", "linear", "cosine", "wsd")


class OptimizerConfig(Section):
    """The optimizer, gradient clipping and the learning-rate schedule."""

    name: Annotated[str, Field(pattern=r"^(adamw|torch\.optim\.[A-Za-z]\w*)$")] = "adamw"
    """Optimizer: adamw, to which betas, eps, moment_dtype and cpu_offload belong, or a class such as torch.optim.Muon.

    Muon trains the matrices of the blocks, and torch.optim.AdamW all else."""
    options: dict[str, Any] = Field(default={})
    """Options of the class of torch.optim by name, for example {momentum: 0.9}."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of AdamW's first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices. Biases and norms are never decayed."""
    moment_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Dtype of AdamW's moments, rounded stochastically if it is narrow. bfloat16 saves 4 bytes per trained weight.

    int8 saves 6: codes of 8 bits, with a scale for each row of a matrix. Steps take longer with it."""
    cpu_offload: MayChange[bool] = False
    """Keep AdamW's moments in CPU memory. Each step copies them to the GPU and back; on a CPU nothing changes."""
    max_grad_norm: NonNegativeFloat | None = 1.0
    """Gradients with a larger global norm are scaled down to this norm; null or 0: the norm is only measured."""
    groups: dict[str, dict[Literal["learning_rate", "weight_decay"], NonNegativeFloat]] = Field(default={})
    """Learning rates and weight decays of parameters by the pattern of their names, which the first one that fits sets.

    For example {"lm_head.*": {learning_rate: 1e-6}}. Names are those that transformers gives the weights of a loaded
    model; * stands for any text."""
    schedule: Annotated[FunctionName, known_or_function(*SCHEDULES)] = Field(
        default="constant",
        description="How the learning rate falls from the warm-up to the end of the run, also over steps that teach "
        f"nothing: {', '.join(SCHEDULES)} (stable, then linear), or module:function for your own.",
    )
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of linear, cosine and wsd. Rates of groups fall in the same proportion."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from 0."""
    warmup_ratio: Share = 0.0
    """The same as a share of the run's optimizer steps, instead of warmup_steps."""
    decay_ratio: Share = 0.1
    """Share of the run's optimizer steps over which wsd falls, at the end."""

    def __hash__(self) -> int:
        """Of what can be hashed: mappings cannot."""
        return hash((self.learning_rate, self.betas, self.moment_dtype, self.cpu_offload, self.schedule))

    @rule
    def _options_are_of_the_optimizer(self) -> Iterator[str]:
        if self.name == "adamw" and self.options:
            yield "options are those of a class of torch.optim: adamw has keys of its own, such as betas"
        for key in ("betas", "eps", "moment_dtype", "cpu_offload"):
            if self.name != "adamw" and getattr(self, key) != type(self).model_fields[key].default:
                yield f"{key} is a key of adamw: give {self.name} its own options, or leave {key} out"

    @rule
    def _schedule(self) -> Iterator[str]:
        if self.warmup_steps and self.warmup_ratio:
            yield "give either warmup_steps or warmup_ratio, not both"
        if self.min_learning_rate > self.learning_rate:
            yield f"min_learning_rate is {self.min_learning_rate:g}, above learning_rate, {self.learning_rate:g}"
        if self.min_learning_rate and self.schedule == "constant":
            yield "min_learning_rate is the end of a schedule that falls: set schedule: linear, cosine or wsd"
        if self.schedule not in SCHEDULES:
            for name in ("min_learning_rate", "warmup_steps", "warmup_ratio"):
                if getattr(self, name):
                    yield f"{name} has no meaning for a schedule of your own, which says it all: leave {name} out"


class LoraConfig(Section):
    """Low-rank adapters. The model's own weights stay as they are."""

    rank: Annotated[PositiveInt, Field(le=16384)] = 16
    """Rank of the update of each matrix."""
    alpha: PositiveInt = 32
    """The update is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of linear layers, as in peft, or of the matrices of experts, such as gate_up_proj and down_proj.

    all-linear: every linear layer and all experts of the blocks; lm_head: the head of a policy. The head of a critic or
    a reward model is trained in full."""


class ModelConfig(Section):
    """How a model is held in memory and run."""

    max_tokens: MayChange[PositiveInt] = 16384
    """Most tokens of a micro-batch. The longest sequence must fit."""
    micro_batch_size: MayChange[PositiveInt | None] = None
    """Most sequences of a micro-batch, beside max_tokens: the tighter cap counts. null: max_tokens alone."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the forward and backward pass and of gathered weights; auto: bfloat16 on a GPU, and where a CPU is fast.

    Optimizer state does not follow it. On a CPU auto is float32, unless param_dtype is bfloat16, float8 is set, or a
    measurement says that bfloat16 is faster and the hidden size is at least 256; not with a cluster. A resumed run
    keeps its dtype. GPUs before Ampere have no fast bfloat16: name float32 there."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights between steps. With bfloat16, the optimizer keeps float32 copies of trained weights."""
    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Multiply in float8 in the linear layers of the blocks, by torchao: its recipe says how operands are scaled.

    tensorwise: one scale for each operand, the fastest; rowwise: one for each row; rowwise_with_gw_hp: the same, with
    gradients of weights in bfloat16, so that they depend on no micro-batch. Weights stay in param_dtype. GPUs from
    compute capability 8.9 on; a CPU emulates it."""
    shard_size: MayChange[Literal["auto"] | int] = -1
    """Processes that share one copy of the model. -1: all; 1: each has a whole copy; auto: the fewest that fit it."""
    reshard_after_forward: MayChange[bool] = True
    """Free the gathered weights of a block after its forward pass. false saves communication and costs memory."""
    wrap: MayChange[tuple[str, ...] | None] = None
    """Class names of the blocks whose weights are gathered together; null: found from the model's structure."""
    sequence_parallel: MayChange[PositiveInt] = 1
    """Ranks that share each micro-batch, each with a part of its tokens (Ulysses). For long sequences."""
    compile: MayChange[Literal["auto"] | bool] = "auto"
    """Compile each block with torch.compile; auto: on a GPU."""
    cuda_graphs: MayChange[bool] = False
    """Record the backbone's passes, and decode steps of hf, as CUDA graphs: for small models, which wait for launches.

    On one GPU, in bfloat16, for dense models of text. Micro-batches are padded to sizes that come again, up to 1/32
    more tokens from 2048 on. It has not run on a GPU yet: a pass that cannot be recorded runs as without it."""
    cpu_offload: MayChange[bool] = False
    """Always keep weights and optimizer state in CPU memory. A block is copied to the GPU when it runs."""
    offload_between_phases: MayChange[bool] = False
    """Keep weights and optimizer state in CPU memory while another model or the rollout uses the GPU."""
    workspace_mib: MayChange[PositiveInt | None] = None
    """Most memory for logits at any time, in MiB; null: on a CPU 64, in losses at least 480 rows; on a GPU by shape."""

    @field_validator("shard_size")
    @classmethod
    def _shard_size(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value != -1 and value < 1:
            raise ValueError(f"got {value}: give -1 (all processes), a number of processes, or auto")
        return value

    @rule
    def _memory(self) -> Iterator[str]:
        if self.param_dtype == "bfloat16" and self.compute_dtype == "float32":
            yield (
                "param_dtype is bfloat16 and compute_dtype is float32, but float32 weights cannot be gathered from "
                "bfloat16: set compute_dtype: bfloat16"
            )
        if self.float8 is not None and self.compute_dtype == "float32":
            yield (
                f"float8 is {self.float8} and compute_dtype is float32, but float8 products are rounded to bfloat16: "
                "set compute_dtype: bfloat16"
            )
        if self.cpu_offload and self.offload_between_phases:
            yield "cpu_offload keeps everything on the CPU already: leave offload_between_phases out"

    @rule
    def _graphs(self) -> Iterator[str]:
        if not self.cuda_graphs:
            return
        if self.compute_dtype == "float32":
            yield "cuda_graphs is set and compute_dtype is float32, whose attention waits for the device: set bfloat16"
        for name in ("cpu_offload", "offload_between_phases"):
            if getattr(self, name):
                yield f"cuda_graphs needs weights that stay on the GPU: leave {name} out"
        if self.float8 is not None:
            yield "cuda_graphs has not been tried with products in float8: leave float8 out"

    def for_device(self, device_type: str) -> Self:
        """With a value in place of each "auto" that depends on the kind of device, ``"cpu"`` or ``"cuda"``."""
        on_gpu = device_type == "cuda"
        is_narrow = on_gpu or self.param_dtype == "bfloat16" or self.float8 is not None
        dtype = "bfloat16" if is_narrow else "float32"
        return self._resolved({"compute_dtype": dtype, "compile": on_gpu})

    def _resolved(self, values: dict[str, Any]) -> Self:
        """With these values in place of "auto"."""
        return self.model_copy(update={key: value for key, value in values.items() if getattr(self, key) == "auto"})


class EngineConfig(ModelConfig):
    """One model with its optimizer."""

    activation_checkpointing: MayChange[Literal["auto", "none", "selective", "full", "offload"]] = "auto"
    """Recompute blocks in the backward pass: whole (full), or except matrix products and attention (selective).

    offload: full, and on a GPU the inputs of blocks wait in CPU memory.
    auto: the fastest that fits into memory, none where all fit."""
    reduce_every_micro_batch: MayChange[Literal["auto"] | bool] = "auto"
    """Reduce gradients after each micro-batch, in param_dtype: sends more, but no rank holds all gradients.

    auto: where param_dtype is float32 and all gradients do not fit into memory."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of the weights."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained, by patterns of their names: [model.visual.*], for example, is a vision tower.

    * stands for any text. Names are those that transformers gives the weights of a loaded model; its files may have
    others. A pattern that fits none is refused, with the names. With lora, frozen layers get no adapter."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss by which the routers of a mixture of experts use all experts alike; 0: none.

    It is transformers' load_balancing_loss_func over all tokens of an optimizer step that run. Without routing replay,
    the batch runs once more without gradients."""
    init_from: MayChange[LocalPath | None] = None
    """Weights to start from in place of the model folder's: a run, a checkpoint in it, an export, or PEFT's adapter.

    Weights alone are read: the optimizer and its schedule are new. A run means its newest checkpoint. The reference of
    a run of rl stays the model folder's."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW, clipping and schedule."""

    def for_device(self, device_type: str) -> Self:
        """As for every model. What memory decides is as without a limit, see `rlft_fast.engine.memory.choose`."""
        unlimited = {"activation_checkpointing": "none", "reduce_every_micro_batch": False}
        resolved = super().for_device(device_type)._resolved(unlimited)
        if device_type == "cuda":
            return resolved
        optimizer = self.optimizer.model_copy(update={"cpu_offload": False})  # everything is in CPU memory
        mode = "full" if resolved.activation_checkpointing == "offload" else resolved.activation_checkpointing
        return resolved.model_copy(update={"optimizer": optimizer, "activation_checkpointing": mode})

    @rule
    def _graphs_of_one_model(self) -> Iterator[str]:
        if self.cuda_graphs and self.lora is not None:
            yield "cuda_graphs records a model with its adapters, which lora turns off for the reference: leave it out"
        if self.cuda_graphs and self.activation_checkpointing == "offload":
            yield "cuda_graphs cannot record copies to CPU memory: set activation_checkpointing to full"

    @rule
    def _offloads_once(self) -> Iterator[str]:
        if self.cpu_offload and self.optimizer.cpu_offload:
            yield "cpu_offload keeps the optimizer's state on the CPU already: leave optimizer.cpu_offload out"


class FrozenConfig(ModelConfig):
    """A model that does not train."""

    @property
    def engine(self) -> EngineConfig:
        """How the model is held in memory and run."""
        return EngineConfig(**{name: getattr(self, name) for name in ModelConfig.model_fields})


class ScoringConfig(FrozenConfig):
    """A reward model with settings of its own."""

    model: MayChange[ModelPath]
    """Folder of the reward model (sequence classification, one label)."""
    weight: float = 1.0
    """Weight of its score in the reward."""


class TopKTeacherConfig(FrozenConfig):
    """A frozen model with the tokens of the model that learns from it."""

    model: MayChange[ModelPath]
    """Folder of the teacher. Its tokenizer has all tokens of the model that learns, with the same ids."""
    weight: PositiveFloat = 1.0
    """Weight of the divergence from the teacher in the loss."""
    top_k: Annotated[PositiveInt, Field(le=65536)] = 64
    """How many of its most likely ids the teacher names for each token."""
    add_tail: bool = True
    """The divergence also has a term of all other ids together."""

    @property
    def num_ids(self) -> int | None:
        """How many ids the teacher names for each token; None: it scores sampled tokens alone."""
        return self.top_k


class TeacherConfig(TopKTeacherConfig):
    """A frozen model with the policy's tokens, which the policy learns to sample like."""

    loss: Literal["sampled", "topk"] = "sampled"
    """sampled: log π_teacher - log π of sampled tokens, in the advantage; topk: the divergence over top_k, in the loss.

    sampled needs a teacher and a policy that are alike: a token that the policy never samples teaches nothing. topk
    teaches of every token all that the teacher says."""
    weight: PositiveFloat = 1.0
    """Weight of the term of the teacher, which is added to the advantages, or to the loss."""
    top_k: Annotated[PositiveInt, Field(le=65536)] = 64
    """How many of its most likely ids the teacher names for each token. Read by topk."""
    add_tail: bool = True
    """The divergence also has a term of all other ids together. Read by topk."""

    @property
    def num_ids(self) -> int | None:
        return self.top_k if self.loss == "topk" else None


class CriticConfig(EngineConfig):
    """The value model of PPO."""

    model: MayChange[ModelPath | None] = None
    """Folder of the model that the critic starts from. A reward model keeps its head; null: the policy's folder."""
    value_clip: PositiveFloat = 0.2
    """How far a predicted value may move from its prediction at rollout before its loss is clipped."""
    freeze_actor_steps: NonNegativeInt = 0
    """Steps at the start of the run in which the critic alone learns: values of a new critic tell the policy little.

    The schedule of the policy's learning rate begins behind them."""
