"""`powertrain launch`: files that start a run on a cluster, and their start."""

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli import output as screen
from powertrain.cli.options import Words
from powertrain.records import WrongUse


def launch(kind: Annotated[str, typer.Argument(metavar="slurm|ray|sky|kubernetes", show_default=False,
                                               help="Kind of cluster.")],
           words: Words = None,
           nodes: Annotated[int, typer.Option(min=1, help="Number of machines.")] = 1,
           gpus: Annotated[str, typer.Option(help="GPUs of each machine, such as 8 or H100:8; 0 trains on CPUs.")] = "1",
           cores: Annotated[int, typer.Option(min=1, help="CPU cores of each process.")] = 4,
           image: Annotated[str | None, typer.Option(help="Kubernetes: container image that has powertrain.")] = None,
           volume: Annotated[str | None, typer.Option(help="Kubernetes: claim of a volume; SkyPilot: its volume.")] = None,
           output: Annotated[Path | None, typer.Option(help="File to write (default: NAME and the cluster's ending).")] = None,
           submit: Annotated[bool, typer.Option("--submit", help="Start the job too.")] = False) -> int:
    """Write a file that starts a run on a cluster.

    The file has the run's folder in it. Started again, it continues the run.
    """
    from powertrain import planner
    from powertrain.launch.clusters import CLUSTERS, Job, folder_of, start_command
    from powertrain.recipe import resolve_words
    from powertrain.run.material import check_shape
    from powertrain.run.prepare import check_batch, with_optimizer
    from powertrain.training.objectives import objective_of

    if kind not in CLUSTERS:
        raise WrongUse(f"there is no kind of cluster called {kind!r}; use one of {', '.join(CLUSTERS)}")
    if not (asked := re.fullmatch(r"(?:([\w.-]+):)?(\d+)", gpus)):
        raise WrongUse(f"--gpus {gpus} is no number of GPUs; use for example --gpus 8 or --gpus H100:8")
    words = words or []
    recipe = with_optimizer(resolve_words(words)).recipe
    objective_of(recipe)
    planner.check_pins(recipe)
    check_batch(recipe, nodes * max(1, int(asked[2])))
    if recipe.method == "scratch":
        check_shape(recipe)
    here, now = str(Path.cwd()), f"{time.strftime('%Y%m%d-%H%M%S')}"
    job = Job(recipe.name, tuple(word for word in words if not word.startswith("output_dir=")),
              folder_of(kind, recipe.name, recipe.output_dir, now, here), nodes, int(asked[2]), cores, asked[1],
              sys.executable, here, image, volume)
    file = output or Path(f"{job.label}{CLUSTERS[kind].ending}")
    text = CLUSTERS[kind].write(job)
    command = start_command(kind, str(file), sys.executable) if submit else None
    try:
        with open(file, "x", encoding="utf-8") as opened:
            opened.write(text)
    except OSError as error:
        why = "is there already" if isinstance(error, FileExistsError) else f"cannot be written ({error.strerror})"
        raise WrongUse(f"{file} {why}; name another file with --output") from None
    screen.print_rows([("File", str(file)), ("Run", job.folder)])
    return subprocess.run(command, check=False).returncode if command else 0
