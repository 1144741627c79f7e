"""Objects in a store, by way of fsspec: written and verified, read, listed and deleted; and which errors pass by themselves."""

import base64
import contextlib
import errno
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from powertrain.records import RunFailed, WrongUse
from powertrain.records.addresses import check_address
from powertrain.records.json_files import replace_file, sync

READ_BYTES, COPIED_BYTES = 8 << 20, 1 << 20
PROBE = ".probe-"                            # begins the name of a small object that is deleted at once
PART_BYTES, MOST_PARTS = 16 << 20, 9_000     # of an upload in parts to S3, which takes 10,000
MANIFEST_BYTES = 8 << 20                     # at most, for some 40,000 files; longer ones are not read
EXTRAS = {"s3": "s3", "gs": "gs", "az": "az", "sftp": "sftp"}        # of pip install 'powertrain[NAME]'
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {"use_listings_cache": False, "config_kwargs": {"connect_timeout": 10, "read_timeout": 60}}}
# what a person has to mend; the rest may pass by itself
NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "UnauthorizedSSOTokenError",
                  "DefaultCredentialsError", "AuthenticationException", "LocalTokenNotFoundError", "ClientAuthenticationError",
                  "SSOTokenLoadError", "ProfileNotFound"}
FULL_OR_CLOSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Damaged(OSError):
    """The store gave back other bytes than its own checksum tells."""


class OtherBytes(OSError):
    """The store holds other bytes than were sent."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the store holds other bytes than were sent")


class Store:
    """The objects under an address. Every method raises what fsspec and its back end raise: see `cure_of`."""

    def __init__(self, address: str) -> None:
        from fsspec.core import url_to_fs

        self.address = check_address(address)
        self._rest: Callable[[], None] = lambda: None
        self._parts_at_once = 2              # to S3
        self.scheme = self.address.partition("://")[0]
        try:
            self.files, self._root = url_to_fs(self.address, **OPTIONS.get(self.scheme, {}))
        except ImportError as error:
            extra = EXTRAS.get(self.scheme)
            raise WrongUse(f"{self.scheme}:// needs a library that is not installed ({error.name or error}); "
                           f"`pip install 'powertrain[{extra}]'` installs it") from None

    def keep_pace(self, rest: Callable[[], None]) -> None:
        """Call `rest` from now on after each piece of a file, where nothing else is on its way that would wait too long."""
        self._rest, self._parts_at_once = rest, 1

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @property
    def compares_sha256(self) -> bool:
        """Return whether what is stored is held against its sha256, and not against another sum of the file that was sent."""
        return self.scheme not in ("s3", "gs")

    def put(self, file: Path, name: str, sha256: str) -> None:
        """Store a file, and return once the store holds these very bytes. What it holds already is not sent again."""
        if self._holds(file, name, sha256):
            return
        if self.scheme == "file":
            self._copy(file, Path(self._path(name)))
        else:
            self._send(file, self._path(name))
        if not self._holds(file, name, sha256):
            raise OtherBytes

    def _copy(self, file: Path, to: Path) -> None:
        """Copy into a folder, in pieces: fsspec does it in one call of the system, which knows no rest."""
        to.parent.mkdir(parents=True, exist_ok=True)
        piece = memoryview(bytearray(COPIED_BYTES))
        with open(file, "rb", buffering=0) as source, open(to, "wb") as copy:
            while got := source.readinto(piece):
                copy.write(piece[:got])
                self._rest()
        sync(to)
        sync(to.parent)

    def _send(self, file: Path, path: str) -> None:
        from fsspec import Callback

        if self.scheme == "sftp":
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)
        more: dict[str, Any] = {}
        if self.scheme == "s3":
            more = {"chunksize": part_bytes(file.stat().st_size), "max_concurrency": self._parts_at_once}
        if self.scheme in ("s3", "gs"):      # the others say nothing in between, or with other parts on their way
            more["callback"] = Callback(hooks={"rest": lambda *_, **__: self._rest()})
        self.files.put_file(str(file), path, **more)

    def _holds(self, file: Path, name: str, sha256: str) -> bool:
        """Return whether the store has these bytes: by the checksum that it has computed itself, else by reading them back."""
        info = self._info(name)
        if info is None or info["size"] != file.stat().st_size:
            return False
        try:
            return self._is_told(info, file, sha256) or hash_of(self.chunks(name)) == sha256
        except Damaged:
            return False

    def _is_told(self, info: Mapping[str, Any], file: Path, sha256: str) -> bool:
        if self.scheme == "s3":              # one that is encrypted with a key of its own has another ETag, and is read back
            return bool(info.get("ETag", "").strip('"') == etag_of(file))
        if self.scheme == "gs":
            return info.get("md5Hash") == base64.b64encode(_md5(file)).decode()
        return self.scheme == "hf" and (info.get("lfs") or {}).get("sha256") == sha256

    def _info(self, name: str) -> Mapping[str, Any] | None:
        self.files.invalidate_cache()
        try:
            return dict(self.files.info(self._path(name)))
        except FileNotFoundError:
            return None

    def put_manifest(self, name: str, value: Mapping[str, Any]) -> None:
        """Store a small JSON object, once, and verify it. Raises WrongUse where another one is there."""
        content = (json.dumps(value, indent=1) + "\n").encode()
        if len(content) > MANIFEST_BYTES:
            raise RunFailed(f"{name} would list too many files for a mirror")
        there = self.read_manifest(name)
        if there is None:
            if self.scheme == "file":
                replace_file(Path(self._path(name)), content)
            else:
                self.files.pipe_file(self._path(name), content)
            there = self.read_manifest(name)
            if there is None:
                raise OtherBytes
        if there != value:
            raise WrongUse(f"{self.address}/{name} was written by somebody else; use another mirror or another name")

    def read_manifest(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object of that name; None where there is none, or none that is whole."""
        info = self._info(name)
        if info is None or info["size"] > MANIFEST_BYTES:
            return None
        try:
            found = json.loads(b"".join(self.chunks(name)))
        except (ValueError, RecursionError, Damaged):
            return None
        return found if isinstance(found, dict) else None

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open an object for reading. Raises Damaged where the store's own checksum is not that of the bytes."""
        try:
            with self.files.open(self._path(name), "rb", block_size=READ_BYTES) as file:
                yield file
        except Exception as error:
            if type(error).__name__ == "FlexibleChecksumError":      # botocore's
                raise Damaged(errno.EIO, "the store gave back other bytes than its checksum tells") from error
            raise

    def chunks(self, name: str) -> Iterator[bytes]:
        with self.open(name) as file:
            while chunk := file.read(READ_BYTES):
                yield chunk
                self._rest()

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of all objects in a folder of the store, by name."""
        self.files.invalidate_cache()
        path = self._path(folder) if folder else self._root
        try:
            found = self.files.find(path, detail=True)
        except FileNotFoundError:
            return {}
        return {name[len(self._root):].lstrip("/"): info["size"] for name, info in sorted(found.items())}

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self._path(name))

    def probe(self) -> None:
        """Write, read and delete a small object."""
        name, content = f"{PROBE}{secrets.token_hex(4)}", secrets.token_bytes(16)
        self.files.pipe_file(self._path(name), content)
        try:
            if b"".join(self.chunks(name)) != content:
                raise OSError(errno.EIO, "the store gave back other bytes than were sent")
        finally:
            self.files.rm_file(self._path(name))

    def drop_unfinished(self) -> None:
        """Delete the parts of uploads to S3 that a crash has left, which are paid for and not listed."""
        if self.scheme == "s3":
            bucket, _, prefix = self._root.partition("/")
            for upload in self.files.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/"):
                    self.files.abort_mpu(bucket, upload["Key"], upload["UploadId"])


# ------------------------------------------------------------------------------------------------ checksums


def hash_of(chunks: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def part_bytes(size_bytes: int) -> int:
    """Return the size of the parts in which a file goes to S3."""
    return max(PART_BYTES, -(-size_bytes // MOST_PARTS))


def etag_of(file: Path) -> str:
    """Return the ETag that S3 gives a file: the md5 of its bytes, or of the md5 sums of its parts, and their number."""
    size_bytes = file.stat().st_size
    part = part_bytes(size_bytes)
    if size_bytes < 2 * part:                # s3fs sends it whole
        return _md5(file).hex()
    with open(file, "rb") as content:
        sums = [hashlib.md5(chunk, usedforsecurity=False).digest() for chunk in iter(lambda: content.read(part), b"")]
    return f"{hashlib.md5(b''.join(sums), usedforsecurity=False).hexdigest()}-{len(sums)}"


def _md5(file: Path) -> bytes:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False)).digest()


# ------------------------------------------------------------------------------------------------ errors


def cure_of(error: BaseException, address: str) -> str | None:
    """Return what a person has to do about an error of a store; None for one that may pass by itself."""
    if isinstance(error, FileNotFoundError):
        return f"make the bucket or folder of {address} first, or name another mirror"
    if isinstance(error, PermissionError):
        return f"give these credentials the right to read, write and delete in {address}, or renew them"
    if type(error).__name__ in NO_CREDENTIALS:
        return f"sign in to the store of {address} as its own tools do (environment, credentials file or key)"
    if isinstance(error, OSError) and error.errno in FULL_OR_CLOSED:
        return f"free space in {address}, or make it writable"
    if isinstance(error, RunFailed):         # of a file here
        return "look at the disk and the files of this machine"
    if isinstance(error, WrongUse):
        return "nothing was overwritten"
    return None if isinstance(error, OSError | TimeoutError) or type(error).__module__.partition(".")[0] in (
        "aiohttp", "botocore", "aiobotocore", "httpx", "requests", "google", "gcsfs", "azure", "paramiko", "urllib3",
        "huggingface_hub") else "this is a fault of powertrain or of the store's library: please report it"


def told(error: BaseException) -> str:
    """Return an error in a few words, without the addresses and headers that libraries add, which may hold secrets."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    text = text.splitlines()[0].partition("?")[0][:200]
    return text + '"' * (text.count('"') % 2)            # of an address that was cut
