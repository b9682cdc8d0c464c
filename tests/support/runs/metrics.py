"""Lines of metrics.jsonl with odd numbers."""

# Integers that float64 does not hold, that no float holds, and that Python does not read; and what is no number at all.
ODD = [
    '{"step": 1, "reward_mean": 0.5, "constructor": 1, "__proto__": 2.0, "entropy": 1e300}',
    '{"step": 2, "reward_mean": 1e308, "accuracy": -1e308, "entropy": null, "ref_kl": NaN, "approx_kl": 1e999}',
    f'{{"step": 3, "reward_mean": {10**400}, "accuracy": "high", "entropy": [1], "ref_kl": true}}',
    f'{{"step": 9007199254740991, "reward_mean": {"9" * 5000}, "entropy": -1e300}}',
    *(f'{{"step": {step}, "reward_mean": 1.0}}' for step in (2**53, 10**20, 10**400, "9" * 5000)),
]
