"""A run beyond one machine: srun's processes meet, and the files that start a run on a cluster."""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from driver import Fault, start
from powertrain.launch import slurm
from powertrain.launch.group import without_place
from powertrain.launch.on_ray import free_port
from powertrain.records.event_log import read_events
from powertrain.records.events import Resume, Start, Step

Cli = Callable[..., tuple[int, str, str]]
WITHIN_S = 120
STEP = {"SLURM_JOB_ID": "4211", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1,3",
        "SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_PROCID": "10", "SLURM_LOCALID": "1", "SLURM_NODEID": "3"}
NASTY = "it's $HOME; `rm -rf x` \"$(id)\" %jä"


# ------------------------------------------------------------------------------------------------ srun


def test_a_process_of_srun_has_the_place_that_srun_tells() -> None:
    assert slurm.as_torchrun(STEP) == {"RANK": "10", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3",
                                       "MASTER_ADDR": "gpu07", "MASTER_PORT": "19213"}
    assert slurm.as_torchrun({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"})["MASTER_PORT"] == "7"


@pytest.mark.parametrize("change", [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_ID": None}])
def test_a_process_of_torchrun_or_of_no_step_of_several_processes_is_not_srun_s(change: Mapping[str, str | None]) -> None:
    assert slurm.as_torchrun({name: value for name, value in {**STEP, **change}.items() if value is not None}) == {}


def test_a_run_that_a_process_of_srun_starts_is_alone() -> None:
    assert slurm.as_torchrun(without_place(STEP)) == {}


@pytest.mark.parametrize(("machines", "first"), [
    ("gpu07", "gpu07"), ("gpu[07-09,12],login1", "gpu07"), ("a-1,b-2", "a-1"), ("r[1,3]n0.site.org", "r1n0.site.org")])
def test_the_first_machine_of_a_list_is_found_without_scontrol(machines: str, first: str) -> None:
    assert slurm.first_machine(machines) == first


def srun(words: list[str], cache: Path, folders: list[Path], fault: Fault | None = None) -> list[tuple[int, str]]:
    """(exit code, stderr) of `powertrain train WORDS`, one process in each folder, as srun would start them."""
    port, started = str(free_port()), []
    for rank, folder in enumerate(folders):
        place = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": str(rank),
                 "SLURM_STEP_NODELIST": "localhost,other", "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0", "MASTER_PORT": port}
        started.append(start(["train", *words], cache, folder, fault, place))
    for process, _, _ in started:
        process.join(WITHIN_S)
        process.kill()                       # one that has ended already is left as it ended
    return [(process.exitcode, err.read_text()) for process, _, err in started]


def test_the_same_command_under_srun_starts_a_run_and_finds_it_finished(tiny: list[str], cache: Path, tmp_path: Path) -> None:
    words = [*tiny, "--output", "run", "--continue"]
    ended = srun(words, cache, [tmp_path, tmp_path])
    assert [code for code, _ in ended] == [0, 0], ended
    events = read_events(tmp_path / "run" / "events.jsonl")
    assert [event.processes for event in events if isinstance(event, Start)] == [2]
    assert max(event.step for event in events if isinstance(event, Step)) == 11
    assert not list((tmp_path / "run").glob(".shared*"))
    ended = srun(words, cache, [tmp_path, tmp_path])
    assert [code for code, _ in ended] == [0, 0], ended
    assert "is finished" in ended[0][1]


def test_a_shared_folder_that_is_not_shared_is_one_sentence(tiny: list[str], cache: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    ended = srun([*tiny, "--output", "run"], cache, folders, ("shared", 1))
    assert [code for code, _ in ended] == [2, 2], ended
    assert ended[0][1].splitlines()[-1].endswith("name a folder that all machines share with --output")
    assert "process 1, on " in ended[0][1]
    assert "Traceback" not in ended[0][1] + ended[1][1]
    assert not list(folders[0].rglob("recipe.yaml"))


# ------------------------------------------------------------------------------------------------ --continue


def test_continue_starts_a_run_then_continues_it_and_refuses_another(tiny: list[str], cli: Cli, tmp_path: Path) -> None:
    words = ["train", *tiny, "--output", "run", "--continue"]
    assert cli(*words, fault=("signal", 6))[0] == 75
    code, _, err = cli(*words, "learning_rate=1e-4")
    assert code == 2
    assert "learning_rate=0.0001 (the run has 0.003)" in err
    code, _, err = cli(*words)
    assert code == 0, err
    assert [event.step for event in read_events(tmp_path / "run" / "events.jsonl") if isinstance(event, Resume)] == [6]


def test_continue_needs_a_folder(tiny: list[str], cli: Cli) -> None:
    code, _, err = cli("train", *tiny, "--continue")
    assert code == 2
    assert "--continue needs the folder of the run" in err


# ------------------------------------------------------------------------------------------------ launch


def written(cli: Cli, folder: Path, *words: str) -> str:
    code, _, err = cli("launch", *words, "--output", "job")
    assert code == 0, err
    return (folder / "job").read_text(encoding="utf-8")


def test_an_sbatch_script_is_bash_with_its_values_quoted_and_queues_the_job_again(tiny: list[str], cli: Cli, tmp_path: Path
                                                                                  ) -> None:
    text = written(cli, tmp_path, "slurm", *tiny, f"description={NASTY}", "output_dir=runs/one", "--nodes", "2", "--gpus",
                   "h100:4")
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in text.splitlines() if "#SBATCH" in line)
    assert options == {"job-name": "powertrain-default", "nodes": "2", "ntasks-per-node": "4", "cpus-per-task": "4",
                       "gpus-per-node": "h100:4", "requeue": "", "open-mode": "append", "signal": "TERM@300"}
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in {"srun": 'printf "%s\\n" "$@" > srun.log; exit $CODE', "scontrol": 'echo "$@" > requeued'}.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    for code, restarts, ends, queued in (("0", "0", 0, False), ("75", "99", 0, True), ("76", "0", 0, True),
                                         ("137", "10", 137, False), ("2", "0", 2, False)):
        (tmp_path / "requeued").unlink(missing_ok=True)
        done = subprocess.run(["bash", str(tmp_path / "job")], check=False, env={
            "PATH": f"{programs}:{os.environ['PATH']}", "CODE": code, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts})
        assert (done.returncode, (tmp_path / "requeued").is_file()) == (ends, queued)
    assert (tmp_path / "srun.log").read_text().splitlines()[1:] == [
        sys.executable, "-m", "powertrain", "train", *tiny, f"description={NASTY}", "--output", str(tmp_path / "runs" / "one"),
        "--continue"]


def test_a_ray_driver_is_python_with_its_values_quoted(tiny: list[str], cli: Cli, tmp_path: Path) -> None:
    text = written(cli, tmp_path, "ray", *tiny, f"description={NASTY}", "--nodes", "2", "--gpus", "0")
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and ast.unparse(node.func) == "train")
    values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert (values["workers"], values["gpus"], values["here"]) == (2, False, str(tmp_path))
    assert values["words"][-4] == f"description={NASTY}"
    assert values["words"][-3:] == ["--output", values["folder"], "--continue"]


def test_a_sky_task_starts_torchrun_on_each_machine(tiny: list[str], cli: Cli, tmp_path: Path) -> None:
    task = yaml.safe_load(written(cli, tmp_path, "sky", *tiny, f"description={NASTY}", "--nodes", "2", "--gpus", "H100:4",
                                  "--volume", "disk"))
    assert (task["num_nodes"], task["resources"], task["volumes"]) == (
        2, {"accelerators": "H100:4", "cpus": "16+"}, {"/shared": "disk"})
    command = shlex.split(task["run"].replace("\\\n", "").splitlines()[1])
    assert command[:2] == ["torchrun", "--nproc-per-node=4"]
    assert f"description={NASTY}" in command
    # get_task_schema of SkyPilot (sky/utils/schemas.py, commit 00052df) takes no other keys, and of these the types
    assert {key: type(value) for key, value in task.items()} == {
        "name": str, "workdir": str, "num_nodes": int, "resources": dict, "volumes": dict, "setup": str, "run": str}


def test_a_pytorch_job_has_the_fields_that_the_operator_reads(tiny: list[str], cli: Cli, tmp_path: Path) -> None:
    job = yaml.safe_load(written(cli, tmp_path, "kubernetes", *tiny, "description=$(id)", "--nodes", "3", "--gpus", "4",
                                 "--image", "me/powertrain:1", "--volume", "disk"))
    assert (job["apiVersion"], job["kind"], job["spec"]["nprocPerNode"]) == ("kubeflow.org/v1", "PyTorchJob", "4")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: one["replicas"] for kind, one in replicas.items()} == {"Master": 1, "Worker": 2}
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container["name"] == "pytorch"                # the operator gives its variables to this container
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert "description=$$(id)" in container["command"]
    # the operator's schema (manifests/base/crds/kubeflow.org_pytorchjobs.yaml, v1.9) requires pytorchReplicaSpecs; Kubernetes
    # drops a key that the schema does not have, and refuses a value of another type
    assert {key: type(value) for key, value in job["spec"].items()} == {
        "nprocPerNode": str, "runPolicy": dict, "pytorchReplicaSpecs": dict}
    assert job["spec"]["runPolicy"].keys() == {"backoffLimit"}
    assert all({key: type(value) for key, value in one.items()} == {"replicas": int, "restartPolicy": str, "template": dict}
               for one in replicas.values())
    assert {one["restartPolicy"] for one in replicas.values()} == {"OnFailure"}
    limits, mounts = container["resources"]["limits"], {mount["name"] for mount in container["volumeMounts"]}
    assert all(isinstance(amount, str) for amount in limits.values())
    assert mounts == {volume["name"] for volume in replicas["Worker"]["template"]["spec"]["volumes"]}


@pytest.mark.parametrize(("words", "says"), [
    (["pbs"], "there is no kind of cluster called 'pbs'"),
    (["slurm", "learning_rat=1"], "learning_rate"),
    (["slurm", "train_batch_size=2", "--gpus", "8"], "train_batch_size=2 cannot be shared by 8 processes"),
    (["slurm", "techniques.micro_batch.examples=0"], "techniques.micro_batch.examples is 0; use 1 or more"),
    (["slurm", "techniques.tensor_parallel.degre=2"], "has no setting 'degre'; did you mean degree?"),
    (["slurm", "techniques.bf16=on", "techniques.fp16=on"], "are both pinned on"),
    (["slurm", "model.family=nope"], "there is no model family 'nope'"),
    (["slurm", "model.width=32", "model.heads=3"], "3 heads do not divide a width of 32"),
    (["slurm", "model.context=8", "data.block=16"], "model.context=8 is shorter than data.block=16"),
    (["slurm", "data.tokenizer=nope"], "data.tokenizer=nope is neither char"),
    (["slurm", "--gpus", "many"], "--gpus many is no number of GPUs"),
    (["sky", "--gpus", "8"], "--gpus H100:8"),
    (["sky", "--gpus", "H100:4", "--nodes", "2"], "--volume"),
    (["kubernetes"], "--image IMAGE --volume CLAIM"),
    (["slurm", "--submit"], "sbatch is not on this machine"),
    (["slurm", "--output", "missing/job"], "cannot be written")])
def test_a_job_that_cannot_be_started_is_one_sentence_and_writes_nothing(cli: Cli, tmp_path: Path, words: list[str], says: str
                                                                        ) -> None:
    code, out, err = cli("launch", *words)
    assert (code, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


@pytest.mark.parametrize("wrong", [("techniques.micro_batch.nope=1",), ("techniques.packing.tokens=x",), ("model.heads=3",),
                                   ("techniques.fp8_base.x=1",), ("data.tokenizer=nope",), ("model.context=2",)])
def test_launch_refuses_a_recipe_with_the_sentence_of_train(tiny: list[str], cli: Cli, wrong: tuple[str, ...]) -> None:
    said = [cli(*command, *tiny, *wrong) for command in (("train",), ("launch", "slurm"))]
    assert [code for code, _, _ in said] == [2, 2]
    assert len({err.splitlines()[-1] for _, _, err in said}) == 1


def test_what_depends_on_the_number_of_processes_is_left_to_the_run(cli: Cli, tmp_path: Path) -> None:
    words = ("techniques.tensor_parallel.degree=4", "model.heads=4", "model.width=64")
    assert written(cli, tmp_path, "slurm", "--gpus", "4", "train_batch_size=8", *words)
