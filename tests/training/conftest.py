"""Every test has a cache folder of its own; shards on the disk, and in a bucket."""

import pytest

from vitruvian.data.pack import PackSettings, pack


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRUVIAN_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The digits in three shards to train on, and one to test with."""
    folder = tmp_path_factory.mktemp("shards")
    pack("digits", folder, PackSettings(shard_mb=1))
    assert len(list(folder.glob("train/*.tar"))) == 3
    return folder


@pytest.fixture(scope="module")
def bucket(shards):
    """The shards in a bucket behind an S3 API."""
    s3fs = pytest.importorskip("s3fs")
    moto, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        s3fs.S3FileSystem.clear_instance_cache()  # of earlier endpoints
        client = boto3.client("s3")
        client.create_bucket(Bucket="digits")
        for path in shards.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "digits", f"v1/{path.relative_to(shards)}")
        yield "s3://digits/v1"
    server.stop()
