"""A checksum that tells a model folder from others without reading all of its weights."""

import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlft_fast.files import is_apple_double


def model_checksum(folder: str | Path, config: str = "config.json") -> str:
    """CRC-32 of config.json and of the name, dtype, shape and first row of every tensor, as hexadecimal digits.

    Other training, another dtype or another architecture changes it. A copy of the folder has the same. Reading takes
    one short access per tensor.

    Args:
        folder: of the model.
        config: name of the file in the place of config.json.

    Raises:
        ValueError: the folder has no config.json, or a file of weights is unreadable.
    """
    try:
        checksum = zlib.crc32((Path(folder) / config).read_bytes())
        for path in sorted(path for path in Path(folder).glob("*.safetensors") if not is_apple_double(path)):
            with safe_open(path, "pt") as file:
                for name in sorted(file.keys()):
                    stored = file.get_slice(name)
                    first = stored[:1] if stored.get_shape() else file.get_tensor(name)
                    described = f"{name} {stored.get_dtype()} {stored.get_shape()}".encode()
                    content = first.contiguous().flatten().view(torch.uint8).numpy()
                    checksum = zlib.crc32(content, zlib.crc32(described, checksum))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the model in {folder} cannot be read: {error}") from error
    return f"{checksum:08x}"
