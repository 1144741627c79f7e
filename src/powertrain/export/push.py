"""Uploading a model to the Hugging Face hub: its files are checked first, and the repository gets all of them or none.

All files come in one commit. Large files are sent before it and are not visible without it; a push that was cut off continues
with those that are missing. An existing model is replaced only if that was asked for, and stays in the repository's history.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from powertrain.models.huggingface.hub import (
    ADAPTER_CONFIG,
    CONFIG,
    HUB_ID,
    TOKENIZERS,
    adapter_weights,
    is_adapter,
    weight_files,
)
from powertrain.records import RunFailed, WrongUse
from powertrain.records.errors import first_line
from powertrain.records.json_files import read_json, refuse_special
from powertrain.records.redaction import holds_a_secret

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TEXTS = (".json", ".jsonl", ".jinja", ".txt", ".md")
WEIGHTS = ".safetensors"
CARD = "README.md"
ASKED_S = 20.0               # to wait for the hub's answer about a repository
AGAIN = "run the same command again: files that have arrived are not sent twice, and until then no part of the push is visible"


@dataclass(frozen=True)
class Upload:
    """What a push sends: files of the folder, and contents that are made for it or changed."""

    files: Mapping[str, Path | bytes]        # name in the repository -> content
    left_out: tuple[str, ...]                # names in the folder that are not sent

    @property
    def size_bytes(self) -> int:
        return sum(len(one) if isinstance(one, bytes) else one.stat().st_size for one in self.files.values())


@dataclass(frozen=True)
class Place:
    """A repository on the hub, as it is before the push."""

    repository: str                          # owner/name
    exists: bool
    is_private: bool
    commit: str | None                       # its newest
    files: Mapping[str, str]                 # name -> sha256 of a large file, git's sha1 of a small one

    @property
    def address(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repository}"

    @property
    def is_empty(self) -> bool:
        """Return whether nothing would be lost: there is none, or only what the hub puts into a new one."""
        return not set(self.files) - {".gitattributes"}


# ------------------------------------------------------------------------------------------------ the files


def read_upload(folder: Path, *, base: str | None = None) -> Upload:
    """Return the files of a model or an adapter that are fit to be pushed. `base` is the hub id of an adapter's base.

    Raises WrongUse for weights that are missing or not finite, for text that holds a secret, and for an adapter whose base
    nobody else has.
    """
    found = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    sent = [path for path in found if path.is_file() and (path.suffix in (*TEXTS, WEIGHTS) or path.name in TOKENIZERS)]
    files: dict[str, Path | bytes] = {path.name: path for path in sent}
    needed = [adapter_weights(folder)] if is_adapter(folder) else [*weight_files(folder), folder / CONFIG]
    if missing := [file.name for file in needed if file.name not in files]:
        raise WrongUse(f"{folder} lacks {', '.join(missing)}; copy or make the model again before you push it")
    for path in sent:
        refuse_link(path, folder)
        refuse_special(path)
        if path.suffix == WEIGHTS:
            check_weights(path)
        elif path.suffix in TEXTS:
            check_text(path)
    if ADAPTER_CONFIG in files:
        files[ADAPTER_CONFIG] = _with_base(folder / ADAPTER_CONFIG, base)
    elif base is not None:
        raise WrongUse(f"--base {base} is for an adapter, and {folder} holds a whole model; leave --base out")
    if CONFIG in files and (given := read_json(folder / CONFIG)).pop("_name_or_path", None):       # a folder of this machine
        files[CONFIG] = _as_json(given)
    return Upload(files, tuple(path.name + ("/" if path.is_dir() else "") for path in found if path not in sent))


def refuse_link(path: Path, folder: Path) -> None:
    """Raise WrongUse for a link to a file elsewhere; in the hub's cache every file is a link to the blobs beside."""
    home = folder.resolve()
    allowed = (home, home.parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(place) for place in allowed):
        raise WrongUse(f"{path} is a link to a file outside the model's folder; put the file itself there, or remove the link")


def check_text(path: Path) -> None:
    """Raise WrongUse where a text file is no text, its JSON is broken, or it holds something that looks like a secret."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            json.loads(text)
    except (ValueError, RecursionError):
        kind = "JSON" if path.suffix == ".json" else "text in UTF-8"
        raise WrongUse(f"{path} is not {kind}; mend or remove the file before you push") from None
    if holds_a_secret(text):
        raise WrongUse(f"{path} holds what looks like a token or password; take it out before you push, and make that token "
                       "invalid if others have seen it")


def check_weights(path: Path) -> None:
    """Raise WrongUse where a safetensors file cannot be read, its notes hold a secret, or a weight is NaN or infinite."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if holds_a_secret(json.dumps(file.metadata() or {})):
                raise WrongUse(f"the metadata of {path} holds what looks like a token or password; save the weights anew "
                               "without it")
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
                    raise WrongUse(f"the weight {name} in {path} is NaN or infinite; push an earlier checkpoint, or train with "
                                   "a lower learning_rate")
    except SafetensorError as error:
        raise WrongUse(f"{path} cannot be read ({first_line(error)}); copy or make the model again before you push "
                       "it") from None


def _with_base(file: Path, base: str | None) -> bytes:
    config = read_json(file)
    named = base or str(config.get("base_model_name_or_path") or "")
    if not HUB_ID.fullmatch(named) or (base is None and Path(named).exists()):
        raise WrongUse(f"the adapter's base is {named or 'not named'}, which only this machine has; name the base's hub id "
                       "with --base ORG/NAME, or push the merged model (powertrain export --to merged)")
    return _as_json(config | {"base_model_name_or_path": named})


def _as_json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def base_in(upload: Upload) -> str:
    """Return the hub id of the base in an adapter's upload; "" without an adapter."""
    config = upload.files.get(ADAPTER_CONFIG)
    return str(json.loads(config)["base_model_name_or_path"]) if isinstance(config, bytes) else ""


# ------------------------------------------------------------------------------------------------ the hub


def find_place(name: str) -> Place:
    """Return the repository that `name` means: OWNER/NAME, or NAME of the token's user. Asks the hub, changes nothing.

    Raises WrongUse for a token that is missing, wrong or expired, a name that the hub does not allow, and without a network.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    api = HfApi()
    try:
        user = api.whoami()["name"]
        repository = name if "/" in name else f"{user}/{name}"
        info = api.model_info(repository, files_metadata=True, timeout=ASKED_S)
    except HFValidationError:
        raise WrongUse(f"{name[:100]!r} is not a name on the Hugging Face hub; use OWNER/NAME or NAME, of letters, digits, "
                       "'-', '_' and '.'") from None
    except RepositoryNotFoundError:
        return Place(repository, False, True, None, {})
    except Exception as error:               # the hub's or the HTTP library's: each ends the same way, with its reason
        raise WrongUse(explain_push(error, name)) from error
    files = {one.rfilename: str(one.lfs.sha256 if one.lfs else one.blob_id) for one in info.siblings or []}
    return Place(repository, True, bool(info.private), info.sha, files)


def check_place(place: Place, upload: Upload, *, public: bool, overwrite: bool) -> bool:
    """Return whether the repository has all of this already. Raises WrongUse where it must not be written as asked."""
    if place.exists and not place.is_private and not public:
        raise WrongUse(f"{place.repository} is a public repository; add --public if everybody may read this model, or name "
                       "another repository")
    if place.exists and place.is_private and public:
        raise WrongUse(f"{place.repository} is a private repository, and a push leaves it so; leave --public out, and make the "
                       "repository public in its settings on the hub, or name a new one")
    if all(place.files.get(name) in digests_of(content) for name, content in upload.files.items()):
        return True
    if not place.is_empty and not overwrite:
        raise WrongUse(f"{place.repository} exists on the Hugging Face hub and holds other files; name a new repository, or "
                       "add --overwrite (the present files stay in its history)")
    return False


def digests_of(content: Path | bytes) -> tuple[str, str]:
    """Return the sha256 of a file, and the sha1 by which git names it: the hub tells one of the two."""
    size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
    large, small = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size_bytes, usedforsecurity=False)
    with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as file:
        while piece := file.read(1 << 22):
            large.update(piece)
            small.update(piece)
    return large.hexdigest(), small.hexdigest()


def push(place: Place, upload: Upload, *, public: bool, message: str) -> None:
    """Make the repository if there is none, and send the files in one commit.

    Weights of an earlier model that the new one has not are deleted in the same commit. Raises RunFailed where the hub refuses
    or the connection breaks.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        if not place.exists:
            api.create_repo(place.repository, private=not public)
        _commit(api, place, upload, message)
    except Exception as error:               # the hub's or the HTTP library's: each ends the same way, with its reason
        raise RunFailed(explain_push(error, place.repository)) from error


def _commit(api: "HfApi", place: Place, upload: Upload, message: str) -> None:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    old = [name for name in place.files if name not in upload.files and name.endswith((WEIGHTS, f"{WEIGHTS}.index.json"))]
    operations: Sequence[Any] = [
        *(CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
          for name, content in upload.files.items()),
        *(CommitOperationDelete(name) for name in old)]
    api.create_commit(place.repository, operations, commit_message=message, parent_commit=place.commit)


def explain_push(error: Exception, repository: str) -> str:
    """Return why a push failed, as a sentence with the cure; never a part of the token."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    chain: list[BaseException] = [error]     # uploads wrap what went wrong
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if isinstance(error, LocalTokenNotFoundError):
        return "this machine has no token of the Hugging Face hub; log in by `hf auth login`, or set HF_TOKEN"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{repository} cannot be pushed while HF_HUB_OFFLINE is set; unset it and run the same command again"
    if type(error) is ValueError:            # what is sent is wrong, such as the head of a README.md
        return f"the Hugging Face hub refuses what is sent ({first_line(error)}); mend the file and run the same command again"
    answered = next((one for one in chain if isinstance(one, HfHubHTTPError)), None)
    if answered is None:
        return f"the Hugging Face hub cannot be reached, or broke off ({type(chain[-1]).__name__}); connect, and {AGAIN}"
    status = answered.response.status_code
    known = {401: "refuses the token: it is wrong or has expired; log in anew by `hf auth login`, or set HF_TOKEN",
             403: f"does not let this token write {repository}; use a token with write access to that owner",
             402: "wants to be paid for more private storage; free space there, or push to another owner",
             404: f"does not have {repository} any more; run the same command again to make it anew",
             409: f"already has {repository}, which was made in the meantime; name another repository, or add --overwrite",
             412: f"has a newer commit in {repository} than this push began with; run the same command again",
             413: "takes no file that large; push a model in smaller shards",
             429: f"gets too many requests from this account; wait some minutes, and {AGAIN}"}
    return f"the Hugging Face hub {known.get(status, f'answered with an error ({status}); wait some minutes, and {AGAIN}')}"
