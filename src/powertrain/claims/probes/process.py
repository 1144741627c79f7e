"""A process of its own for what is timed: settings, allocator and threads of one probe must not reach the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from powertrain.evidence.arms import process_context
from powertrain.evidence.worker import be_silent
from powertrain.records import RunFailed, UserError

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What `function`, of a module's own, returns in a new process, in this one's folder and with as many threads.

    Raises what it raises of this program's errors, and RunFailed where the process failed or died.
    """
    context = process_context()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, os.getcwd(), torch.get_num_threads(), function, arguments, named))
    process.start()
    sender.close()
    try:
        error, value = receiver.recv()
    except EOFError:
        process.join()
        raise RunFailed(f"the process of {function.__module__} ended with code {process.exitcode} and no answer; was it "
                        "killed for its memory?") from None
    except BaseException:
        process.kill()
        raise
    finally:
        receiver.close()
    process.join()
    if error is not None:
        raise error
    result: T = value
    return result


def _answer(sender: Connection, folder: str, threads: int, function: Callable[..., Any], arguments: tuple[Any, ...],
            named: dict[str, Any]) -> None:
    be_silent()
    os.chdir(folder)                         # the server may have been started elsewhere
    torch.set_num_threads(threads)
    try:
        sender.send((None, function(*arguments, **named)))
    except UserError as error:
        sender.send((error, None))
    except Exception as error:               # its sentence crosses the border, its traceback cannot
        sender.send((RunFailed(f"{function.__module__} failed: {type(error).__name__}: {error}"), None))
    finally:
        sender.close()
