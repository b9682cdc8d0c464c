"""An advantage and a policy loss as a user would write them, in a file of their own."""

import itertools

from rlft_fast.rl import POLICY_LOSSES, grpo_advantage, needs
from rlft_fast.world import World

_calls = itertools.count(1)
_loss_calls = itertools.count(1)


def centered(reward_B, group_B, **_):
    """Rewards minus the mean of their prompt."""
    same_BB = (group_B[:, None] == group_B).double()
    return reward_B - same_BB @ reward_B / same_BB.sum(1)


def fails_in_step_3(reward_B, group_B):
    """On the second process alone."""
    if next(_calls) == 3 and World.current().rank == 1:
        raise ZeroDivisionError("division by zero")
    return grpo_advantage(reward_B, group_B)


def fails_once(logprob_T, old_logprob_T, advantage_T, *, call):
    """At a call with tokens of a rollout. `PolicyLoss` tries a loss with one token."""
    if len(logprob_T) > 1 and next(_loss_calls) == call:
        raise ZeroDivisionError("division by zero")
    return -(logprob_T - old_logprob_T).exp() * advantage_T


def unclipped(logprob_T, old_logprob_T, advantage_T, *, strength=1.0):
    return -strength * (logprob_T - old_logprob_T).exp() * advantage_T


def ppo_of_every_token(logprob_T, old_logprob_T, advantage_T):
    """The built-in loss without its promise that tokens without an advantage add nothing."""
    return POLICY_LOSSES["ppo"](logprob_T, old_logprob_T, advantage_T)


def without_reward(logprob_T, value_T):
    return -value_T * logprob_T


def near_reference(logprob_T, ref_logprob_T):
    return (logprob_T - ref_logprob_T).square()


def grpo_after_a_pass(reward_B, group_B, old_logprob_T):
    """Reads log-probabilities before the update, so that a run has to infer them."""
    return grpo_advantage(reward_B, group_B)


def misspelt(rewards_B):
    return rewards_B


def misspelt_token(logprob_T, advantages_T=None):
    return -advantages_T * logprob_T


def concentrated(logprob_T, advantage_T, sum_prob_squared_T, *, strength):
    """Reads what is made for an advantage; an option without a default."""
    return -strength * sum_prob_squared_T * advantage_T * logprob_T


def above_greedy(reward_B, baseline_B):
    return reward_B - baseline_B


@needs(greedy=True)
def declared_above_greedy(reward_B, baseline_B):
    return reward_B - baseline_B


def without_selected(logprob_T, advantage_T, selected_T):
    return -(1 - selected_T) * advantage_T * logprob_T


def least_certain(entropy_T, loss_mask_T, seed):
    """The token of the highest entropy in even steps, none in odd ones."""
    highest = entropy_T[loss_mask_T].max()
    return ((entropy_T == highest) & loss_mask_T).float() * (seed % 2 == 0)


@needs(selection=least_certain)
def declared_without_selected(logprob_T, advantage_T, selected_T):
    return without_selected(logprob_T, advantage_T, selected_T)


@needs(selection=above_greedy)
def selected_by_greedy(logprob_T, advantage_T, selected_T):
    return without_selected(logprob_T, advantage_T, selected_T)
