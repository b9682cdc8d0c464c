"""Texts are read in UTF-8, and other encodings are named."""

import pytest

from rlft_fast.config import Config, ConfigError
from rlft_fast.files import read_text

TEXT = "prompt: \u00e4\r\n"
UTF_16, ZEROS = r"it is a text in UTF-16 or UTF-32: save it in UTF-8", r"it has zero bytes, as texts in UTF-16 .*"


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("utf-16", UTF_16), ("utf-32", UTF_16), ("utf-16-le", ZEROS), ("utf-32-be", ZEROS),
        ("latin-1", r"its byte 8, 0xe4, is no UTF-8 \(invalid continuation byte\): save it in UTF-8"),
    ],
)  # fmt: skip
def test_other_encodings_are_named(encoding, message, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(TEXT.encode(encoding))
    with pytest.raises(ValueError, match=f"^{message}$"):
        read_text(path)
    with pytest.raises(ConfigError, match=f"^cannot read the configuration {path}: {message}$"):
        Config.load(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_text_in_utf_8(encoding, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(TEXT.encode(encoding))
    assert read_text(path) == TEXT.replace("\r", "")
