"""URLs of servers in a configuration: refused by name when it is read, and no password is shown."""

import os
import traceback

import pytest
from pydantic import ValidationError

from rlft_fast.config import ClusterConfig, Config, ConfigError, RolloutConfig, check_server_url, server_urls
from tests.support.runs.configs import MINIMAL

SECRET = "hunter2"
GOOD = [
    "http://127.0.0.1:8000", "HTTPS://Node-7.cluster:1/", "http://gpu_3", "http://[::1]:65535", "http://[fe80::7]",
    "http://gateway/models/policy-1.5/", "http://xn--bcher-kva.example:80",
]  # fmt: skip
WRONG = {
    "ftp://127.0.0.1": "must have a host",
    "http://": "must have a host",
    "http:///v1": "must have a host",
    "http://host:": "must have a host",
    "http://host:0": "its port must lie in 1 to 65535",
    "http://host:65536": "its port must lie in 1 to 65535",
    "http://host:-1": "must have a host",
    "http://host:8k": "must have a host",
    "http://host:99999999": "must have a host",
    "http://host:٨٠": "the character '٨'",
    "http://[::1": "must have a host",
    "http://::1:8000": "must have a host",
    "http://[127.0.0.1]": "neither a name nor an address",
    "http://[::12345]": "neither a name nor an address",
    "http://256.1.1.1": "neither a name nor an address",
    "http://127.1": "neither a name nor an address",
    "http://0x7f000001": "neither a name nor an address",
    "http://-host": "neither a name nor an address",
    "http://a..b": "neither a name nor an address",
    "http://" + "a" * 64: "neither a name nor an address",
    "http://" + "a." * 1500 + "a": "it has 3008 characters",
    "http://ho st": "the character ' '",
    " http://host": "the character ' '",
    "http://host\n": r"the character '\\n'",
    "http://ho\x00st": r"the character '\\x00'",
    "http://ho\tst:80": r"the character '\\t'",
    "http://bücher": "the character 'ü'",
    "http://\uff11.0.0.1": r"the character .\uff11.",
    "http://127.0.0.1%2f:80": "must have a host",
    "http://host\\path": "must have a host",
    "http://host?token=x": "must have a host",
    "http://host#x": "must have a host",
    f"http://user:{SECRET}@host": "no name and password",
    f"http://{SECRET}@host": "no name and password",
    f"user:{SECRET}@host:8000": "no name and password",
    f"http://user:{SECRET}@[::1": "no name and password",
    f"http://user:{SECRET}/ @?#@host:99999": "no name and password",
    f"http://user:{SECRET * 200}@host": "no name and password",
}


def parse(**rollout: object) -> Config:
    return Config.parse(MINIMAL | {"rollout": {"backend": "vllm"} | rollout})


@pytest.mark.parametrize("url", GOOD)
def test_urls_of_servers(url):
    assert check_server_url(url) == url
    assert parse(servers=[url]).rollout.servers == (url,)


@pytest.mark.parametrize(("url", "message"), WRONG.items())
def test_wrong_urls_are_refused_with_the_configuration(url, message):
    with pytest.raises(ConfigError, match=rf"^rollout\.servers\.1: .*{message}") as caught:
        parse(servers=["http://host", url])
    assert SECRET not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("entry", ["", " ", "servers\n.txt", "a\x00b"])
def test_wrong_files_of_servers(entry):
    with pytest.raises(ConfigError, match=r"^rollout\.servers\.0: "):
        parse(servers=[entry])


@pytest.mark.parametrize(
    "values",
    [
        {"rollout": {"backend": "vllm", "servers": f"http://u:{SECRET}@host"}},
        {"rollout": {"backend": "hf", "servers": ["http://host"], "stop": [f"http://u:{SECRET}@host"]}},
        {"rollout": {"servers": {f"http://u:{SECRET}@host": 1}}},
        {"rollout": f"http://u:{SECRET}@host"},
    ],
)
def test_no_message_shows_a_password(values):
    with pytest.raises(ConfigError, match="rollout") as caught:
        Config.parse(MINIMAL | values)
    assert SECRET not in str(caught.value)


def test_no_section_made_in_python_shows_a_password():
    url = f"http://u:{SECRET}@host"
    for wrong in (
        lambda: RolloutConfig(backend="vllm", servers=(url,)), lambda: RolloutConfig(backend=url),  # pyrefly: ignore
        lambda: ClusterConfig(address=url), lambda: Config.model_validate(MINIMAL | {"rollout": {"servers": [url]}}),
    ):  # fmt: skip
        with pytest.raises(ValidationError) as caught:
            wrong()
        assert SECRET not in f"{caught.value}{caught.value!r}"
    with pytest.raises(ConfigError, match="servers cannot be set") as caught:
        RolloutConfig().servers = (url,)  # pyrefly: ignore
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ConfigError, match=r"cluster\.address: an address must have no name and password") as caught:
        Config.parse(MINIMAL | {"cluster": {"address": url}})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_no_password_is_shown_with_broken_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"rollout: {{servers: [http://u:{SECRET}@host}}\n")
    with pytest.raises(ConfigError, match="cannot read the configuration") as caught:
        Config.load(path)
    assert SECRET not in str(caught.value)
    path.write_text("steps: 3\n")
    with pytest.raises(ConfigError, match=r"rollout\.servers: .* is no list or mapping in YAML") as caught:
        Config.load(path, {"rollout.servers": f"[http://u:{SECRET}@host"})
    assert SECRET not in str(caught.value)


def test_a_file_of_servers(tmp_path):
    path = tmp_path / "servers"
    path.write_bytes("\ufeff# both\r\n http://a:1 \r\n\r\nhttp://b\r\nhttp://a:1\r\n".encode())
    assert server_urls([str(path), "http://c"]) == ["http://a:1", "http://b", "http://c"]


FILES = {
    "large": (b"http://a\n" * 10**6, "it has 9000000 bytes, and may have 1048576"),
    "one line": (b"http://" + b"a" * 10**6, r"line 1 of .*: .* has 1000007 characters, got '.{100,200}$"),
    "UTF-16": (
        "http://a".encode("utf-16"),
        r"neither a URL nor a file .*: it is a text in UTF-16 or UTF-32: save it in UTF-8",
    ),
    "empty": (b"# none\n", "names no server"),
    "wrong": (b"http://a\nhttp://b:0\n", r"line 2 of .*: .*port must lie in 1 to 65535, got 'http://b:0'"),
    "password": (f"http://u:{SECRET}@b\n".encode(), r"line 1 of .*no name and password.*, got 'http://\*\*\*@b'"),
}


@pytest.mark.parametrize(("content", "message"), FILES.values(), ids=FILES)
def test_a_wrong_file_of_servers(tmp_path, content, message):
    path = tmp_path / "servers"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        server_urls([str(path)])
    assert SECRET not in str(caught.value)


def test_servers_are_not_read_from_pipes_and_devices(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(pipe), "/dev/zero", str(tmp_path)):
        with pytest.raises(ValueError, match=f"has '{path}', neither a URL nor a file .*: .* no regular file"):
            server_urls([path])
