"""`powertrain data clean`, `convert` and `mix`: new files of rows from old ones, which stay as they are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli import output
from powertrain.cli.options import Json, cache_folder
from powertrain.records import WrongUse, several, to_plain

Source = Annotated[str, typer.Argument(show_default=False, help="File, folder, glob pattern or hub id of the rows.")]
Out = Annotated[Path, typer.Argument(metavar="FILE", show_default=False, help=(
    "New file; its ending says its format: .jsonl, .csv, .tsv, .parquet or .arrow."))]
FormatName = Annotated[str | None, typer.Option("--format", show_default=False, help=(
    "How rows are read, such as alpaca (default: found by looking)."))]
Columns = Annotated[list[str] | None, typer.Option("--columns", metavar="OURS=THEIRS", show_default=False, help=(
    "Name of a column of the format in this data, such as question=frage; may be repeated."))]
Split = Annotated[str | None, typer.Option(show_default=False, help="Part of a hub dataset or folder (default: train).")]


def clean(source: Source, out: Out,
          column: Annotated[str | None, typer.Option(help="Judge rows by this column (default: all that trains).")] = None,
          languages: Annotated[list[str] | None, typer.Option("--language", metavar="CODE", show_default=False, help=(
              "Keep this language, such as en; may be repeated (default: any)."))] = None,
          language_from: Annotated[float, typer.Option(help=(
              "Take a row out if it is of another language with at least this probability."))] = 0.8,
          near: Annotated[float, typer.Option(help=(
              "Take a row out if it shares at least this much of its runs of words with an earlier row."))] = 0.8,
          no_near: Annotated[bool, typer.Option("--no-near", help="Leave near duplicates in.")] = False,
          no_exact: Annotated[bool, typer.Option("--no-exact", help="Leave exact duplicates in.")] = False,
          run_words: Annotated[int, typer.Option(min=1, help="Words of a run.")] = 5,
          cut_from: Annotated[int, typer.Option(min=0, metavar="CHARACTERS", help=(
              "Take a row out if its answer has at least this many characters and ends within a sentence, or does not "
              "close its code; 0 leaves cut rows in."))] = 200,
          name: FormatName = None, columns: Columns = None, split: Split = None, as_json: Json = False) -> None:
    """Take out bad and cut rows, other languages and duplicates.

    Bad rows are unreadable or empty; duplicates are exact or near. The rows that are left go to a new file.
    FILE.removed.jsonl beside it holds each row that was taken out, with the reason.
    """
    from powertrain.data.cleaning import Rules
    from powertrain.data.cleaning import clean as clean_rows

    rules = Rules(column, tuple(languages or ()), language_from, None if no_near else near, run_words, cut_from or None,
                  not no_exact)
    found = clean_rows(source, out, rules, cache=cache_folder(), name=name, columns=pairs(columns), split=split)
    taken = [(kind.capitalize(), f"{several(count, 'row')}, such as {example.origin}: {example.reason}")
             for (kind, count), example in zip(found.removed.items(), found.examples, strict=True)]
    output.tell({"event": "cleaned", **to_plain(found), "output": str(out)},
                [("Rows", found.said), *taken, ("Kept", f"{found.kept:,} of {several(found.rows, 'row')}, in {out}"),
                 ("Record", f"{found.record}: each row that was taken out, with the reason")], as_json=as_json)


def convert(source: Source, out: Out,
            shape: Annotated[str | None, typer.Option(show_default=False, help=(
                "Shape of the new rows: messages, sharegpt, alpaca, prompt_completion or text (default: as now)."))] = None,
            drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", show_default=False, help=(
                "Leave this column out; may be repeated."))] = None,
            name: FormatName = None, columns: Columns = None, split: Split = None, as_json: Json = False) -> None:
    """Write rows in another file format or shape, without loss.

    What the new file or shape cannot hold is refused, with the row and the column.
    """
    from powertrain.data.rows.converting import convert as convert_rows

    if shape is None and (name is not None or columns):
        raise WrongUse("--format and --columns say how rows are read for another shape; add --shape, or leave them out")
    found = convert_rows(source, out, cache=cache_folder(), shape=shape, name=name, columns=pairs(columns), drop=drop or [],
                         split=split)
    output.tell({"event": "converted", **to_plain(found), "source": source, "output": str(out), "shape": shape}, [
        ("Rows", found.read_as), ("Columns", ", ".join(found.kept) or "none besides those of the shape"),
        ("Written", f"{several(found.rows, 'row')}, in {out}; read back and compared")], as_json=as_json)


def mix(out: Out, sources: Annotated[list[str], typer.Argument(metavar="SOURCE=WEIGHT...", show_default=False, help=(
            "Sources with their shares of the tokens, such as code.jsonl=0.7 prose.jsonl=0.3; the shares sum to 1."))],
        tokenizer: Annotated[str, typer.Option(metavar="MODEL", show_default=False, help=(
            "Folder or hub id of the model whose tokenizer counts the tokens."))],
        tokens: Annotated[int | None, typer.Option(min=1, show_default=False, help=(
            "Tokens of the whole (default: as many as there are without a row twice)."))] = None,
        repeat: Annotated[bool, typer.Option("--repeat", help="Take the rows of a small source several times.")] = False,
        seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the draw of rows.")] = 42,
        split: Split = None, as_json: Json = False) -> None:
    """Mix sources by their shares of the tokens.

    FILE.mix.json beside the new file says what each source gave. The same seed gives the same file.
    """
    from powertrain.data.mixing import mix as mix_rows
    from powertrain.models.huggingface.hub import find_model

    names, weights = weighted(sources)
    folder = Path(tokenizer) / "model" if (Path(tokenizer) / "model").is_dir() else find_model(tokenizer)
    parts = mix_rows(out, names, weights, tokenizer_folder=folder, cache=cache_folder(), seed=seed, tokens=tokens,
                     repeat=repeat, split=split)
    total = sum(part.tokens for part in parts)
    output.tell({"event": "mixed", "output": str(out), "tokens": total, "seed": seed,
                 "sources": [{**to_plain(part), "share": part.tokens / total, "passes": part.passes} for part in parts]},
                [*((part.source, f"{part.tokens / total:.2%} of the tokens: {part.tokens:,} in {several(part.rows, 'row')}, "
                                 f"{part.passes:.2f} times its {part.all_tokens:,}"
                                 + (f"; {several(part.bad_rows, 'bad row')} left out" if part.bad_rows else ""))
                   for part in parts),
                 ("Written", f"{total:,} tokens in {several(sum(part.rows for part in parts), 'row')}, in {out}")],
                as_json=as_json)


def pairs(words: Sequence[str] | None) -> dict[str, str]:
    """Return OURS=THEIRS words as a mapping. Raises WrongUse for a word without a name on either side."""
    found = {}
    for word in words or ():
        ours, _, theirs = word.partition("=")
        if not ours or not theirs:
            raise WrongUse(f"--columns {word} names no two columns; write the format's and the data's, such as "
                           "--columns question=frage")
        found[ours] = theirs
    return found


def weighted(words: Sequence[str]) -> tuple[list[str], list[float]]:
    """Return the sources and weights of SOURCE=WEIGHT words. Raises WrongUse for a word without a number."""
    names, weights = [], []
    for word in words:
        name, _, number = word.rpartition("=")
        try:
            weights.append(float(number))
        except ValueError:
            name = ""
        if not name:
            raise WrongUse(f"{word} has no weight; write SOURCE=WEIGHT, such as {word.rpartition('=')[0] or word}=0.5")
        names.append(name)
    return names, weights
