"""A Hugging Face hub on this machine, as far as uploading and downloading a model needs it, for huggingface_hub's own client.

Source: huggingface_hub's requests (hf_api.py, _commit_api.py, lfs.py) and Git LFS's batch API.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "t" * 34
USER = "me"


@dataclass
class Repository:
    is_private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    messages: list[str] = field(default_factory=list)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr((self.messages, sorted(self.files.items()))).encode()).hexdigest()


Answer = tuple[int, dict[str, str], bytes]


def said(status: int, value: Any, **headers: str) -> Answer:
    return status, {"Content-Type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}, \
        json.dumps(value).encode()


NOT_FOUND = said(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")


@dataclass
class Hub:
    """What the hub has, and what it was asked."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)        # sha256 -> content
    may_write: tuple[str, ...] = (USER, "team")
    asked: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        path = path.partition("?")[0]
        self.asked.append((method, path))
        if method == "PUT" and path.startswith("/large/"):       # addresses that carry their own permission
            if hashlib.sha256(body).hexdigest() != path.rpartition("/")[2]:
                return said(400, {"error": "another content"})
            self.large[path.rpartition("/")[2]] = body
            return said(200, {})
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return said(401, {"error": "Invalid credentials in Authorization header"})
        if path == "/api/whoami-v2":
            return said(200, {"name": USER, "type": "user", "orgs": [{"name": "team"}]})
        if path == "/api/validate-yaml":
            return said(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        found = re.fullmatch(r"(?:/api/models)?/([\w.-]+/[\w.-]+?)(?:\.git/info/lfs/objects)?(?:/(.*))?", path)
        if found is None or found[1] not in self.repositories:
            return NOT_FOUND
        repository, what = self.repositories[found[1]], found[2] or ""
        if method == "POST" and found[1].partition("/")[0] not in self.may_write:
            return said(403, {"error": "Forbidden: you must have write access"})
        if what == "batch":
            return said(200, {"transfer": "basic", "objects": [self._object(one) for one in json.loads(body)["objects"]]})
        if what.startswith("preupload/"):
            return said(200, {"files": [{"path": one["path"], "shouldIgnore": False, "oid": None,
                                         "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular"}
                                        for one in json.loads(body)["files"]]})
        if what.startswith("commit/"):
            return self._commit(found[1], repository, [json.loads(line) for line in body.splitlines()])
        if what.startswith("resolve/"):
            return self._resolve(repository, what.split("/", 2)[2])
        if what.startswith("tree/"):
            return said(200, [{"type": "file", "path": name, "size": len(content), "oid": git_sha(content)}
                              for name, content in repository.files.items()])
        return said(200, self._info(found[1], repository))

    def _create(self, asked: dict[str, Any]) -> Answer:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if name.partition("/")[0] not in self.may_write:
            return said(403, {"error": f"You don't have the rights to create a model under the namespace {name}"})
        if name in self.repositories:
            return said(409, {"error": "You already created this model repo"})
        self.repositories[name] = Repository(asked.get("visibility") == "private")
        return said(200, {"url": f"{self.url}/{name}"})

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.large:
            return asked
        return asked | {"actions": {"upload": {"href": f"{self.url}/large/{asked['oid']}"}}}

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> Answer:
        head = next(line["value"] for line in lines if line["key"] == "header")
        if head.get("parentCommit") not in (None, repository.commit):
            return said(412, {"error": "A commit has happened since. Please refresh and try again."})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.large:
                    return said(400, {"error": f"LFS object {value['oid']} was never uploaded"})
                repository.files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        repository.messages.append(head["summary"])
        return said(200, {"commitUrl": f"{self.url}/{name}/commit/{repository.commit}", "commitOid": repository.commit,
                          "success": True})

    def _resolve(self, repository: Repository, name: str) -> Answer:
        if name not in repository.files:
            return said(404, {}, X_Error_Code="EntryNotFound")
        content = repository.files[name]
        return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": repository.commit}, content

    def _info(self, name: str, repository: Repository) -> dict[str, Any]:
        files = [{"rfilename": one, "size": len(content), "blobId": git_sha(content), **(
            {"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}}
            if one.endswith(".safetensors") else {})} for one, content in repository.files.items()]
        return {"id": name, "sha": repository.commit, "private": repository.is_private, "siblings": files}


def git_sha(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """Yield a hub that answers at its `url`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = hub.answer(self.command, self.path, self.headers, body)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_POST = do_PUT = do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
