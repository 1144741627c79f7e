"""Objects in a folder and in an S3 server: verified by what the store says, or read back; and errors with their cures."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from faulty_proxy import Fault, Proxy
from powertrain.mirror import store as stores
from powertrain.mirror.store import Store, cure_of, etag_of, told
from powertrain.records import WrongUse

MIB = 1 << 20


def made(folder: Path, size_bytes: int = 5000) -> tuple[Path, str]:
    """A file of random bytes and its sha256."""
    content = os.urandom(size_bytes)
    (folder / "made").write_bytes(content)
    return folder / "made", hashlib.sha256(content).hexdigest()


def test_an_object_is_stored_listed_read_and_deleted(address: str, tmp_path: Path) -> None:
    store, (file, sha256) = Store(address), made(tmp_path)
    assert store.sizes() == {}
    store.put(file, "step-000001/weights", sha256)
    store.put(file, "other", sha256)
    assert store.sizes() == {"other": 5000, "step-000001/weights": 5000}
    assert store.sizes("step-000001") == {"step-000001/weights": 5000}
    assert b"".join(store.chunks("step-000001/weights")) == file.read_bytes()
    store.delete("step-000001/weights")
    store.delete("step-000001/weights")      # which is not there any more
    assert store.sizes() == {"other": 5000}


def test_the_probe_leaves_nothing(address: str) -> None:
    Store(address).probe()
    assert Store(address).sizes() == {}


def test_what_the_store_has_is_not_sent_again(bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    store, (file, sha256) = Store(f"{bucket}/run"), made(tmp_path)
    store.put(file, "weights", sha256)
    store.put(file, "weights", sha256)
    assert sum(method == "PUT" and path.endswith("weights") for method, path in proxy.seen) == 1


@pytest.mark.parametrize(("size_bytes", "parts"), [(4 * MIB, 0), (10 * MIB, 2), (11 * MIB + 17, 3)])
def test_the_etag_of_one_part_and_of_several_is_known_beforehand(
        bucket: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, parts: int) -> None:
    monkeypatch.setattr(stores, "PART_BYTES", 5 * MIB)   # S3 takes no smaller ones
    store, (file, sha256) = Store(f"{bucket}/run"), made(tmp_path, size_bytes)
    store.put(file, "weights", sha256)
    assert sum("partNumber" in path for _, path in proxy.seen) == parts
    assert etag_of(file).endswith(f"-{parts}") is (parts > 0)
    assert not any(method == "GET" and "/weights" in path for method, path in proxy.seen)    # it was not read back


def test_a_store_with_another_etag_is_read_back(
        bucket: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "etag_of", lambda file: "of an object that is encrypted")
    store, (file, sha256) = Store(f"{bucket}/run"), made(tmp_path)
    store.put(file, "weights", sha256)
    assert any(method == "GET" and "/weights" in path for method, path in proxy.seen)
    proxy.faults = [Fault("corrupt_answer", 7, "GET", "/weights")]
    with pytest.raises(OSError, match="other bytes"):
        store.put(file, "weights", sha256)


def test_an_upload_that_was_corrupted_on_its_way_is_an_error_that_passes(bucket: str, proxy: Proxy, tmp_path: Path) -> None:
    store, (file, sha256) = Store(f"{bucket}/run"), made(tmp_path)
    proxy.faults = [Fault("corrupt_request", 100, "PUT", "/weights", times=1)]
    with pytest.raises(OSError, match="other bytes") as raised:
        store.put(file, "weights", sha256)
    assert cure_of(raised.value, store.address) is None
    store.put(file, "weights", sha256)
    assert b"".join(store.chunks("weights")) == file.read_bytes()


def test_a_manifest_is_written_once(address: str) -> None:
    store = Store(address)
    assert store.read_manifest("MIRROR.json") is None
    store.put_manifest("MIRROR.json", {"run": "this"})
    store.put_manifest("MIRROR.json", {"run": "this"})
    with pytest.raises(WrongUse, match="written by somebody else"):
        store.put_manifest("MIRROR.json", {"run": "other"})
    assert store.read_manifest("MIRROR.json") == {"run": "this"}


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": "' + b"x" * (10 * MIB) + b'"}'])
def test_a_manifest_that_is_none_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "MIRROR.json").write_bytes(content)
    assert Store(f"file://{tmp_path}").read_manifest("MIRROR.json") is None


def test_parts_that_a_crash_has_left_are_dropped(bucket: str) -> None:
    store = Store(f"{bucket}/runs/run")
    name = bucket.removeprefix("s3://")
    for key in ("runs/run/weights", "runs/run-2/weights"):
        store.files.call_s3("create_multipart_upload", Bucket=name, Key=key)
    store.drop_unfinished()
    assert [upload["Key"] for upload in store.files.list_multipart_uploads(name)] == ["runs/run-2/weights"]


# ------------------------------------------------------------------------------------------------ errors


def failure_of(address: str) -> tuple[str, str | None]:
    """What a probe of this address says, and its cure."""
    try:
        Store(address).probe()
    except Exception as error:
        return told(error), cure_of(error, address)
    raise AssertionError("the probe went well")


def test_a_missing_bucket_is_named(proxy: Proxy) -> None:
    why, cure = failure_of("s3://there-is-no-such-bucket/run")
    assert "bucket" in why
    assert cure == "make the bucket or folder of s3://there-is-no-such-bucket/run first, or name another mirror"


@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_missing_rights_are_named(bucket: str, proxy: Proxy, method: str) -> None:
    proxy.faults = [Fault("status", 403, method)]
    _, cure = failure_of(f"{bucket}/run")
    assert cure is not None
    assert "the right to read, write and delete" in cure


def test_without_credentials_it_says_where_to_get_some(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    _, cure = failure_of(f"{bucket}/run")
    assert cure is not None
    assert cure.startswith("sign in to the store")


def test_a_server_that_fails_or_is_not_there_may_pass(bucket: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.faults = [Fault("status", 503, "DELETE")]
    monkeypatch.setattr("s3fs.core.asyncio.sleep", _no_pause)
    assert failure_of(f"{bucket}/run")[1] is None


async def _no_pause(seconds: float) -> None:
    pass


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_or_closed_disk_needs_somebody(code: int) -> None:
    assert cure_of(OSError(code, os.strerror(code)), "file:///nas/run") == "free space in file:///nas/run, or make it writable"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(WrongUse, match=r"pip install 'powertrain\[gs\]'"):
        Store("gs://bucket/run")


@pytest.mark.parametrize(("address", "why"), [
    ("s3://key:secret@bucket/run", "holds a password"), ("sftp://me:secret@host/run", "holds a password"),
    ("s3://bucket/run?X-Amz-Signature=secret", "is not an address"), ("ftp://host/run", "is not an address"),
    ("s3://", "is not an address"), ("file://relative/run", "comes a full path"), ("s3://bucket/a b", "is not an address"),
    ("s3://bucket/\x1b[2J", "is not an address")])
def test_addresses_that_are_refused(address: str, why: str) -> None:
    with pytest.raises(WrongUse, match=why) as raised:
        Store(address)
    assert "secret" not in str(raised.value)
    assert "\x1b" not in str(raised.value)


def test_what_is_told_of_an_error_holds_no_signature() -> None:
    assert told(ValueError("GET https://host/key?X-Amz-Signature=secret failed\nand more")) == "GET https://host/key"
    assert told(ValueError('no connection to "https://host/key?signed=1"')) == 'no connection to "https://host/key"'
