"""Whether the processes of a run see the same folder: on several machines it has to be a shared one."""

import socket
import time
import uuid
from pathlib import Path

from powertrain.records import WrongUse
from powertrain.training.ranks import Ranks

SEEN_WITHIN_S = 10           # a network file system may show a new file late
ENDING = ".tmp"              # of files that a new run may find in its folder


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Raise WrongUse, in every process, where one does not see the file that the first process writes into its `folder`."""
    token = ranks.agree(folder / f".shared-{uuid.uuid4().hex}{ENDING}")
    failed = ""
    if ranks.is_writer:
        try:
            token.parent.mkdir(parents=True, exist_ok=True)
            token.touch()
        except OSError as error:
            failed = str(error.strerror)
    failed = ranks.agree(failed)
    seen = ranks.each((socket.gethostname(), str(folder), not failed and _appears(token)))
    if ranks.is_writer:
        token.unlink(missing_ok=True)
    if failed:
        raise WrongUse(f"the run's folder {token.parent} cannot be written ({failed}); name another one with --output")
    for rank, (machine, theirs, sees) in enumerate(seen):
        if not sees:
            raise WrongUse(f"process {rank}, on {machine}, does not see the files that process 0, on {seen[0][0]}, writes to "
                           f"{seen[0][1]} (its own folder is {theirs}); name a folder that all machines share with --output")


def _appears(path: Path) -> bool:
    until = time.monotonic() + SEEN_WITHIN_S
    while not path.is_file():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
