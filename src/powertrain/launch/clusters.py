"""Files that start a run on several machines: an sbatch script, a Ray driver, a SkyPilot task and a Kubeflow PyTorchJob.

Each file has the run's folder fixed and the word --continue in it: the same file, started again, continues the run.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import PurePosixPath
from shutil import which

import yaml

from powertrain.records import WrongUse
from powertrain.records.errors import STOPPED_AND_SAVED, LostPeer

SHARED = "/shared"           # where a volume is mounted, in the cloud and in Kubernetes
SAVING_S = 300               # that a run has to save before Slurm's time limit
MOST_RESTARTS = 10           # of a job that lost a process or a machine


@dataclass(frozen=True)
class Job:
    """A run on `nodes` machines with `gpus` each. One process for each GPU; without GPUs, one for each machine."""

    name: str                                # of the recipe
    words: tuple[str, ...]                   # of `powertrain train`
    folder: str                              # of the run
    nodes: int
    gpus: int
    cores: int                               # of each process
    gpu_type: str | None = None              # such as H100, as the cluster calls it
    python: str = "python"                   # of this machine, where the cluster's machines have the same one
    here: str = "."                          # the folder in which the command was given
    image: str | None = None
    volume: str | None = None

    @property
    def per_node(self) -> int:
        return max(1, self.gpus)

    @property
    def training(self) -> list[str]:
        """Return the words after `python -m`."""
        return ["powertrain", "train", *self.words, "--output", self.folder, "--continue"]

    @property
    def label(self) -> str:
        """Return the name as Kubernetes, SkyPilot and Slurm take it: small letters, digits and dashes."""
        return re.sub(r"[^a-z0-9]+", "-", f"powertrain-{self.name}".lower()).strip("-")[:50].rstrip("-")


def slurm_script(job: Job) -> str:
    """Return an sbatch script. Slurm sends SIGTERM before the time limit; the run saves, exits with 75, and is queued again."""
    gpus = [f"--gpus-per-node={f'{job.gpu_type}:' if job.gpu_type else ''}{job.gpus}"] if job.gpus else []
    options = [f"--job-name={job.label}", f"--nodes={job.nodes}", f"--ntasks-per-node={job.per_node}",
               f"--cpus-per-task={job.cores}", *gpus, "--requeue", "--open-mode=append", f"--signal=TERM@{SAVING_S}"]
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options), "",
        f"cd {shlex.quote(job.here)} || exit 1",
        f"export SRUN_CPUS_PER_TASK={job.cores}",
        f"srun --kill-on-bad-exit=0 {shlex.join([job.python, '-m', *job.training])}",
        "code=$?",
        f"# {STOPPED_AND_SAVED}: stopped and saved. {LostPeer.exit_code} or a signal: a process was lost. "
        "Both go on from the newest checkpoint.",
        f"if [ $code -eq {STOPPED_AND_SAVED} ] || {{ {{ [ $code -eq {LostPeer.exit_code} ] || [ $code -gt 128 ]; }} &&",
        f"                        [ \"${{SLURM_RESTART_COUNT:-0}}\" -lt {MOST_RESTARTS} ]; }}; then",
        '    scontrol requeue "$SLURM_JOB_ID" && exit 0',
        "fi",
        "exit $code", ""])


def ray_driver(job: Job) -> str:
    """Return a Python program that starts the run's processes as workers of Ray Train."""
    values = {"words": list(job.training[2:]), "folder": job.folder, "here": job.here, "workers": job.nodes * job.per_node,
              "gpus": job.gpus > 0, "gpu_type": job.gpu_type, "cores": job.cores}
    return "\n".join([
        f'"""Train {job.label} with Ray. Start this file again to continue the run."""', "",
        "import sys", "",
        "from powertrain.launch.on_ray import train", "",
        'if __name__ == "__main__":',
        "    sys.exit(train(",
        *(f"        {name}={value!r}," for name, value in values.items()),
        "    ))", ""])


def sky_task(job: Job) -> str:
    """Return a SkyPilot task. The folder of the command is copied to each machine."""
    if job.gpus and not job.gpu_type:
        raise WrongUse(f"SkyPilot has to know the kind of GPU; use for example --gpus H100:{job.gpus}")
    if job.nodes > 1 and not job.volume:
        raise WrongUse(f"{job.nodes} machines need a folder that they share; name a SkyPilot volume with --volume, or use "
                       "--nodes 1")
    gpus = {"accelerators": f"{job.gpu_type}:{job.gpus}"} if job.gpus else {}
    volumes = {"volumes": {SHARED: job.volume}} if job.volume else {}
    torchrun = shlex.join(["torchrun", f"--nproc-per-node={job.per_node}", "--master-port=29500"])
    return _yaml({
        "name": job.label, "num_nodes": job.nodes, "workdir": ".",
        "resources": {**gpus, "cpus": f"{job.cores * job.per_node}+"}, **volumes,
        "setup": "python -c 'import powertrain' || pip install powertrain\n",
        "run": "\n".join([
            'first=$(echo "$SKYPILOT_NODE_IPS" | head -n1)',
            f'{torchrun} --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" --master-addr="$first" \\',
            f"  -m {shlex.join(job.training)}", ""])})


def pytorch_job(job: Job) -> str:
    """Return a PyTorchJob of the Kubeflow training operator, version 1, which tells torchrun its place by PET_ variables."""
    if not job.image or not job.volume:
        raise WrongUse("Kubernetes needs a container image in which powertrain is installed and a volume that all machines "
                       "share; use --image IMAGE --volume CLAIM")
    if job.gpu_type:
        raise WrongUse(f"--gpus {job.gpu_type}:{job.gpus} names a kind of GPU, for which each Kubernetes cluster has labels of "
                       f"its own; use --gpus {job.gpus} and add a nodeSelector to the file")
    # $(NAME) is replaced by Kubernetes; $$ is a dollar sign
    words = [word.replace("$", "$$") for word in job.training]
    resources = {"cpu": str(job.cores * job.per_node), **({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {})}
    container = {
        "name": "pytorch", "image": job.image, "workingDir": SHARED,     # the operator looks for this name
        "command": ["torchrun", "--master-addr=$(MASTER_ADDR)", "--master-port=$(MASTER_PORT)", "-m", *words],
        "env": [{"name": "POWERTRAIN_CACHE", "value": f"{SHARED}/cache"}],
        "resources": {"limits": resources},
        "volumeMounts": [{"name": "shared", "mountPath": SHARED}, {"name": "memory", "mountPath": "/dev/shm"}]}
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": job.volume}},
               {"name": "memory", "emptyDir": {"medium": "Memory"}}]         # NCCL exchanges there
    pod = {"spec": {"containers": [container], "volumes": volumes}}
    replicas = {"Master": 1, **({"Worker": job.nodes - 1} if job.nodes > 1 else {})}
    return _yaml({
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": job.label},
        "spec": {"nprocPerNode": str(job.per_node), "runPolicy": {"backoffLimit": MOST_RESTARTS},
                 "pytorchReplicaSpecs": {kind: {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
                                         for kind, count in replicas.items()}}})


@dataclass(frozen=True)
class Cluster:
    """What is written for one kind of cluster, and the command that starts it."""

    write: Callable[[Job], str]
    ending: str                              # of the file's name
    start: tuple[str, ...]                   # before the file's name
    install: str                             # what a person does where the program is missing
    is_remote: bool                          # its machines have other folders than this one


CLUSTERS: Mapping[str, Cluster] = {
    "slurm": Cluster(slurm_script, ".sbatch", ("sbatch",), "use a login machine of the cluster", False),
    "ray": Cluster(ray_driver, "_ray.py", ("ray",), "pip install 'powertrain[ray]'", False),
    "sky": Cluster(sky_task, ".sky.yaml", ("sky", "launch"), "pip install skypilot", True),
    "kubernetes": Cluster(pytorch_job, ".k8s.yaml", ("kubectl", "apply", "-f"), "install kubectl", True)}


def start_command(kind: str, file: str, python: str) -> list[str]:
    """Return the command that starts the written file. Raises WrongUse where its program is not on this machine."""
    cluster = CLUSTERS[kind]
    if (find_spec("ray") is None) if kind == "ray" else (which(cluster.start[0]) is None):
        raise WrongUse(f"{cluster.start[0]} is not on this machine, so {file} cannot be started here; {cluster.install}")
    return [python, file] if kind == "ray" else [*cluster.start, file]


def folder_of(kind: str, name: str, asked: str | None, now: str, here: str) -> str:
    """Return the run's folder as an absolute path on the cluster's machines."""
    return str(PurePosixPath(SHARED if CLUSTERS[kind].is_remote else here) / (asked or f"runs/{name}-{now}"))


def _yaml(values: Mapping[str, object]) -> str:
    """Return the values as YAML in which long commands stay readable."""
    class Readable(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Readable.add_representer(str, text)
    apart = json.loads(json.dumps(values))   # what is the same value twice would be an anchor and an alias
    return yaml.dump(apart, Dumper=Readable, sort_keys=False, width=120, allow_unicode=True)
