"""The place of a process that Slurm's srun has started, in the words of torchrun.

srun tells each process of a step its place in variables of its own (man srun, OUTPUT ENVIRONMENT VARIABLES). A process that
the batch script starts without srun has no step: it is started alone. How the processes meet is in group.py.
"""

import re
from collections.abc import Mapping

from powertrain.records import WrongUse

PLACE = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
         "SLURM_STEP_NODELIST")
FIRST_PORT, PORTS = 15_000, 15_000           # below those that Linux lends to programs that ask for any


def as_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on for one of several processes of srun; nothing for any other process.

    The processes meet at the first machine of the step, at a port that follows from the job's number, or at MASTER_ADDR and
    MASTER_PORT. Raises WrongUse where the list of machines cannot be read.
    """
    is_placed = "RANK" in environment        # by torchrun, which srun has started
    if is_placed or any(name not in environment for name in PLACE) or environment["SLURM_STEP_NUM_TASKS"] == "1":
        return {}
    node = int(environment["SLURM_NODEID"])
    here = _tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])[node]
    port = FIRST_PORT + (int(environment.get("SLURM_JOB_ID", "0")) + int(environment["SLURM_STEP_ID"])) % PORTS
    return {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"], "LOCAL_WORLD_SIZE": str(here),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or first_machine(environment["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(port)}


def first_machine(machines: str) -> str:
    """Return the first name of a list such as `gpu[07-09,12],login1`: gpu07."""
    found = re.match(r"([^,\[\]]+)(?:\[(\w+)[^\]]*\]([^,\[\]]*))?(?:,|$)", machines)
    if found is None:
        raise WrongUse(f"SLURM_STEP_NODELIST={machines} is no list of machines that can be read here; set MASTER_ADDR to the "
                       "name of the first machine before srun")
    return "".join(part or "" for part in found.groups())


def _tasks_of_nodes(counts: str) -> list[int]:
    """Return the processes on each machine of a list such as `8(x2),4`: 8, 8, 4."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]
