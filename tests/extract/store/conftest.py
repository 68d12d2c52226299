from __future__ import annotations

import functools
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from extract.store.format.shard import Shard
from extract.store.places import objects as remote
from tests.extract.store.bucket_server import KEY, SECRET, TOKEN, Proxy, direct, served
from tests.extract.store.rows import complete_data_set


@pytest.fixture(scope="session")
def _complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_data_set(tmp_path_factory.mktemp("complete") / "out").out


@pytest.fixture
def complete(_complete: Path, tmp_path: Path) -> Path:
    """A finished data set of three shards."""
    return shutil.copytree(_complete, tmp_path / "out")


@pytest.fixture(scope="session")
def server() -> Iterator[Proxy]:
    """The server, and clients that parse the descriptions of services once, not once each."""
    from botocore.loaders import JSONFileLoader

    loaded = functools.cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch, served() as proxy:
        patch.setattr(JSONFileLoader, "load_file", lambda self, path: loaded(path))
        yield proxy


@pytest.fixture
def proxy(server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The server as the libraries find it, with short pauses; the cache is a folder of the test's own."""
    import s3fs

    server.forget()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": TOKEN,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "_WAIT_S", 0.01)
    monkeypatch.setattr(remote, "_GIVE_UP_S", 0)  # after five attempts
    monkeypatch.setattr(remote, "_ANSWER_S", 1)
    monkeypatch.setattr(remote, "_STORED_S", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    return server


@pytest.fixture
def url(proxy: Proxy) -> str:
    """A place in a new bucket."""
    bucket = f"b-{uuid.uuid4().hex[:12]}"
    direct(proxy).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/sets/photos"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files of shards that were opened."""
    names: list[str] = []
    original = Shard.__init__

    def recorded(shard: Shard, path: Path, *name: str) -> None:
        names.append(path.name)
        original(shard, path, *name)

    monkeypatch.setattr(Shard, "__init__", recorded)
    return names
