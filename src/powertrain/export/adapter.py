"""The adapter alone, as PEFT has it: copied with its tokenizer and chat template, and compared with what it was copied from."""

from __future__ import annotations

from pathlib import Path

from powertrain.data.publishing import new_folder
from powertrain.models.adapters.files import CONFIG, WEIGHTS
from powertrain.models.huggingface.weights import Shards
from powertrain.models.model import SavedTokenizer
from powertrain.records import RunFailed, WrongUse
from powertrain.records.json_files import read_json, write_json


def export_adapter(source: Path, folder: Path, tokenizer: SavedTokenizer, *, base: str) -> int:
    """Writes the adapter in `source` to `folder`, for the base `base`; how many tensors it has.

    Raises WrongUse if there is none or the output is taken, RunFailed if the disk refuses.
    """
    if not (source / CONFIG).is_file() or not (source / WEIGHTS).is_file():
        raise WrongUse(f"{source} holds no adapter: the whole model was trained; use --to merged")
    with new_folder(folder) as building:
        tokenizer.save(building)
        write_json(building / CONFIG, read_json(source / CONFIG) | {"base_model_name_or_path": base})
        (building / WEIGHTS).write_bytes((source / WEIGHTS).read_bytes())
        before, after = Shards([source / WEIGHTS]), Shards([building / WEIGHTS])
        wrong = [name for name in before if name not in set(after) or not before.read(name).equal(after.read(name))]
        if wrong:
            raise RunFailed(f"the adapter was copied, opened again and is not the same ({wrong[0]}); it was removed. Try again")
        return len(list(before))
