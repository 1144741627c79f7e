"""A run's processes as workers of Ray Train: Ray places them and starts them again, `powertrain train` does the rest.

Each worker starts `powertrain train` in a process of its own, which listens for signals and ends with the worker. The workers
agree on a port of the first one's machine, where the processes meet.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.launch.local import was_lost

MOST_RESTARTS = 3


def train(*, words: Sequence[str], folder: str, here: str, workers: int, gpus: bool, gpu_type: str | None, cores: int) -> int:
    """Train in `workers` processes and return the exit code. `words` follow `powertrain train`, in the folder `here`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    storage = Path(f"{folder}-ray")          # shared, as the run's folder is
    ended = storage / "exit-code"            # of the first process: Ray gives metrics back with checkpoints only
    trainer = TorchTrainer(
        work, train_loop_config={"words": list(words), "here": here, "ended": str(ended)},
        torch_config=TorchConfig(backend="gloo"),        # of the workers: NCCL would take memory of the GPUs
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpus, accelerator_type=gpu_type,
                                     resources_per_worker={"CPU": cores, **({"GPU": 1} if gpus else {})}),
        run_config=RunConfig(storage_path=str(storage), failure_config=FailureConfig(max_failures=MOST_RESTARTS)))
    trainer.fit()                            # raises where workers were lost too often
    return int(ended.read_text())


def work(config: Mapping[str, Any]) -> None:
    """Run `powertrain train` as this worker's part of the run; the first one writes down its exit code.

    Raises RuntimeError where a process of the run was lost, so that Ray starts all workers again.
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank = context.get_world_rank()
    address, port = broadcast_from_rank_zero((ray.util.get_node_ip_address(), free_port()) if rank == 0 else None)
    place = {"RANK": rank, "WORLD_SIZE": context.get_world_size(), "LOCAL_RANK": context.get_local_rank(),
             "LOCAL_WORLD_SIZE": context.get_local_world_size(), "MASTER_ADDR": address, "MASTER_PORT": port}
    code = subprocess.run([sys.executable, "-m", "powertrain", "train", *config["words"]], cwd=config["here"], check=False,
                          env={**os.environ, **{name: str(value) for name, value in place.items()}}).returncode
    if was_lost(code):
        raise RuntimeError(f"process {rank} of the run ended with code {code}")
    if rank == 0:
        Path(config["ended"]).write_text(str(code), encoding="utf-8")


def free_port() -> int:
    """Return a port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
