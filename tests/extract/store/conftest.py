from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from extract import FeatureReader
from extract.store.format.dataset import DataSet
from extract.store.format.shard import Shard
from extract.store.places import objects as remote
from tests.extract.store.bucket_server import KEY, SECRET, TOKEN, Proxy, new_url, served
from tests.extract.store.rows import FAILED, complete_data_set, empty_data_set


@pytest.fixture(scope="session")
def _complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return complete_data_set(tmp_path_factory.mktemp("complete") / "out").out


@pytest.fixture
def complete(_complete: Path, tmp_path: Path) -> Path:
    """A finished data set of three shards."""
    return shutil.copytree(_complete, tmp_path / "out")


@pytest.fixture
def plain(tmp_path: Path) -> FeatureReader:
    """Of three shards, with a failed row."""
    return FeatureReader(complete_data_set(tmp_path / "out", failed=(FAILED,)).out)


@pytest.fixture(params=[None, "gzip"])
def reader(tmp_path: Path, request: pytest.FixtureRequest) -> FeatureReader:
    """The same, and compressed."""
    return FeatureReader(complete_data_set(tmp_path / "out", request.param, failed=(FAILED,)).out)


@pytest.fixture
def data(tmp_path: Path) -> DataSet:
    """A data set of three shards, of which only the description is there."""
    return empty_data_set(tmp_path / "out")


@pytest.fixture(scope="session")
def server() -> Iterator[Proxy]:
    """The server, and clients that parse the descriptions of services once, not once each."""
    import s3fs
    from botocore.loaders import JSONFileLoader

    loaded = functools.cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch, served() as proxy:
        patch.setattr(JSONFileLoader, "load_file", lambda self, path: loaded(path))
        s3fs.S3FileSystem.clear_instance_cache()
        yield proxy


@pytest.fixture
def proxy(server: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The server as the libraries find it, with short pauses; the cache is a folder of the test's own."""
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
    monkeypatch.setattr(remote, "_CONNECT_S", 2)
    monkeypatch.setattr(remote, "_ANSWER_S", 1)
    monkeypatch.setattr(remote, "_STORED_S", 1)
    return server


@pytest.fixture
def url(proxy: Proxy) -> str:
    """A place in a new bucket."""
    return new_url(proxy)


@pytest.fixture
def new_clients(proxy: Proxy) -> Iterator[None]:
    """The library connects anew, with the environment that a test sets."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


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
