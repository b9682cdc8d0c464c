"""What a trainer asks of an engine besides its work. The engine itself may live in other processes."""

from typing import NamedTuple, cast

from torch import nn

from rlft_fast.engine.flops import ModelFlops, model_flops, peak_flops
from rlft_fast.engine.state import EngineState
from rlft_fast.models import padding_id, position_limit


class EngineFacts(NamedTuple):
    """Numbers and texts that stay as they are while the engine works."""

    path: str
    """Folder of the model."""
    units: str
    """A table of the FSDP units; empty where a single process needs none."""
    padded_because: str
    """Why sequences run padded; empty if they are packed."""
    hidden_size: int
    num_embeddings: int
    """Tokens that have an embedding."""
    longest: int | None
    """See `rlft_fast.models.position_limit`."""
    padding_id: int | None
    """See `rlft_fast.models.padding_id`."""
    num_ranks: int
    """Processes that share the model."""
    flops: ModelFlops
    """Of a forward and a backward."""
    peak_flops: float | None
    """FLOP/s of dense bfloat16 of a process's device; None where the peak is not known.

    With float8 it is None, too: the layers have another peak than attention and the head."""

    def utilisation(self, num_flops: float, seconds: float, num_devices: int) -> dict[str, float]:
        """FLOP/s of a device in an update, and their share of the device's peak where the peak is known.

        Args:
            num_flops: of the update, on all devices.
            seconds: of the update.
            num_devices: that compute it.
        """
        flops_per_second = num_flops / seconds / num_devices
        found = {"tflops_update": flops_per_second / 1e12}
        return found if self.peak_flops is None else found | {"mfu_update": flops_per_second / self.peak_flops}


def facts_of(engine: EngineState) -> EngineFacts:
    embedding = cast(nn.Embedding, engine.model.pretrained.get_input_embeddings())
    return EngineFacts(
        path=engine.path,
        units=engine.units,
        padded_because=engine.model.padded_because,
        hidden_size=engine.model.backbone.config.get_text_config().hidden_size,
        num_embeddings=embedding.num_embeddings,
        longest=position_limit(engine.model.backbone),
        padding_id=padding_id(engine.path),
        num_ranks=engine.world.size,
        flops=model_flops(engine.model),
        peak_flops=peak_flops(engine.device) if engine.config.float8 is None else None,
    )
