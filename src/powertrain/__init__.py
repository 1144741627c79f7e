"""Powertrain trains language models as fast as the machine allows, and proves every gain on that machine.

The names below are the Python API (docs/python.md). Each is loaded when it is first used, so that `import powertrain` is quick
and loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.api import Model as Model
    from powertrain.api import Planned as Planned
    from powertrain.api import Run as Run
    from powertrain.api import open_model as open_model
    from powertrain.api import plan as plan
    from powertrain.api import train as train
    from powertrain.records import UserError as UserError
    from powertrain.records import events as events
    from powertrain.records.version import VERSION as __version__

PLACES = {"__version__": "records.version:VERSION", "events": "records.events:", "UserError": "records.errors:UserError"} | {
    name: f"api:{name}" for name in ("Model", "Planned", "Run", "open_model", "plan", "train")}
__all__ = ["Model", "Planned", "Run", "UserError", "__version__", "events", "open_model", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = PLACES[name].partition(":")
    found = import_module(f"{__name__}.{module}")
    return getattr(found, attribute) if attribute else found
