"""A run that goes on, or is evaluated, on another kind of device than it began on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from driver import TINY
from powertrain.records.json_files import read_json, write_json
from powertrain.run.folder import RunFolder

Cli = Callable[..., tuple[int, str, str]]
VARLEN = {"kernel": "varlen"}


def begun_on_a_gpu(cli: Cli, folder: Path, fault: tuple[str, int] | None) -> RunFolder:
    """A run, killed by the fault if there is one, whose files say that it began on an H100."""
    (folder / "text.txt").write_text("".join(f"line {i % 7} says {i % 3}\n" for i in range(400)))
    code, _, err = cli("train", "data=text.txt", *TINY, "--output", "run", **({"fault": fault} if fault else {}))
    assert code == (-9 if fault else 0), err
    run = RunFolder(folder / "run")
    facts, plan = read_json(run.facts), read_json(run.plan)
    facts["hardware"] |= {"device": "cuda", "name": "NVIDIA H100", "compute_capability": [9, 0]}
    for step in plan["steps"]:
        step["settings"] = VARLEN if step["technique"] == "attention_kernel" else step["settings"]
    write_json(run.facts, facts)
    write_json(run.plan, plan)
    return run


def test_a_run_of_a_gpu_goes_on_on_this_device_and_says_what_changes(cli: Cli, tmp_path: Path) -> None:
    run = begun_on_a_gpu(cli, tmp_path, ("step", 9))
    code, _, err = cli("train", "--resume", "run")
    assert code == 0, err
    assert "began on NVIDIA H100" in err
    assert "rounded otherwise" in err
    assert "attention_kernel from" in err
    assert read_json(run.facts)["hardware"]["device"] == "cpu"
    kernels = [step["settings"]["kernel"] for step in read_json(run.plan)["steps"] if "kernel" in step["settings"]]
    assert VARLEN["kernel"] not in kernels


def test_a_run_of_a_gpu_is_evaluated_with_a_plan_of_this_device(cli: Cli, tmp_path: Path) -> None:
    begun_on_a_gpu(cli, tmp_path, None)
    code, out, err = cli("evaluate", "run", "--json")
    assert code == 0, err
    assert json.loads(out.splitlines()[-1])["loss"] > 0
