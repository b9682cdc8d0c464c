"""An advantage and a policy loss as a user would write them, in a file of their own."""

from rlft_fast.rl import grpo_advantage


def centered(reward_B, group_B):
    """Rewards minus the mean of their prompt."""
    same_BB = (group_B[:, None] == group_B).float()
    return reward_B - same_BB @ reward_B / same_BB.sum(1)


def unclipped(logprob_T, old_logprob_T, advantage_T, *, strength=1.0):
    return -strength * (logprob_T - old_logprob_T).exp() * advantage_T


def without_reward(logprob_T, value_T):
    return -value_T * logprob_T


def grpo_after_a_pass(reward_B, group_B, old_logprob_T):
    """Reads log-probabilities before the update, so that a run has to infer them."""
    return grpo_advantage(reward_B, group_B)
