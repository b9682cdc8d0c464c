"""A run's copy on a server that speaks S3: what fsspec's memory cannot show, such as listings and addresses."""

import json
import shutil

import pytest

from rlft_fast.run import Store
from tests.run.counting import checkpoints, count, lose, result_of

pytestmark = pytest.mark.peers
ADDRESS = "s3://bucket/teams/a run"


@pytest.fixture
def s3(monkeypatch):
    """A client of the server, which has a bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "*",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem(use_listings_cache=False)
    files.makedirs("bucket", exist_ok=True)  # all servers of a process share what they hold
    yield files
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_another_machine_goes_on(s3, tmp_path):
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for folder in (whole, lost):
        folder.mkdir()
    count(whole)
    lose(lost, ADDRESS)
    assert Store(ADDRESS).fetch(lost / "run") == ["step_00000005"]
    count(lost, resume=True, checkpoint__store=ADDRESS)
    assert result_of(lost) == result_of(whole)
    assert Store(ADDRESS).checkpoints() == checkpoints(lost) == ["step_00000005", "step_00000006"]
    assert json.loads(s3.cat("bucket/teams/a run/hf/total.json")) == json.loads(
        (whole / "run" / "hf" / "total.json").read_text()
    )


def test_another_machine_goes_back(s3, tmp_path):
    """Folders of S3 are beginnings of names: they go with their last file."""
    address = "s3://bucket/teams/a run that goes back"
    changes = {"checkpoint__store": address, "checkpoint__asynchronous": False, "checkpoint__best": "accuracy"}
    count(tmp_path, **changes)
    run, store, before, seen = tmp_path / "run", Store(address), result_of(tmp_path), []
    shutil.rmtree(run)
    assert store.fetch(run, "step_3") == ["step_00000003", "step_00000006"]

    def look() -> None:
        seen.extend(store.checkpoints())
        seen.extend(name for name in ("hf", "summary.json") if s3.exists(f"{address}/{name}"))

    count(tmp_path, {("train_step", 3): look}, resume="step_3", **changes)
    assert seen == ["step_00000003"]
    assert result_of(tmp_path) == result_of(tmp_path, "run/later.1") == before
    assert s3.cat(f"{address}/best/total.json") == (run / "best/total.json").read_bytes()


def test_a_bucket_that_is_missing(s3, tmp_path, monkeypatch):
    monkeypatch.setattr("rlft_fast.run.store._PAUSES", ())
    with pytest.raises(OSError, match=r"the store s3://nowhere/run does not take run\.json: .*bucket"):
        count(tmp_path, checkpoint__store="s3://nowhere/run")
    assert not s3.exists("nowhere")
