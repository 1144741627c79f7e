"""A folder that holds another run already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from powertrain.diagnosis.checks.base import Check
from powertrain.diagnosis.surroundings import Situation
from powertrain.records.findings import Finding


class OutputFolder(Check):
    name = "output_folder"
    rests_on = "fact: what lies in output_dir"

    @classmethod
    def find(cls, where: Situation) -> Iterator[Finding]:
        named = where.prepared.recipe.output_dir
        if named is not None and Path(named, "recipe.yaml").exists():
            yield cls.says("critical", "the output folder holds another run", "`powertrain train` refuses to write over it",
                           seen=f"output_dir={named}", cure=f"go on with it by `powertrain train --resume {named}`, or name "
                           "another folder with --output")
