"""A configuration with nothing but what every run needs."""

MINIMAL = {"model": "models/policy", "output_dir": "runs/first", "steps": 3, "data": {"task": "chain_sum"}}
