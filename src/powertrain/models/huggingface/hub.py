"""A model's files: which a folder has, and where they are: in a folder, or in the Hugging Face hub's cache. Loads no torch.

What is cached is used without asking the hub, so that a run that worked works again without a network, on the same
files. Only files that cannot run anything by being read are fetched: JSON, text and safetensors, never pickles. Code
that a repository brings is fetched as text; running it takes `trust_remote_code`, which is not this module's.
"""

import hashlib
import re
import socket
import time
from dataclasses import replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from powertrain.models.config import MOST, ModelConfig, refuse_counts
from powertrain.models.huggingface.families import FORMATS, Json, from_hf_config, token_ids
from powertrain.models.huggingface.fields import OF_ADAPTERS, OF_FAMILIES, OF_ROTARY, check_kinds
from powertrain.records import WrongUse
from powertrain.records.json_files import read_json, refuse_special

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED_ADAPTER = "adapter_model.bin"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")     # one of them is enough
FETCHED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
# in folders of their own lie copies for other programs, and consolidated*.safetensors are Mistral's weights once more
NOT_FETCHED = ["*/*", "consolidated*", "*.fp16.*"]
SAMPLES, SAMPLE_BYTES = 512, 4096            # of each file of weights, to know it again
CLOCK_S, PIECE_BYTES = 2.0, 1 << 22          # times of files may be whole seconds
HUB = "huggingface.co"
ANSWER_S = 10.0              # to wait for the hub's first answer: what huggingface_hub waits for a file's


def read_config(folder: Path, dropout: float = 0.0) -> ModelConfig:
    """Return the config of a Hugging Face folder. Raises WrongUse if it is missing, or not one that the decoder computes.

    The tokens that end an answer are also read from generation_config.json, which is where chat models name them all.
    """
    config = from_hf_config(read_model_json(folder / CONFIG), dropout)
    if not (folder / GENERATION).exists():
        return config
    ends = token_ids(read_model_json(folder / GENERATION) | {"vocab_size": config.vocabulary}, "eos_token_id")
    known = (config.end_of_text, *config.other_ends)
    added = tuple(token for token in dict.fromkeys(ends) if token not in known)
    return replace(config, other_ends=config.other_ends + added) if config.end_of_text is not None else config


def read_model_json(file: Path) -> Json:
    """Return the JSON object in a file of a model's folder. Raises WrongUse if the file is missing or holds none."""
    if file.exists():
        return _checked(read_json(file, "copy or download it again"), file)
    if file.name == CONFIG and (file.parent / ADAPTER_CONFIG).exists():
        raise WrongUse(f"{file.parent} holds an adapter, not a model; give it as model.adapter, and its base as model.path")
    raise WrongUse(f"there is no {file}; a model's folder holds {CONFIG} and {WEIGHTS}")


def _checked(found: Json, file: Path) -> Json:
    """Return the fields, each of its kind and, of a family that the decoder computes, of a size that a model may have."""
    check_kinds(found, file)
    if file.name == CONFIG and (family := found.get("model_type")) in FORMATS:
        check_kinds(found, file, OF_FAMILIES)
        for table in ("rope_scaling", "rope_parameters"):
            check_kinds(found.get(table) or {}, file, OF_ROTARY)
        try:
            refuse_counts(**{ours: found.get(theirs) for theirs, ours in FORMATS[family].fields.items() if ours in MOST})
        except WrongUse as error:
            raise WrongUse(f"{file}: {error}") from None
    return found


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the folder's weights, existing or not. Raises WrongUse if there are none to name."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / SHARDS).exists():
        pickled = any(folder.glob("pytorch_model*.bin"))
        cure = (f"it has pickled weights, which are never loaded: save the model anew as {WEIGHTS}" if pickled
                else "check the path")
        raise WrongUse(f"{folder} has neither {WEIGHTS} nor {SHARDS}; {cure}")
    where = read_model_json(folder / SHARDS).get("weight_map")
    if not isinstance(where, dict):
        raise WrongUse(f"{folder / SHARDS} does not say which file holds which weight; copy or download it again")
    return [folder / name for name in sorted({Path(str(file)).name for file in where.values()})]


def digest_weights(folder: Path) -> str:
    """Return a sha256 (hex) of even samples of each file, by which another base shows; "" without weights to read."""
    digest = hashlib.sha256()
    try:
        for path in weight_files(folder):
            refuse_special(path)
            size_bytes = path.stat().st_size
            digest.update(str(size_bytes).encode())
            with open(path, "rb") as file:
                for place in range(0, size_bytes, max(SAMPLE_BYTES, size_bytes // SAMPLES)):
                    file.seek(place)
                    digest.update(file.read(SAMPLE_BYTES))
    except (WrongUse, OSError):              # loading the model says what is wrong
        return ""
    return digest.hexdigest()


def read_adapter_json(folder: Path) -> Json:
    """Return what adapter_config.json holds. Raises WrongUse for a folder without one."""
    if not folder.is_dir():
        raise WrongUse(f"there is no folder {folder}; give a folder that holds {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    if not (folder / ADAPTER_CONFIG).exists():
        raise WrongUse(f"there is no {ADAPTER_CONFIG} in {folder}, so it holds no adapter; check the path")
    given = read_json(folder / ADAPTER_CONFIG)
    if given.get("peft_type") is None:
        raise WrongUse(f"{folder / ADAPTER_CONFIG} names no peft_type, so it is not an adapter's; copy or download it again")
    return check_kinds(given, folder / ADAPTER_CONFIG, OF_ADAPTERS)


def adapter_weights(folder: Path) -> Path:
    """Return the file of an adapter's weights. Raises WrongUse where it is missing or pickled."""
    if not (folder / ADAPTER_WEIGHTS).exists():
        cure = (f"it has pickled ones ({PICKLED_ADAPTER}), which are never loaded: save the adapter anew with PEFT"
                if (folder / PICKLED_ADAPTER).exists() else "copy it there, or check the path")
        raise WrongUse(f"there is no {ADAPTER_WEIGHTS} in {folder}; {cure}")
    return folder / ADAPTER_WEIGHTS


# ------------------------------------------------------------------------------------------------ the hub


def find_model(path: str, *, revision: str | None = None) -> Path:
    """Return the folder of a model or of an adapter: `path` itself, or the cached or downloaded files of the hub's `org/name`.

    `revision` is a branch, tag or commit of the repository; None is its main branch.
    Raises WrongUse, with the cure, for what is neither, and for what the hub does not have or does not give.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        for file in folder.iterdir():        # whichever library reads them: a pipe by the name of the weights never ends
            if file.exists():
                refuse_special(file)
        return folder
    if folder.is_file():
        kind = "a GGUF file is made from a model, and is not read back" if folder.suffix == ".gguf" else "a file is not a model"
        raise WrongUse(f"{path} is a file, and {kind}; give the folder that holds {CONFIG} and the weights")
    if not HUB_ID.fullmatch(path):
        raise WrongUse(f"there is no folder {path}, and the name is not a hub id of the form org/name, such as "
                       "openai-community/gpt2; check the spelling")
    cached = find_cached(path, revision)
    if cached is None or missing_files(cached):
        return fetch(path, revision, cached)
    if is_adapter(cached) or any((cached / name).exists() for name in TOKENIZERS):       # an adapter's base has one
        return cached
    try:
        return fetch(path, revision, cached)
    except WrongUse:
        return cached            # a tokenizer of another folder may be what the recipe names


def find_cached(repository: str, revision: str | None) -> Path | None:
    """Return the folder in the hub's cache, which may lack files; None if there is none. Asks no network."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise WrongUse(f"there is no folder {repository}, and to look for it on the Hugging Face hub takes huggingface_hub; "
                       f"pip install huggingface_hub, or give a folder") from None
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True, allow_patterns=CONFIG))
    except HFValidationError:
        raise WrongUse(f"there is no folder {repository}, and the Hugging Face hub allows no such id; check the "
                       f"spelling") from None
    except LocalEntryNotFoundError as error:
        incomplete = getattr(error, "snapshot_path", None)
        return None if incomplete is None else Path(incomplete)


def missing_files(folder: Path) -> list[str]:
    """Return the names of files that a model or an adapter needs and this folder lacks, or has as a link that leads nowhere."""
    if is_adapter(folder):
        return [] if (folder / ADAPTER_WEIGHTS).exists() else [ADAPTER_WEIGHTS]
    missing = [] if (folder / CONFIG).exists() else [CONFIG]
    if not (folder / WEIGHTS).exists() and not (folder / SHARDS).exists():
        return [*missing, WEIGHTS]
    return missing + [file.name for file in weight_files(folder) if not file.exists()]


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).exists() and not (folder / CONFIG).exists()


def fetch(repository: str, revision: str | None, cached: Path | None) -> Path:
    """Return the repository's cached folder, with missing files downloaded. Raises WrongUse with the reason if that fails."""
    from huggingface_hub import HfApi, constants, get_session, snapshot_download

    if refuse_inner not in (hooks := get_session().event_hooks["request"]):
        hooks.append(refuse_inner)
    if urlsplit(constants.ENDPOINT).hostname != HUB:     # Xet asks wherever a hub sends it, past refuse_inner
        constants.HF_HUB_DISABLE_XET = True
    began = time.time()
    try:
        # asked first: without an answer snapshot_download would hand out the folder in the cache, incomplete as it is
        HfApi().model_info(repository, revision=revision, timeout=ANSWER_S)
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=FETCHED, ignore_patterns=NOT_FETCHED))
    except WrongUse:
        raise
    except Exception as error:      # the hub's, the HTTP library's or the disk's: each ends the same way, with its reason
        raise WrongUse(explain(error, repository, revision, cached)) from error
    if damaged := remove_damaged(folder, began):
        raise WrongUse(f"{', '.join(damaged)} of {repository} came damaged from the Hugging Face hub and was removed from its "
                       "cache; run it again")
    if missing := missing_files(folder):
        raise WrongUse(f"{repository} on the Hugging Face hub has no {' and no '.join(missing)}; a model needs {CONFIG} and "
                       f"weights as safetensors, and pickled ones (pytorch_model.bin) are never loaded: choose another, or "
                       f"have it converted")
    return folder


def refuse_inner(request: Any) -> None:
    """Raise WrongUse where the hub sends this machine on to an address of its own network, unless the hub lies there too.

    What answers there may trust whoever asks: at 169.254.169.254 a cloud hands out keys, whatever the hub's address is.
    """
    from huggingface_hub import constants

    host, hub = request.url.host, urlsplit(constants.ENDPOINT).hostname or ""
    if host != hub and (inner := _inner(host)) and (any(one.is_link_local for one in inner) or not _inner(hub)):
        raise WrongUse(f"the hub at {hub} sends downloads on to {host}, which lies in this machine's own network; that is "
                       f"refused: check HF_ENDPOINT, or give a folder that holds the model")


def _inner(host: str) -> list[IPv4Address | IPv6Address]:
    """Return the addresses of a host that are not of the internet. A host without an address cannot be reached either."""
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return []
    addresses = [ip_address(str(one[4][0]).partition("%")[0]) for one in found]
    return [one for one in addresses if not one.is_global]


def remove_damaged(folder: Path, since: float) -> list[str]:
    """Remove the files that came since then and are not what the hub says; return their names.

    huggingface_hub checks a file's size alone. In its cache a file is a link to one that has the sum of its content as name:
    a sha256 for large ones, git's sha1 for the others.
    """
    links = [file for file in sorted(folder.iterdir()) if file.is_symlink()]
    damaged = [link for link in links if link.exists() and link.stat().st_mtime >= since - CLOCK_S
               and _is_damaged(link.resolve())]
    for link in damaged:
        link.resolve().unlink(missing_ok=True)           # two files of the same content are links to one
        link.unlink()
    return [link.name for link in damaged]


def _is_damaged(kept: Path) -> bool:
    by_length = {64: hashlib.sha256(),
                 40: hashlib.sha1(b"blob %d\0" % kept.stat().st_size, usedforsecurity=False)}
    if (digest := by_length.get(len(kept.name))) is None:
        return False
    with open(kept, "rb") as content:
        while piece := content.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest() != kept.name


def explain(error: Exception, repository: str, revision: str | None, cached: Path | None) -> str:
    """Return why a download failed, as a sentence with the cure."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return (f"{repository} is gated on the Hugging Face hub; accept its terms on its page there, log in by "
                f"`hf auth login`, and run it again")
    if isinstance(error, RevisionNotFoundError):
        return f"{repository} has no revision {revision} on the Hugging Face hub; check the spelling, or leave it out"
    if isinstance(error, RepositoryNotFoundError):
        return (f"there is no folder {repository}, and the Hugging Face hub has no {repository} that you may see; check the "
                f"spelling, or log in by `hf auth login` if it is private")
    have = f"there is no folder {repository}, and no {repository} in the Hugging Face cache"
    if cached is not None:
        have = f"the Hugging Face cache lacks {', '.join(missing_files(cached)) or 'a tokenizer'} of {repository} (in {cached})"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{have}, and HF_HUB_OFFLINE is set; unset it and run it again, or give a folder that holds the model"
    first = str(error).strip().splitlines() or ["it gave no reason"]
    return (f"{have}, and the Hugging Face hub could not be asked ({type(error).__name__}: {first[0]}); connect and run it "
            f"again, or give a folder that holds the model")
