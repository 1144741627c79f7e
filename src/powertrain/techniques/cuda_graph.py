"""CUDA graph: forward and backward pass recorded once at a constant shape, then replayed with one call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from powertrain.cost.fitting import longest_example, will_pack
from powertrain.cost.precision import VARLEN_SINCE, planned_dtype
from powertrain.models.decoder import Decoder
from powertrain.models.kernels.attention import find_varlen
from powertrain.records import Batch, Facts, ModelFacts, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique
from powertrain.training.laps import no_lap
from powertrain.training.replayed_passes import ReplayedPass
from powertrain.training.static_passes import fits, lay_out, shape_of

if TYPE_CHECKING:
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

LOOKED_AT = 4                # steps whose passes the constant shape is taken from
TOLERANCE = 1e-2             # of gradients, relative: bf16 attention sums them in another order each time


@dataclass(frozen=True)
class CudaGraph(Technique):
    """A small model's GPU waits for Python between kernels; a replayed pass is one call for all of them.

    The same kernels on the same numbers. Each pass is brought to one shape: documents end to end, filled up to the same
    number of tokens; where documents end and which rows have a target are tensors of a constant size, prepared on the
    host. A pass that does not fit the shape runs as before, and is counted.
    """

    name = "cuda_graph"
    does = "records forward and backward once and replays them"
    exactness = Exactness.ROUNDING
    touches = frozenset({"lay_out", "run_pass"})
    source = "CUDA programming guide, graphs; torch.cuda.graph; performance.md section 6 (a) 2"

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Refusal:
        """No study has measured it yet, so it is for pins."""
        hardware, model, data = facts.hardware, facts.model, facts.data
        if hardware.device != "cuda":
            return cls.refuse(f"graphs are recorded by CUDA, and this run computes on {hardware.device!r}")
        if (why := _cannot_be_recorded(model)) is not None:
            return cls.refuse(why)
        if recipe.techniques.get("activation_checkpointing", "off") != "off":
            return cls.refuse("the recipe asks for activation_checkpointing, which asks the device for its random state in "
                              "every pass, and a recording cannot")
        if data.kind != "blocks" and (why := _cannot_be_constant(facts, recipe)) is not None:
            return cls.refuse(why)
        size = f"documents of {data.block} tokens on average and {longest_example(data):,} at most, in passes filled up to " \
            "one size" if data.kind != "blocks" else f"passes of {data.block}-token blocks"
        return cls.refuse(f"{size} can be recorded, and no study has measured yet what that saves on a GPU", possible=cls())

    def apply(self, setup: Setup) -> Setup:
        context = setup.model.config.context if isinstance(setup.model, Decoder) and \
            setup.model.config.positions == "learned" else None
        shape = shape_of([batch for step in range(LOOKED_AT) for batch in setup.prepare(step)], context)
        return replace(setup, lay_out=partial(lay_out, shape=shape), run_pass=ReplayedPass(shape))

    def confirm(self, setup: Setup) -> None:
        """Records, replays the first pass that fits twice, and holds gradients and loss against the eager pass's."""
        found = setup.run_pass
        if not isinstance(found, ReplayedPass):
            raise NotApplied(f"cuda_graph: passes are run by {found!r}")
        if isinstance(setup.model, Decoder) and setup.model.config.positions_change_at is not None:
            raise NotApplied("cuda_graph: with longrope a document's length decides its positions on the host; set it to off")
        passes = [batch for step in range(LOOKED_AT) for batch in setup.prepare(step)]
        fitting = [batch for batch in passes if fits(batch, found.shape)]
        if 2 * len(fitting) < len(passes):
            raise NotApplied(f"cuda_graph: only {len(fitting)} of the first {len(passes)} passes have the shape that is "
                             f"recorded, {found.shape.tokens:,} tokens; set techniques.packing.multiple to its tokens, so that "
                             "all are filled up to one size")
        batch, before = fitting[0].to(setup.device), found.counts["replayed"]
        loss, gradients = _taken_by(setup, setup.run_pass, batch)
        if found.counts["replayed"] != before + 2:
            raise NotApplied("cuda_graph: the pass was not replayed")
        expected_loss, expected = _taken_by(setup, found.eager, batch)
        apart = float((gradients - expected).norm() / expected.norm().clamp(min=1e-30))
        off = abs(loss - expected_loss) / max(abs(expected_loss), 1e-30)
        if not (apart <= TOLERANCE and off <= TOLERANCE):
            raise NotApplied(f"cuda_graph: the replayed pass is not the eager one: gradients are {apart:.1e} apart and losses "
                             f"{off:.1e}; set it to off, and report this")


def _taken_by(setup: Setup, run_pass: object, batch: Batch) -> tuple[float, torch.Tensor]:
    """The loss and all gradients after the pass was run twice: they have to add up. Leaves no gradient behind."""
    assert callable(run_pass)
    scaler = torch.amp.GradScaler(setup.device.type, enabled=False)
    setup.model.zero_grad(set_to_none=True)
    losses = [float(run_pass(setup, batch, batch.trained_tokens, scaler, no_lap)) for _ in range(2)]
    gradients = torch.cat([parameter.grad.detach().float().flatten() for parameter in setup.model.parameters()
                           if parameter.grad is not None])
    setup.model.zero_grad(set_to_none=True)
    return losses[1], gradients


def _cannot_be_recorded(model: ModelFacts) -> str | None:
    """What in the model keeps a pass from being the same kernels every time, or from being checked."""
    if model.provider != "native":
        return f"the model is computed by {model.provider}, whose kernels are not known to be the same in every pass"
    if model.dropout or model.adapter_dropout:
        return f"dropout ({max(model.dropout, model.adapter_dropout):g}) draws other numbers in each pass, so that a " \
               "replayed one cannot be held against an eager one"
    if any(name.endswith(".log_sigma") for name in model.shapes):
        return "LS-LoRA's penalty is added once a step, outside of the passes, and is not recorded"
    if model.frozen_dtype == "nf4":
        return "bitsandbytes makes 4-bit weights wide outside of torch, on streams that a recording may not see"
    return None


def _cannot_be_constant(facts: Facts, recipe: Recipe) -> str | None:
    """Why passes of examples that differ in length have no constant shape here, or None."""
    model, capability, pins = facts.model, facts.hardware.compute_capability, recipe.techniques
    if not will_pack(model, facts.data, pins):
        return "examples differ in length and are padded to the longest of each pass, which is another shape every time; " \
               "it needs packing"
    dtype = planned_dtype(facts.hardware, pins)
    if dtype not in ("bf16", "fp16") or capability is None or capability < VARLEN_SINCE or find_varlen() is None:
        return f"examples differ in length, and attention that reads their lengths on the device needs bf16 or fp16 " \
               f"(products are computed in {dtype}), compute capability {VARLEN_SINCE[0]}.{VARLEN_SINCE[1]}, and torch's " \
               "varlen kernel"
    wanted = pins.get("attention_kernel")
    if wanted == "off" or (isinstance(wanted, dict) and wanted.get("kernel", "varlen") != "varlen"):
        return "the recipe asks for another attention kernel, whose work depends on the documents' lengths; it needs varlen"
    return None
