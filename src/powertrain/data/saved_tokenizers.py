"""The folder a tokenizer is saved to: Hugging Face's files, and a marker that says which kind of ours wrote them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from powertrain.records import WrongUse

END_OF_TEXT = "<|endoftext|>"
MARKER = "powertrain_tokenizer.json"


def write_marker(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / MARKER, {"kind": kind})


def marked_kind(folder: Path) -> str | None:
    """The kind of tokenizer that was saved in `folder`, or None if it was not saved here."""
    path = folder / MARKER
    return str(read_json(path).get("kind")) if path.is_file() else None


def save_library_tokenizer(tokenizer: LibraryTokenizer, folder: Path, kind: str, end_of_text: str | None) -> None:
    """Writes what transformers.AutoTokenizer and load_tokenizer open."""
    write_marker(folder, kind)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        # text that spells the end of text is text: the same ids as ours, also through transformers
        "split_special_tokens": True,
    }
    if end_of_text is not None:
        config["eos_token"] = end_of_text
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", config)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file `path`. Raises WrongUse if it cannot be read or holds something else."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WrongUse(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WrongUse(f"{path} is not JSON: {error}; the file is damaged: save the tokenizer again") from error
    if not isinstance(content, dict):
        raise WrongUse(f"{path} holds no JSON object; the file is damaged: save the tokenizer again")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
