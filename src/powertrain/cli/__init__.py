"""The command line. It only parses: each command is one call into the rooms. `powertrain --help` loads no torch."""

import io
import os
import sys

from powertrain.cli.app import app
from powertrain.cli.output import explain


def main() -> None:
    """Run a command. An error that the user can correct is one sentence on stderr and an exit code, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")         # a character that a terminal does not have is no failure
    try:
        app(prog_name="powertrain")
    except BrokenPipeError:                  # `powertrain plan | head`: nobody reads on, and that is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        code = explain(error, as_json="--json" in sys.argv)
        if code is None:
            raise
        sys.exit(code)
