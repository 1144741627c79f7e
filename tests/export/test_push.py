"""`powertrain push` with huggingface_hub's own client, to a hub on this machine."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from adapted_models import make_base, with_adapter
from example_folders import chat_folder
from faulty_proxy import Fault, Proxy, proxy_before
from hub_server import TOKEN, Hub, Repository, running_hub
from powertrain.cli import pushing
from powertrain.data.examples.tokenizer import open_example_tokenizer
from powertrain.export.push import find_place, read_upload
from powertrain.models.adapters.files import save_adapter
from powertrain.models.huggingface.folder import save_folder
from powertrain.models.huggingface.hub import find_model
from powertrain.records import RunFailed, WrongUse

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")   # huggingface_hub's own
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_folder(make_base("llama", vocabulary=330), folder / "tuned", open_example_tokenizer(chat_folder(folder / "words")))
    return folder / "tuned"


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "tuned"))


def answer_at(url: str, patch: Patch) -> None:
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: Patch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)           # a protocol of its own, which the tests' hub lacks
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(time, "sleep", lambda _: None)                   # huggingface_hub's, between its tries
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as hub:
        answer_at(hub.url, monkeypatch)
        yield hub


@pytest.fixture
def proxy(hub: Hub, monkeypatch: Patch) -> Iterator[Proxy]:
    """Before the hub: every request goes through it."""
    with proxy_before(hub.url.removeprefix("http://")) as proxy:
        hub.url = proxy.url
        answer_at(proxy.url, monkeypatch)
        yield proxy


def push(folder: Path, name: str = "tuned", **asked: Any) -> None:
    pushing.push(folder, name, **({"yes": True} | asked))


def refused(folder: Path, kind: type[Exception] = WrongUse, name: str = "tuned", **asked: Any) -> str:
    with pytest.raises(kind) as caught:
        push(folder, name, **asked)
    said = str(caught.value)
    assert "\n" not in said
    assert TOKEN not in said
    return said


def test_a_model_is_pushed_privately_and_opens_from_there(model: Path, hub: Hub, capsys: Captured) -> None:
    push(model, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["repository"] == "me/tuned"
    assert told["private"] is hub.repositories["me/tuned"].is_private is True
    assert set(hub.repositories["me/tuned"].files) - {".gitattributes"} == {path.name for path in model.iterdir()}
    opened = find_model("me/tuned")
    assert (opened / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_an_organisation_and_a_public_repository_have_to_be_asked_for(model: Path, hub: Hub, capsys: Captured) -> None:
    push(model, "team/tuned", public=True)
    assert not hub.repositories["team/tuned"].is_private
    assert "team/tuned, a new repository, PUBLIC" in capsys.readouterr().err
    assert "add --public if everybody may read" in refused(model, name="team/tuned")
    push(model)
    assert "me/tuned is a private repository, and a push leaves it so" in refused(model, public=True)
    assert "does not let this token write others/tuned" in refused(model, RunFailed, "others/tuned")


def test_nothing_is_pushed_without_asking(model: Path, hub: Hub, monkeypatch: Patch, capsys: Captured) -> None:
    assert "add --yes" in refused(model, yes=False)
    assert not hub.asked
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    assert refused(model, yes=False) == "nothing was pushed"
    assert not hub.repositories
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    push(model, yes=False)
    assert hub.repositories
    assert TOKEN not in "".join(capsys.readouterr())


def test_a_model_that_is_there_is_replaced_only_if_asked(copied: Path, hub: Hub) -> None:
    push(copied)
    before = dict(hub.repositories["me/tuned"].files)
    (copied / "model-00001-of-00002.safetensors").write_bytes((copied / "model.safetensors").read_bytes())
    shards = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(shards))
    (copied / "model.safetensors").unlink()
    said = refused(copied)
    assert "me/tuned exists on the Hugging Face hub and holds other files" in said
    assert "add --overwrite" in said
    assert hub.repositories["me/tuned"].files == before
    push(copied, overwrite=True)
    assert "model.safetensors" not in hub.repositories["me/tuned"].files         # or two models would lie there


def test_pushing_the_same_again_sends_nothing(model: Path, hub: Hub, capsys: Captured) -> None:
    push(model)
    hub.asked.clear()
    push(model)
    assert "has all of these files already" in capsys.readouterr().err
    assert {method for method, _ in hub.asked} == {"GET"}


# ------------------------------------------------------------------------------------------------ troubles


@pytest.mark.parametrize(("token", "says"), [("hf_" + "x" * 34, "wrong or has expired; log in anew by `hf auth login`"),
                                             ("", "has no token of the Hugging Face hub; log in by `hf auth login`")])
def test_a_bad_token_is_said_and_not_shown(token: str, says: str, model: Path, hub: Hub, monkeypatch: Patch, tmp_path: Path,
                                           capsys: Captured) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    said = refused(model)
    assert says in said
    assert not token or token not in said + "".join(capsys.readouterr())


def test_without_a_network_the_same_command_continues_later(model: Path, hub: Hub, monkeypatch: Patch) -> None:
    answer_at("http://127.0.0.1:9", monkeypatch)
    said = refused(model)
    assert "cannot be reached, or broke off (Conn" in said
    assert "connect, and run the same command again" in said
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set; unset it" in refused(model)


@pytest.mark.parametrize("fault", [
    Fault("status", 500, "PUT", "/large/"), Fault("cut_request", 500, "PUT", "/large/"),
    Fault("status", 500, "POST", "/commit/"), Fault("status", 429, "POST", "batch"), Fault("cut_answer", 0, "POST", "/commit/"),
    Fault("status", 503, "POST", "/preupload/"),
    Fault("corrupt_answer", 1, "POST", "/create")], ids=lambda fault: f"{fault.kind}-{fault.number}-{fault.key.strip('/')}")
def test_a_push_that_is_cut_off_leaves_nothing_half_and_continues(fault: Fault, model: Path, hub: Hub, proxy: Proxy) -> None:
    proxy.faults = [fault]
    said = refused(model, RunFailed)
    assert "run the same command again" in said
    files = hub.repositories["me/tuned"].files
    names = {path.name for path in model.iterdir()}
    assert not names & set(files) or names <= set(files)
    sent = set(hub.large)
    proxy.faults, proxy.seen = [], []
    push(model)
    assert names <= set(hub.repositories["me/tuned"].files)
    assert not [path for method, path in proxy.seen if method == "PUT" and path.rpartition("/")[2] in sent]
    assert len(hub.repositories["me/tuned"].messages) == 1


def test_a_name_that_is_taken_meanwhile_is_not_written_over(model: Path, hub: Hub, monkeypatch: Patch) -> None:
    from powertrain.export import push as module

    original = module.check_place

    def taken(*given: Any, **named: Any) -> bool:
        found = original(*given, **named)
        hub.repositories["me/tuned"] = Repository(True, {"model.safetensors": b"another's"})
        return found

    monkeypatch.setattr(module, "check_place", taken)
    assert "was made in the meantime" in refused(model, RunFailed)
    monkeypatch.setattr(module, "check_place", original)
    assert hub.repositories["me/tuned"].files == {"model.safetensors": b"another's"}


@pytest.mark.parametrize("name", ["a/b/c", "what?", "-x-", "a" * 200])
def test_a_name_that_the_hub_does_not_allow_is_refused(name: str, model: Path, hub: Hub) -> None:
    assert "is not a name on the Hugging Face hub" in refused(model, name=name)


# ------------------------------------------------------------------------------------------------ the files


def spoil(change: Callable[[Path], None], folder: Path) -> str:
    change(folder)
    with pytest.raises(WrongUse) as caught:
        read_upload(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def with_noted_secret(folder: Path) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"by": f"Bearer {TOKEN}"})


@pytest.mark.parametrize(("change", "says"), [
    (with_nan, "model.norm.weight in .* is NaN or infinite"), (with_noted_secret, "metadata of .* token or password"),
    (lambda folder: (folder / "notes.txt").write_text(f"HF_TOKEN={TOKEN}"), "notes.txt holds what looks like a token"),
    (lambda folder: (folder / "extra.json").write_text("{"), "extra.json is not JSON"),
    (lambda folder: (folder / "notes.txt").write_bytes(b"\xff\xfe"), "notes.txt is not text in UTF-8"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "cannot be read"),
    (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors"),
    (lambda folder: (folder / "hosts.txt").symlink_to("/etc/hosts"), "a link to a file outside"),
], ids=["nan", "metadata", "secret", "json", "text", "cut", "missing", "link"])
def test_files_that_are_not_fit_are_named(change: Callable[[Path], None], says: str, copied: Path) -> None:
    import re

    said = spoil(change, copied)
    assert re.search(says, said), said
    assert TOKEN not in said


def test_only_weights_json_and_text_are_sent(copied: Path, hub: Hub, capsys: Captured) -> None:
    for name in ("optimizer.pt", "pytorch_model.bin", "modeling.py", ".env"):
        (copied / name).write_bytes(b"x")
    (copied / "checkpoints").mkdir()
    push(copied)
    files = set(hub.repositories["me/tuned"].files)
    assert not files & {"optimizer.pt", "pytorch_model.bin", "modeling.py", ".env", "checkpoints"}
    assert "checkpoints/, modeling.py, optimizer.pt, pytorch_model.bin" in capsys.readouterr().err


def test_an_adapter_names_a_base_that_others_have(model: Path, hub: Hub, tmp_path: Path) -> None:
    save_adapter(with_adapter(make_base("llama", vocabulary=330)), tmp_path / "adapter", base=str(model))
    assert "only this machine has; name the base's hub id with --base" in refused(tmp_path / "adapter", name="mine")
    push(tmp_path / "adapter", "mine", base="org/base")
    config = json.loads(hub.repositories["me/mine"].files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/base"
    assert "--base org/base is for an adapter" in refused(model, base="org/base")


def test_what_is_no_model_is_refused(tmp_path: Path, hub: Hub) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "holds neither a run nor a model" in refused(tmp_path)
    (tmp_path / "recipe.yaml").touch()
    assert "has no model yet; finish it by" in refused(tmp_path)
    assert not hub.asked


def test_an_empty_repository_is_taken(model: Path, hub: Hub) -> None:
    hub.repositories["me/tuned"] = Repository(True)
    assert find_place("tuned").is_empty
    push(model)
    assert "model.safetensors" in hub.repositories["me/tuned"].files
