"""Where servers are: URLs, or files that name URLs. And where their token is."""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, PlainSerializer, SerializationInfo, ValidationInfo

from rlft_fast.config.base import without_password
from rlft_fast.config.paths import expand_path, typed_path
from rlft_fast.files import read_text

TOKEN_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the token that servers want."""
REWARD_TOKEN_VARIABLE = "REWARD_API_KEY"
"""Environment variable with the token that a server of rewards wants, if it wants one."""

_URL = re.compile(r"https?://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?(?:/[\w.~-]*)*", re.A | re.I)
_LABEL = re.compile(r"\w(?:[\w-]{0,61}\w)?", re.A)
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*", re.A | re.I)  # a host that ends in a number is an IPv4 address, or none
_LONGEST = 2000  # characters of a URL
_LONGEST_FILE = 2**20  # bytes


def check_server_url(url: str) -> str:
    """Returns the URL of a server as it is.

    Raises:
        ValueError: this is no such URL. The message does not quote the URL, which may have a password.
    """
    if "@" in url:
        raise ValueError(
            f"a server's URL must have no name and password, which logs would show: give the token in {TOKEN_VARIABLE}"
        )
    wrong = next((x for x in url if not "!" <= x <= "~"), None)
    found = _URL.fullmatch(url)
    if wrong is not None:
        reason = f"the character {wrong!r} must not be in it"
    elif len(url) > _LONGEST:
        reason = f"it has {len(url)} characters"
    elif found is None:
        reason = "it must have a host, and may have a port and a path"
    elif not _is_host(found["host"]):
        reason = "its host is neither a name nor an address"
    elif found["port"] is not None and not 1 <= int(found["port"]) <= 65535:
        reason = "its port must lie in 1 to 65535"
    else:
        return url
    raise ValueError(f"expected a URL such as http://127.0.0.1:8000, and {reason}")


def _is_host(host: str) -> bool:
    labels = host.split(".")
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
        elif _NUMBER.fullmatch(labels[-1]):
            ipaddress.IPv4Address(host)
        else:
            return len(host) <= 253 and all(map(_LABEL.fullmatch, labels))
    except ValueError:
        return False
    return True


def _check_entry(entry: str, info: ValidationInfo) -> str:
    if _is_url(entry):
        return check_server_url(entry)
    if not entry.strip() or not entry.isprintable():
        raise ValueError("expected a URL such as http://127.0.0.1:8000, or the path of a file with one URL per line")
    return expand_path(entry, info)


def _is_url(entry: str) -> bool:
    return "://" in entry or without_password(entry) != entry


def server_urls(servers: Sequence[str]) -> list[str]:
    """The URLs of ``rollout.servers``, whose entries are URLs or files with one URL per line.

    Raises:
        ValueError: a file cannot be read, has a line that is no URL, or there is no URL. No password is shown.
    """
    urls: list[str] = []
    for entry in servers:
        if "://" in entry:
            urls.append(entry)
            continue
        try:
            if (size := Path(entry).stat().st_size) > _LONGEST_FILE:
                raise OSError(f"it has {size} bytes, and may have {_LONGEST_FILE}")
            lines = read_text(Path(entry)).splitlines()
        except (OSError, ValueError) as error:
            raise ValueError(
                f"rollout.servers has {without_password(entry)!r}, neither a URL nor a file that can be read: {error}"
            ) from error
        urls += [_url(line.strip(), number, entry) for number, line in enumerate(lines, 1) if _names_a_url(line)]
    if not urls:
        raise ValueError(f"rollout.servers names no server: {', '.join(servers)}")
    return list(dict.fromkeys(urls))


def _names_a_url(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _url(text: str, number: int, file: str) -> str:
    try:
        return check_server_url(text)
    except ValueError as error:
        raise ValueError(
            f"rollout.servers: line {number} of {file}: {error}, got {without_password(text)!r:.200}"
        ) from error


def _typed_entry(entry: str, info: SerializationInfo) -> str:
    return entry if _is_url(entry) else typed_path(entry, info)


ServerUrl = Annotated[str, AfterValidator(check_server_url)]
"""URL of a server."""

ServerEntry = Annotated[str, Field(min_length=1), AfterValidator(_check_entry), PlainSerializer(_typed_entry)]
"""URL of a server, or path of a file with one URL per line."""
