"""Exports on a server that speaks the Hub's protocol, which huggingface_hub's client talks to."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlft_fast.engine import HubRepository
from rlft_fast.errors import RunError


class Hub(ThreadingHTTPServer):
    """Repositories by name: whether each is private, and its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.messages: list[str] = []
        self.token = "hf_right"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if not self.path.startswith("/api/models/"):  # what kind of client it is, for example
            self._answer({}, 404)
            return
        _, _, _, owner, name, *rest = self.path.partition("?")[0].split("/")
        if (files := self.server.files.get(f"{owner}/{name}")) is None:
            self._answer({"error": "Repository not found"}, 404)
        elif rest[:1] == ["tree"]:
            self._answer([{"type": "file", "path": path, "size": 1, "oid": "1"} for path in files])
        else:
            siblings = [{"rfilename": path} for path in files]
            self._answer({"id": f"{owner}/{name}", "sha": "1", "siblings": siblings})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            is_new = name not in self.server.files
            self.server.files.setdefault(name, {".gitattributes": b""})
            if is_new:
                self.server.private[name] = asked["visibility"] == "private"
            self._answer({"url": f"{self._address}/{name}"}, 200 if is_new else 409)  # as the Hub does
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self._answer(
                {"files": [{"path": x["path"], "uploadMode": "regular", "shouldIgnore": False} for x in asked]}
            )
        elif "/commit/" in self.path:
            self._commit("/".join(self.path.split("/")[3:5]), [json.loads(line) for line in body.splitlines()])

    def _commit(self, name: str, lines: list[dict]) -> None:
        files = self.server.files[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        url = f"{self._address}/{name}/commit/2"
        self._answer({"success": True, "commitUrl": url, "commitOid": "2", "hookOutput": ""})

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def _answer(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", server.token)
    yield server
    server.shutdown()
    server.server_close()


def write_export(folder, **files: bytes):
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in ({"_export_json": b"[]", "config_json": b"{}"} | files).items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return folder


def test_a_repository_has_the_last_export(hub, tmp_path):
    folder = write_export(tmp_path / "hf", **{"a_safetensors": b"1", "b_safetensors": b"2"})
    url = HubRepository("me/model").push(folder, "Export of first")
    assert url == f"http://127.0.0.1:{hub.server_port}/me/model/commit/2"
    write_export(folder, a_safetensors=b"3")
    HubRepository("me/model", public=True).push(folder, "Export of second")
    files = {".gitattributes": b"", ".export.json": b"[]", "config.json": b"{}", "a.safetensors": b"3"}
    assert hub.files == {"me/model": files}
    assert hub.private == {"me/model": True}  # as it was created
    assert hub.messages == ["Export of first", "Export of second"]


def test_a_new_repository_is_public_where_that_is_said(hub):
    HubRepository("me/open", public=True)
    assert hub.private == {"me/open": False}


def test_refused(hub, monkeypatch):
    hub.files["me/other"] = {"README.md": b"", "config.json": b"{}"}
    with pytest.raises(RunError, match=r"me/other on the Hub holds files that no export has written: name another"):
        HubRepository("me/other")
    with pytest.raises(ValueError, match=r"'model' is no repository of the Hub: give OWNER/NAME"):
        HubRepository("model")
    with pytest.raises(ValueError, match=r"'me/a b' is no repository of the Hub: .*"):
        HubRepository("me/a b")
    hub.token = "hf_other"
    with pytest.raises(RunError, match=r"the Hub does not take me/model: .*401.*See hf auth login, and HF_TOKEN"):
        HubRepository("me/model")
