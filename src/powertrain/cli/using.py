"""`powertrain generate` and `powertrain evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from powertrain.cli import output
from powertrain.cli.surroundings import cache_folder, say
from powertrain.records import WrongUse, to_plain

if TYPE_CHECKING:
    from powertrain.data.tokenizers import Tokenizer
    from powertrain.models.decoder import Decoder


def open_model(path: Path) -> tuple[Decoder, Tokenizer]:
    """The model of a run, or of a Hugging Face folder, with its tokenizer."""
    from powertrain.data.tokenizers import load_tokenizer
    from powertrain.models.folder import load_folder

    folder = path / "model" if (path / "model").is_dir() else path
    if not folder.is_dir():
        raise WrongUse(f"{path} does not exist; `powertrain runs list` shows the runs")
    if not (folder / "config.json").is_file():
        if (path / "recipe.yaml").is_file():
            raise WrongUse(f"the run {path} has no model yet; finish it by `powertrain train --resume {path}`")
        raise WrongUse(f"{path} holds neither a run nor a model (config.json is missing)")
    return load_folder(folder), load_tokenizer(folder)


def generate_text(path: Path, prompt: str, *, tokens: int, temperature: float, top_k: int | None, top_p: float | None,
                  seed: int, as_json: bool) -> None:
    from powertrain.generation import generate

    model, tokenizer = open_model(path)
    pieces = generate(model, tokenizer, prompt, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if as_json:
        output.print_json({"event": "sample", "prompt": prompt, "text": "".join(pieces)})
        return
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def evaluate_model(path: Path, data: str | None, *, as_json: bool) -> None:
    from powertrain.report.result import quality
    from powertrain.run.scoring import score, score_text

    model, tokenizer = open_model(path)
    if data is None:
        found, gzip_bits = score(model, path, cache_folder(), say)
    else:
        found, gzip_bits = score_text(model, tokenizer, data, cache_folder())
    if as_json:
        output.print_json({"event": "evaluation", "gzip_bits_per_byte": gzip_bits, **to_plain(found)})
    else:
        output.print_rows([("Held-out" if data is None else "Text", quality(to_plain(found), gzip_bits))])
