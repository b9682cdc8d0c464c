"""This rank's answers to its share of the prompts."""

from rlft_fast.cluster import RemoteRollout
from rlft_fast.data import Samples
from rlft_fast.rollout import Rollout, SamplingParams, Seeds
from rlft_fast.trainer.episodes import EpisodePlayer
from rlft_fast.trainer.prompts import ImageError, Prompts
from rlft_fast.world import World


def own_samples(
    rollout: Rollout | RemoteRollout, world: World, prompts: Prompts, params: SamplingParams,
    seeds: Seeds | None = None, player: EpisodePlayer | None = None,
) -> Samples:  # fmt: skip
    """This rank's answers to its share of the prompts. All ranks must call it together.

    Args:
        rollout: samples.
        world: the ranks that share the prompts.
        prompts: of all ranks.
        params: how to sample.
        seeds: of this rank's answers; None: torch's random state gives them.
        player: plays an episode per answer; None: an answer is one message.
    """
    rows = own_rows(world, prompts)
    own = prompts.select(rows)
    if player is None:
        images = world.together(own.load_images, ImageError) if prompts.images else []
        more = {"images": images} if images else {}  # the generators of a cluster take none
        samples = rollout.samples(own.token_ids, params, seeds, **more)
    else:
        samples = player.samples(rollout, world, own, params, seeds)
    return samples.replace(row_B=samples.row_B * rows.step + rows.start)


def own_rows(world: World, prompts: Prompts) -> range:
    """The prompts that this rank answers."""
    return range(world.rank, len(prompts), world.size)
