"""Where models are found, without a network: the hub's cache laid out by hand, and a hub of our own on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, get_session

from faulty_proxy import Fault, proxy_before
from powertrain.models.huggingface.hub import find_model, refuse_inner
from powertrain.records import WrongUse

COMMIT, OLDER = "a" * 40, "b" * 40
MODEL = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{ }"}


def answer_at(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes huggingface_hub take this port for the hub."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                        f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that refuses the connection."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    answer_at(port, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def lay_out(cache: Path, files: dict[str, bytes], commit: str = COMMIT, branch: str | None = "main") -> Path:
    """A repository org/name as huggingface_hub keeps it: links into blobs."""
    kept = cache / "models--org--name"
    snapshot = kept / "snapshots" / commit
    for folder in (snapshot, kept / "blobs", kept / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        blob = kept / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    if branch is not None:
        (kept / "refs" / branch).write_text(commit)
    return snapshot


@dataclass
class Hub:
    """What the hub on this machine has, how it refuses, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    refusal: tuple[int, str] | None = None         # status and X-Error-Code
    sends_on: str = ""                             # the address to which downloads of weights are sent on
    by_xet: str = ""                               # the address of the store that is said to hold the weights in pieces
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        if self.refusal is not None:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b"{}"
        if self.sends_on and path.endswith("model.safetensors"):
            return 302, {"Location": self.sends_on, "ETag": '"e"', "X-Repo-Commit": COMMIT, "X-Linked-Size": "7"}, b""
        if path.startswith("/store/"):
            return 404, {}, b""
        if path == "/xet":
            return 200, {"X-Xet-Cas-Url": self.by_xet, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": "9999999999"}, b""
        if path.startswith(f"/org/name/resolve/{COMMIT}/"):
            content = self.files[path.rsplit("/", 1)[1].split("?")[0]]
            xet = {"X-Xet-Hash": "a" * 64, "X-Xet-Refresh-Route": f"{constants.ENDPOINT}/xet"} if self.by_xet else {}
            return 200, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT, **xet}, content
        if "/tree/" in path:
            listing = [{"type": "file", "path": name, "size": len(content), "oid": "c" * 40}
                       for name, content in self.files.items()]
            return 200, {}, json.dumps(listing).encode()
        return 200, {}, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode()


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that answers."""
    has = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            status, headers, content = has.answer(self.path)
            if (asked := self.headers.get("Range")) is not None and status == 200:       # a download goes on
                begin = int(asked.removeprefix("bytes=").partition("-")[0])
                headers |= {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
                status, content = 206, content[begin:]
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    answer_at(server.server_port, monkeypatch)
    yield has
    server.shutdown()
    server.server_close()


def refusal(path: str, revision: str | None = None) -> str:
    with pytest.raises(WrongUse) as caught:
        find_model(path, revision=revision)
    return str(caught.value)


def test_a_folder_is_taken_as_it_is(tmp_path: Path, cache: Path) -> None:
    assert find_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["nowhere", "./nowhere", "../a/b", "a/b/c", "/a/b", "org/", "org name/x"])
def test_what_is_neither_folder_nor_id_is_refused(path: str, cache: Path) -> None:
    assert f"there is no folder {path}" in refusal(path)
    assert "org/name" in refusal(path)


def test_a_file_is_refused(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert "GGUF file is made from a model" in refusal(str(tmp_path / "model.gguf"))
    (tmp_path / "model.safetensors").touch()
    assert "give the folder" in refusal(str(tmp_path / "model.safetensors"))


def test_cached_files_are_used_and_the_hub_is_not_asked(cache: Path, hub: Hub) -> None:
    snapshot = lay_out(cache, MODEL)
    assert find_model("org/name") == snapshot
    assert not hub.asked


def test_a_revision_is_the_one_that_was_asked_for(cache: Path) -> None:
    newest, older = lay_out(cache, MODEL), lay_out(cache, MODEL, OLDER, "v1")
    assert find_model("org/name") == newest
    assert find_model("org/name", revision="v1") == find_model("org/name", revision=OLDER) == older
    assert "no org/name in the Hugging Face cache" in refusal("org/name", "v2")


def test_another_revision_in_the_cache_is_not_taken_for_the_main_branch(cache: Path) -> None:
    lay_out(cache, MODEL, branch=None)
    assert "no org/name in the Hugging Face cache" in refusal("org/name")


def test_cached_shards_and_cached_adapters_are_enough(cache: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    sharded = {"config.json": b"{}", "model.safetensors.index.json": index, "tokenizer.model": b"",
               "model-1.safetensors": b"1", "model-2.safetensors": b"2"}
    whole = lay_out(cache, sharded)
    assert find_model("org/name") == whole
    adapter = lay_out(cache, {"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, OLDER, "adapter")
    assert find_model("org/name", revision="adapter") == adapter


def test_without_a_network_the_refusal_waits_for_nothing_and_says_what_to_do(cache: Path,
                                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)        # between one try and the next
    message = refusal("org/name")
    assert not waited
    assert "no org/name in the Hugging Face cache" in message
    assert "could not be asked (ConnectError" in message
    assert message.endswith("connect and run it again, or give a folder that holds the model")
    assert "\n" not in message


@pytest.mark.parametrize(("lost", "named"), [("model-2.safetensors", "model-2.safetensors"), ("config.json", "config.json")])
def test_missing_files_of_a_cached_model_are_named(lost: str, named: str, cache: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    snapshot = lay_out(cache, {"config.json": b"{}", "model.safetensors.index.json": index, "tokenizer.json": b"{}",
                               "model-1.safetensors": b"1", "model-2.safetensors": b"2"})
    (snapshot / lost).resolve().unlink()               # the link stays, and leads nowhere
    assert f"cache lacks {named} of org/name (in {snapshot})" in refusal("org/name")


def test_offline_by_wish_is_said_and_nothing_is_asked(cache: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set; unset it" in refusal("org/name")
    snapshot = lay_out(cache, MODEL)
    assert find_model("org/name") == snapshot
    assert not hub.asked


@pytest.mark.parametrize(("status", "code", "message"), [
    (401, "RepoNotFound", "the Hugging Face hub has no org/name that you may see; check the spelling"),
    (404, "RepoNotFound", "the Hugging Face hub has no org/name that you may see; check the spelling"),
    (403, "GatedRepo", "org/name is gated.*accept its terms.*hf auth login"),
    (404, "RevisionNotFound", "org/name has no revision v9"),
    (500, "", r"could not be asked \(HfHubHTTPError"),
])
def test_each_refusal_of_the_hub_has_its_own_sentence(status: int, code: str, message: str, hub: Hub) -> None:
    hub.refusal = status, code
    with pytest.raises(WrongUse, match=message) as caught:
        find_model("org/name", revision="v9")
    assert "\n" not in str(caught.value)


def test_a_download_fetches_what_is_needed_and_no_pickle(cache: Path, hub: Hub) -> None:
    hub.files = MODEL | {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"again", "original/params.json": b"",
                         "chat_template.jinja": b"{{ messages }}", "README.md": b""}
    found = find_model("org/name")
    assert {file.name: file.read_bytes() for file in found.iterdir()} == MODEL | {"chat_template.jinja": b"{{ messages }}"}
    hub.asked.clear()
    assert find_model("org/name") == found
    assert not hub.asked


def test_a_cached_model_is_completed(cache: Path, hub: Hub) -> None:
    snapshot = lay_out(cache, {"config.json": b"{}"})
    hub.files = MODEL
    assert find_model("org/name") == snapshot
    assert (snapshot / "model.safetensors").read_bytes() == b"weights"


def test_a_repository_with_pickled_weights_only_is_refused(hub: Hub) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "tokenizer.json": b"{}"}
    assert "hub has no model.safetensors" in refusal("org/name")
    assert "pickled ones (pytorch_model.bin) are never loaded" in refusal("org/name")


def test_a_tokenizer_that_is_not_cached_is_fetched_if_it_can_be(cache: Path, hub: Hub,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = lay_out(cache, {name: MODEL[name] for name in ("config.json", "model.safetensors")})
    hub.files = MODEL
    assert (find_model("org/name") / "tokenizer.json").exists()
    (snapshot / "tokenizer.json").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model("org/name") == snapshot


def test_a_download_that_is_sent_on_to_a_clouds_keys_is_refused(cache: Path, hub: Hub) -> None:
    hub.files, hub.sends_on = MODEL, "http://169.254.169.254/latest/meta-data/"
    assert "sends downloads on to 169.254.169.254, which lies in this machine's own network" in refusal("org/name")


def test_another_hub_names_no_store_that_is_asked_past_that_check(cache: Path, hub: Hub,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.files, hub.by_xet = MODEL, f"{constants.ENDPOINT}/store"
    assert (find_model("org/name") / "model.safetensors").read_bytes() == b"weights"
    assert not [path for path in hub.asked if path.startswith("/store/")]


@pytest.mark.parametrize(("of_hub", "sent_on_to", "is_refused"), [
    ("93.184.216.34", "127.0.0.1", True), ("93.184.216.34", "10.0.0.5", True), ("93.184.216.34", "[::1]", True),
    ("10.0.0.4", "169.254.169.254", True), ("10.0.0.4", "10.0.0.5", False), ("93.184.216.34", "93.184.216.35", False),
    ("10.0.0.4", "10.0.0.4", False)])
def test_a_hub_on_the_internet_may_not_send_into_this_network(of_hub: str, sent_on_to: str, is_refused: bool,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"https://{of_hub}")
    with pytest.raises(WrongUse) if is_refused else contextlib.nullcontext():
        refuse_inner(get_session().build_request("GET", f"https://{sent_on_to}/x"))


WEIGHTS = "resolve/" + COMMIT + "/model.safetensors"


@pytest.mark.parametrize("fault", [
    Fault("cut_answer", 0, "GET", WEIGHTS), Fault("cut_answer", 3, "GET", WEIGHTS), Fault("corrupt_answer", 3, "GET", WEIGHTS),
    Fault("status", 500, "GET", WEIGHTS), Fault("status", 403, "GET", WEIGHTS), Fault("status", 503, "GET", "/tree/"),
    Fault("corrupt_answer", 1, "GET", "/tree/"), Fault("cut_answer", 9, "GET", "/api/models"),
    Fault("corrupt_answer", 3, "GET", "config.json")], ids=lambda fault: f"{fault.kind}-{fault.number}-{fault.key[-8:]}")
def test_a_download_that_is_disturbed_ends_in_a_sentence_and_comes_whole_the_next_time(
        fault: Fault, cache: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)           # huggingface_hub's, between its tries
    hub.files = MODEL
    with proxy_before(constants.ENDPOINT.removeprefix("http://")) as proxy:
        answer_at(int(proxy.url.rpartition(":")[2]), monkeypatch)
        proxy.faults = [fault]
        said = refusal("org/name")
        assert "org/name" in said
        assert "\n" not in said
        proxy.faults = []
        found = find_model("org/name")
    assert {file.name: file.read_bytes() for file in found.iterdir()} == MODEL
    assert not [*cache.rglob("*.incomplete")]


@pytest.mark.parametrize("fault", [Fault("cut_answer", 3, "GET", WEIGHTS, times=2), Fault("delay", 300, "GET", WEIGHTS)],
                         ids=lambda fault: fault.kind)
def test_a_fault_that_passes_is_not_seen(fault: Fault, cache: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = MODEL
    with proxy_before(constants.ENDPOINT.removeprefix("http://")) as proxy:
        answer_at(int(proxy.url.rpartition(":")[2]), monkeypatch)
        proxy.faults = [fault]
        found = find_model("org/name")
    assert (found / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
