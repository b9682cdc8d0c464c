import numpy as np

def plan(
    lengths: np.ndarray, max_tokens: int, world_size: int, linear: float, quadratic: float
) -> tuple[np.ndarray, np.ndarray]: ...
