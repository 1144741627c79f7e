"""The optimizers, as a table: one row holds all that the other rooms need to know of an optimizer. It loads no torch.

A row says how the optimizer is made, which settings it has, what it keeps of each weight between steps, and how its update
may run: by one fused kernel, or over weights that lie in flat buffers. Memory prediction, checkpoints, resuming and the
techniques for the update read the row. To add an optimizer, add a row and a test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from powertrain.models.selection import ALIKE, Selection
from powertrain.recipe.tables import Setting, Table
from powertrain.records import Hardware, OptimizerFacts, Software, WrongUse

if TYPE_CHECKING:
    from torch import nn

    from powertrain.recipe import Recipe
    from powertrain.training.updates import RunOptimizer

State = Mapping[str, float]                  # name of a tensor in the state -> its bytes per weight, or per row or column
FP32 = 4
BLOCK = 256                                  # weights that share one fp32 scale in bitsandbytes' 8-bit states
MOMENTS: State = {"exp_avg": FP32, "exp_avg_sq": FP32}
LIBRARY_MOMENTS: State = {"state1": FP32, "state2": FP32}
EIGHT_BIT_MOMENTS: State = {"state1": 1, "state2": 1, "absmax1": FP32 / BLOCK, "absmax2": FP32 / BLOCK}


@dataclass(frozen=True)
class Row:
    """One optimizer. A checkpoint holds every tensor of its state, by weight and name."""

    name: str
    does: str                                # one line for people
    source: str
    kind: str | type[Any]                    # its class: a name of torch.optim, updates.py or bitsandbytes.optim
    given: tuple[str, ...]                   # arguments of its class, besides weights, learning rate and settings
    state: State                             # of a hidden matrix, and of all other weights unless said otherwise
    only_with: Mapping[str, str] = field(default_factory=dict)   # tensor of the state -> the setting that it needs
    of_vectors: State | None = None          # of norms and biases
    of_outside: State | None = None          # of embeddings and head
    of_lines: State = field(default_factory=dict)        # of a matrix, for each of its rows or columns
    settings: Mapping[str, Setting] = field(default_factory=dict)
    as_arguments: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict    # the settings, by the names of its class
    defaults: Mapping[str, Any] = field(default_factory=dict)    # of recipe keys that the recipe leaves open
    update_tensors: int = 0                  # fp32 tensors of a weight's size that its plain update makes
    update_tensors_on_cpu: int = 0           # as many again on a CPU, where a library has no kernel that works in place
    orthogonalising_rounds: int = 0          # of a hidden matrix in each update: three matrix products each
    parts_hidden: bool = False               # hidden matrices are a parameter group of their own
    can_fuse: bool = False                   # one kernel may update a whole group
    can_be_flat: bool = False                # it works element by element, so weights may lie in one buffer
    part: str | None = None                  # the software that it comes from, beside torch
    devices: tuple[str, ...] = ("cpu", "cuda", "mps")
    in_eight_bits: str | None = None         # the row that is this one with its state in 8 bits
    paged: str | None = None                 # the row that is this one with its state in memory that a GPU pages out

    def why_not(self, hardware: Hardware, software: Software) -> str | None:
        """Return why this optimizer cannot run here, or None."""
        if hardware.device not in self.devices:
            return f"{self.name} runs on {' or '.join(self.devices)}, and this run is on {hardware.name} ({hardware.device})"
        if self.part is not None and self.part in software.missing:
            return f"{self.name} needs the part {self.part!r}, which is {software.missing[self.part]}"
        return None

    def facts_on(self, device: str, settings: Mapping[str, Any] | None = None, *, average_bytes: float = 0.0
                 ) -> OptimizerFacts:
        """Return what it keeps and works in on such a device with these settings, as memory prediction reads it.

        `average_bytes`: of each weight, in an average of the weights beside it.
        """
        given = settings or {}
        state = {name: nbytes for name, nbytes in self.state.items() if given.get(self.only_with.get(name, ""), True)}
        vectors, outside = (state if found is None else found for found in (self.of_vectors, self.of_outside))
        tensors = self.update_tensors + (self.update_tensors_on_cpu if device == "cpu" else 0)
        return OptimizerFacts(self.name, sum(state.values()), sum(outside.values()), sum(vectors.values()),
                              sum(self.of_lines.values()) / 2, average_bytes, tensors, self.orthogonalising_rounds)


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a run: a row with its settings, and how its update runs. Techniques return changed copies."""

    row: Row
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    settings: Mapping[str, Any] = field(default_factory=dict)
    fused: bool = False
    flat: bool = False
    average_decay: float | None = None       # of an average of the weights: see averages.py
    selection: Selection = ALIKE             # the factor of each weight's learning rate

    def facts_on(self, device: str) -> OptimizerFacts:
        """Return what it keeps and works in on such a device, as memory prediction reads it."""
        return self.row.facts_on(device, self.settings, average_bytes=0.0 if self.average_decay is None else FP32)

    def __call__(self, model: nn.Module, weight_decay: float) -> RunOptimizer:
        """Make the optimizer for the trained weights of `model`."""
        from powertrain.training.averages import averaging
        from powertrain.training.updates import FlatOptimizer, RunOptimizer, for_runs

        kind: Any = self.row.kind
        known = {"betas": self.betas, "eps": self.epsilon, "fused": self.fused, "foreach": False}
        runs: Any = for_runs(kind, self.row.part, FlatOptimizer if self.flat else RunOptimizer)
        made: Any = (runs if self.average_decay is None else averaging(runs))(
            self.groups(model, weight_decay), lr=self.learning_rate, **{name: known[name] for name in self.row.given},
            **self.row.as_arguments(self.settings))
        if self.average_decay is not None:
            made.decay, made.averages = self.average_decay, {}
        found: RunOptimizer = made
        return found

    def groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Return the trained weights of `model` in groups, each with its "weight_decay" and its "lr_factor"."""
        from powertrain.training.updates import parameter_groups

        return parameter_groups(model, weight_decay, hidden_apart=self.row.parts_hidden, selection=self.selection)

    def as_row(self, name: str | None) -> Optimizer:
        """Return the same with its state kept another way: see `Row.in_eight_bits` and `Row.paged`."""
        assert name is not None
        return dataclasses.replace(self, row=OPTIMIZERS.named(name))


def _of_adafactor(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"beta2_decay": settings["beta2_decay"], "d": settings["clip_threshold"], "eps": (None, settings["least_rms"])}


ADAM = ("betas", "eps")
NVIDIA = ("cuda",)                           # its driver does the paging
LIBRARY = ("cpu", "cuda")                    # bitsandbytes has 8-bit updates for both
BYTES = "Dettmers et al. 2022, arXiv:2110.02861; bitsandbytes"
PAGES = "Dettmers et al. 2023, arXiv:2305.14314, section 3; bitsandbytes"
ROWS = (
    Row("adamw", "divides each weight's mean gradient by its root mean square", "Loshchilov & Hutter 2019, arXiv:1711.05101; "
        "torch.optim.AdamW", "AdamW", (*ADAM, "foreach", "fused"), MOMENTS, update_tensors=2, can_fuse=True, can_be_flat=True,
        in_eight_bits="adamw_8bit", paged="paged_adamw"),
    Row("sgd", "follows the mean gradient; weight decay is added to the gradient", "Sutskever et al. 2013; torch.optim.SGD",
        "SGD", ("foreach", "fused"), {"momentum_buffer": FP32}, only_with={"momentum_buffer": "momentum"}, update_tensors=1,
        can_fuse=True, can_be_flat=True,
        settings={"momentum": Setting(0.9, 0, 1), "nesterov": Setting(False)}),
    Row("lion", "steps by the sign of the mean gradient; it wants 3 to 10 times less learning_rate than adamw",
        "Chen et al. 2023, arXiv:2302.06675", "Lion", ("betas",), {"exp_avg": FP32}, update_tensors=1, can_be_flat=True,
        defaults={"adam_beta2": 0.99}, in_eight_bits="lion_8bit"),
    Row("adafactor", "as adamw with one moment, kept as sums over rows and columns; learning_rate is relative to each weight's "
        "size", "Shazeer & Stern 2018, arXiv:1804.04235; torch.optim.Adafactor", "Adafactor", ("foreach",), {},
        update_tensors=1, of_vectors={"variance": FP32}, of_lines={"row_var": FP32, "col_var": FP32},
        as_arguments=_of_adafactor,
        settings={"beta2_decay": Setting(-0.8, below=0), "clip_threshold": Setting(1.0, least=1),
                  "least_rms": Setting(1e-3, least=0)}),
    Row("muon", "makes the update of each hidden matrix orthogonal; adamw updates embeddings, norms and head",
        "Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982; torch.optim.Muon",
        "MuonAndAdamW", ADAM, {"momentum_buffer": FP32}, of_vectors=MOMENTS, of_outside=MOMENTS, update_tensors=3,
        parts_hidden=True, orthogonalising_rounds=5,
        settings={"momentum": Setting(0.95, 0, 1), "nesterov": Setting(True), "ns_steps": Setting(5, 1, 100),
                  "adjust_lr_fn": Setting("match_rms_adamw", choices=("match_rms_adamw", "original"))}),
    Row("adamw_8bit", "as adamw, with both moments rounded to 8 bits", BYTES, "AdamW8bit", ADAM, EIGHT_BIT_MOMENTS,
        part="bitsandbytes", devices=LIBRARY, update_tensors_on_cpu=5),
    Row("lion_8bit", "as lion, with its moment rounded to 8 bits", BYTES, "Lion8bit", ("betas",),
        {"state1": 1, "absmax1": FP32 / BLOCK}, part="bitsandbytes", devices=LIBRARY, update_tensors_on_cpu=5,
        defaults={"adam_beta2": 0.99}),
    Row("paged_adamw", "as adamw, with moments that move to the host when the GPU runs short", PAGES,
        "PagedAdamW32bit", ADAM, LIBRARY_MOMENTS, part="bitsandbytes", devices=NVIDIA),
    Row("paged_adamw_8bit", "as adamw_8bit, with moments that move to the host when the GPU runs short", PAGES,
        "PagedAdamW8bit", ADAM, EIGHT_BIT_MOMENTS, part="bitsandbytes", devices=NVIDIA),
)
OPTIMIZERS = Table("optimizer", {row.name: row for row in ROWS})


def optimizer_of(recipe: Recipe) -> Optimizer:
    """Return the optimizer that the recipe names, its update plain. Raises WrongUse for an unknown name or setting."""
    row: Row = OPTIMIZERS.named(recipe.optimizer.name)
    settings = OPTIMIZERS.settings(row.name, recipe.optimizer.settings)
    if settings.get("nesterov") and not settings["momentum"]:
        raise WrongUse("optimizer.nesterov=true needs a momentum above 0; set optimizer.momentum=0.9",
                       keys=("optimizer.nesterov", "optimizer.momentum"), cure=("optimizer.momentum=0.9",))
    return Optimizer(row, recipe.learning_rate, (recipe.adam_beta1, recipe.adam_beta2), recipe.adam_epsilon, settings,
                     average_decay=recipe.ema.decay, selection=selection_of(recipe))


def selection_of(recipe: Recipe) -> Selection:
    """Return which weights the recipe trains, and how fast each. Raises WrongUse for weights frozen beside adapters."""
    wanted = recipe.weights
    if wanted.freeze and recipe.method in ("lora", "qlora"):
        raise WrongUse(f"weights.freeze names weights that stay as they are, and method={recipe.method} leaves all of the "
                       "model's own weights as they are; choose the linears that get adapters with lora.target_modules, or use "
                       "method=full", keys=("weights.freeze",))
    return Selection(tuple(wanted.freeze), dict(wanted.learning_rates), wanted.layer_decay)


def open_values(recipe: Recipe, is_open: Callable[[str], bool]) -> dict[str, tuple[Any, str]]:
    """Return the values that the optimizer gives to keys that the recipe leaves open: key -> (value, reason)."""
    row: Row = OPTIMIZERS.named(recipe.optimizer.name)
    settings = OPTIMIZERS.settings(row.name, recipe.optimizer.settings)
    found = {f"optimizer.{key}": value for key, value in settings.items() if key not in recipe.optimizer.settings}
    found |= {key: value for key, value in row.defaults.items() if is_open(key)}
    return {key: (value, f"the default of {row.name}") for key, value in found.items()}


def plain_adamw(learning_rate: float, betas: tuple[float, float], epsilon: float) -> Optimizer:
    """Return AdamW that updates one tensor after another."""
    return Optimizer(OPTIMIZERS.named("adamw"), learning_rate, betas, epsilon)
