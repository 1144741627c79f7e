"""Logs of runs as a trainer writes them, of any length, in no time."""

import json
import math
from pathlib import Path

RECIPE = "name: made\n"


def line_of(step: int, began: float = 1.7e9, spike: int = 0, fall: int = 20_000) -> str:
    loss = 40.0 if step == spike else 2.0 + 3.0 * math.exp(-step / fall) + 0.05 * math.sin(step)
    return json.dumps({"event": "step", "time": began + step * 0.1, "step": step, "loss": loss, "tokens": 512,
                       "real_tokens": 500, "seconds": 0.1, "learning_rate": 1e-3, "grad_norm": 1.0 + 0.1 * math.cos(step),
                       "parts": {"data": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.009}}) + "\n"


def write_run(folder: Path, steps: int, *, spike: int = 0, ended: bool = True, began: float = 1.7e9,
              fall: int = 20_000) -> Path:
    """Write a run of so many steps, with an evaluation after each tenth of them. Its loss nears 2 within `fall` steps."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / ".lock").touch()
    every = max(1, steps // 10)
    with open(folder / "events.jsonl", "w", encoding="utf-8") as log:
        log.write(json.dumps({"event": "start", "version": 2, "time": began, "step": 0, "name": "made",
                              "total_steps": steps}) + "\n")
        for step in range(1, steps + 1):
            log.write(line_of(step, began, spike, fall))
            if step % every == 0:
                log.write(json.dumps({"event": "evaluation", "time": began + step * 0.1, "step": step, "loss": 2.5,
                                      "tokens": 900, "seconds": 0.2}) + "\n")
        if ended:
            log.write(json.dumps({"event": "end", "time": began + steps * 0.1, "step": steps, "reason": "finished",
                                  "seconds": steps * 0.1}) + "\n")
    return folder
