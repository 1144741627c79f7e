"""Saved activations: what a hand-written block keeps for its backward pass, planned tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.cost.fitting import Link, added_s, hidden_bytes, lightest_that_fits, link_of, sent_bytes, total_bytes
from powertrain.cost.work import recompute_flops, training_flops
from powertrain.cost.workload import Workload
from powertrain.records import Effect, ModelFacts, NotApplied, Proposal, Refusal, Why
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique, name_of

if TYPE_CHECKING:
    import torch

    from powertrain.models.kernels.fused.block import HandWritten
    from powertrain.models.kernels.fused.saving import Saving

ACTIONS = ("keep", "recompute", "offload")
KINDS = ("inner", "heads", "mixed", "normalised")            # as models/kernels/fused/saving.py explains them
RECOMPUTABLE = ("inner", "heads")


@dataclass(frozen=True)
class SavedActivations(Technique):
    """Each kind of tensor is kept, recomputed, or offloaded to the host's memory: the cheapest first, until the step fits.

    Recomputing the result of a product costs its contraction length per byte. All products of a block cost the same, so the
    largest result goes first, in as few blocks as possible. The result of attention is never recomputed, and the result of the
    down projection is never needed. On a GPU, offloading comes first as far as computation hides the copies, because it costs
    nothing then; the rest is recomputed or waited for, whichever is shorter. The same functions run again on the same
    numbers: in fp32 gradients keep their bits; in bf16 a norm's result is recomputed from its rounded value.
    """

    inner: str = "recompute"                 # result of the MLP's first product
    heads: str = "keep"                      # queries, keys and values
    mixed: str = "keep"                      # result of attention
    normalised: str = "keep"                 # results of the two norms
    blocks: int = 1_000_000                  # how many, from the lowest block that trains

    name = "saved_activations"
    does = "plans which activations a hand-written block stores"
    needs_whole_weights = True
    decides_by: ClassVar = {"saved": "actions", "saved_blocks": "blocks"}
    choices: ClassVar = {kind: ACTIONS if kind in RECOMPUTABLE else ("keep", "offload") for kind in KINDS}
    native_only = True
    needs_all_trained = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "elementwise", "copy"})
    source = "Korthikanti et al. 2022, arXiv:2205.05198 (what to compute again)"

    @property
    def actions(self) -> Mapping[str, str]:
        """Return the action for each kind of tensor that is not kept."""
        return {kind: action for kind in KINDS if (action := asdict(self)[kind]) != "keep"}

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model, hardware = run.model, run.hardware
        if not run.decided.fused_blocks:
            return cls.refuse(Why.DOES_NOT_APPLY, "this needs fused_blocks, which is off", cure=("techniques.fused_blocks=on",),
                              rival="fused_blocks")
        if run.decided.one_call:
            return cls.refuse(Why.DOES_NOT_APPLY, "a block in one call keeps all that it needs: nothing of it is "
                              "recomputed or offloaded", cure=("techniques.fused_blocks.kernels=cpp",), rival="fused_blocks")
        plain = run.one_example()
        need, tokens = run.need(plain), plain.block
        shown = f"one example of {tokens:,} tokens needs {need}"
        if need.is_met:
            return cls.refuse(Why.NOT_NEEDED, f"memory is not short: {shown}", cls(), numbers=need.numbers)
        link = link_of(hardware, run.decided.dtype)
        if hardware.device == "cuda" and isinstance(link, str):
            shown += f"; nothing is offloaded, because {link}"
        light = lightest_that_fits(model, plain, need.room_bytes, link if isinstance(link, Link) else None)
        if light is None:
            return cls.refuse(Why.NO_ROOM, f"{shown}; even with everything recomputed the step does not fit, and "
                              "activation_checkpointing needs less memory", cls(),
                              cure=("techniques.activation_checkpointing=on",), numbers=need.numbers)
        kept: dict[str, Any] = dict.fromkeys(KINDS, "keep") | dict(light.saved)
        longer = recompute_flops(model, tokens, light.saved, light.saved_blocks) / training_flops(model, [tokens])
        done = f"recomputing {' and '.join(light.saved)} of {light.saved_blocks} blocks is enough"
        if isinstance(link, Link):
            longer = (added_s(model, light.saved, tokens, link) * light.saved_blocks * link.flops_per_s
                      / training_flops(model, [tokens]))
            done = f"{_in_words(model, light, tokens, link)}, in {light.saved_blocks} blocks"
        return cls(**kept, blocks=light.saved_blocks).on(
            f"memory is short: {shown}; {done}",
            Effect((1.0, 1 + 1.2 * longer), total_bytes(model, light) - need.needed_bytes,
                   basis="formula: products that are recomputed, and copies that the computation does not "
                         "hide"), numbers=need.numbers)

    def apply(self, setup: Setup) -> Setup:
        blocks = getattr(setup.run_block, "blocks", None)
        if blocks is None:
            raise NotApplied(f"saved_activations: blocks are run by {name_of(setup.run_block)}, not as fused blocks; use "
                             "techniques.fused_blocks=on")
        saving = self._saving(blocks[0], setup.device)
        training = [index for index, block in enumerate(blocks) if block.trained]
        lowest = min(training, default=0)
        light = tuple(replace(block, saving=saving) if lowest <= index < lowest + self.blocks else block
                      for index, block in enumerate(blocks))
        return replace(setup, run_block=replace(setup.run_block, blocks=light))  # type: ignore[type-var]

    def confirm(self, setup: Setup) -> None:
        """Run one pass of the first micro-batch, in which every light block has to put away each kind that is not kept."""
        found: Any = setup.run_block
        while not hasattr(found, "blocks") and hasattr(found, "inner"):
            found = found.inner
        light = [block for block in getattr(found, "blocks", ()) if block.saving is not None]
        if not light or light[0].saving.actions != self.actions:
            raise NotApplied(f"saved_activations: blocks are run by {name_of(setup.run_block)}, which keep all that they need")
        before = light[0].saving.freed
        setup.run_one_pass()
        put_away, kinds = light[0].saving.freed - before, len(self.actions)
        if put_away < len(light) * kinds:
            raise NotApplied(f"saved_activations: {put_away} tensors of {len(light)} blocks were put away, and it should be "
                             f"{kinds} kinds in each")

    def _saving(self, block: HandWritten, device: torch.device) -> Saving:
        """Return what all blocks share; its functions are compiled if the blocks' own are."""
        from powertrain.models.kernels.fused.compiled import CompiledPart
        from powertrain.models.kernels.fused.saving import PinnedHost, PlainHost, Saving

        host = PinnedHost(device) if device.type == "cuda" else PlainHost()
        leave: Any = block.functions.leave
        is_compiled = isinstance(leave, CompiledPart)
        change: Callable[[Any], Any] = CompiledPart if is_compiled else lambda function: function
        parts = (leave.function if is_compiled else leave).__self__
        return Saving(self.actions, host, change(parts.inner_again), change(parts.heads_again))


def _in_words(model: ModelFacts, light: Workload, tokens: int, link: Link) -> str:
    """Say what is recomputed and what is offloaded, and why that pays."""
    again, out = ([kind for kind, action in light.saved.items() if action == wanted] for wanted in ("recompute", "offload"))
    words = [f"{' and '.join(again)} recomputed"] if again else []
    if out:
        sent, hidden = sent_bytes(model, light.saved, tokens, link), hidden_bytes(model, tokens, link)
        hides = "all of it hides" if sent <= hidden else f"{hidden / sent:.0%} of it hides"
        words.append(f"{' and '.join(out)} offloaded to the host: {sent / 2**20:,.0f} MiB a block at "
                     f"{link.bytes_per_s / 1e9:.3g} GB/s, {hides} behind the computation")
    return "; ".join(words)
