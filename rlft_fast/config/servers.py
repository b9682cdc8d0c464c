"""Where servers are: URLs, or files that name URLs. And where their token is."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

from rlft_fast.config.base import LocalPath, without_password

TOKEN_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the token that servers want."""

_URL = re.compile(r"https?://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?(?:/[\w.~-]*)*", re.A | re.I)
_LABEL = re.compile(r"\w(?:[\w-]{0,61}\w)?", re.A)
_NUMBER = re.compile(r"\d+|0x[0-9a-f]*", re.A | re.I)  # a host that ends in a number is an IPv4 address, or none
_LONGEST = 2000


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


def _check_entry(entry: str) -> str:
    if "://" in entry or without_password(entry) != entry:
        return check_server_url(entry)
    if not entry.strip() or not entry.isprintable():
        raise ValueError("expected a URL such as http://127.0.0.1:8000, or the path of a file with one URL per line")
    return entry


ServerEntry = Annotated[LocalPath, AfterValidator(_check_entry)]
"""URL of a server, or path of a file with one URL per line."""
