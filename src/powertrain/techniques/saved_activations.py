"""Saved activations: what a hand-written block keeps for its backward pass, planned tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from powertrain.cost.fitting import longest_example, planned_room_bytes
from powertrain.cost.memory import peak_memory
from powertrain.cost.precision import planned_dtype
from powertrain.cost.saving import Link, added_s, hidden_bytes, lightest_that_fits, link_of, sent_bytes
from powertrain.cost.traffic import made_again_flops
from powertrain.cost.work import training_flops
from powertrain.cost.workload import Workload
from powertrain.models.kernels.fused.saving import KINDS, RECOMPUTABLE, Host, PlainHost, Saving
from powertrain.records import Effect, Facts, ModelFacts, Proposal, Refusal
from powertrain.techniques.base import Exactness, NotApplied, Technique

if TYPE_CHECKING:
    from powertrain.models.kernels.fused.block import HandWritten
    from powertrain.recipe import Recipe
    from powertrain.training.setup import Setup

ACTIONS = ("keep", "recompute", "offload")


@dataclass(frozen=True)
class SavedActivations(Technique):
    """Each kind of tensor is kept, made again, or waits in the host's memory: the cheapest first, until the step fits.

    What a product gave costs its contraction length to make again, per byte; all of a block's cost the same, so the largest
    goes first, and only in as many blocks as it takes. What attention gave is never made again, and the down projection's
    result is never needed. Beside a GPU, what its copies hide behind the computation waits in the host's memory first, which
    costs nothing; the rest is made again, or waited for, whichever is shorter. The same functions run again on the same
    numbers: in fp32 gradients keep their bits; in bf16 a norm's result is made again from its rounded self.
    """

    inner: str = "recompute"                 # what the MLP's first product gave
    heads: str = "keep"                      # queries, keys and values
    mixed: str = "keep"                      # what attention gave
    normalised: str = "keep"                 # what the two norms gave
    blocks: int = 1_000_000                  # the lowest so many of those that train

    name = "saved_activations"
    does = "plans which activations a hand-written block stores"
    exactness = Exactness.ROUNDING
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "elementwise", "copy"})
    source = "performance.md 3.2; Korthikanti et al. 2022, arXiv:2205.05198 (what to compute again)"

    def __post_init__(self) -> None:
        for kind in KINDS:
            action, known = getattr(self, kind), ACTIONS if kind in RECOMPUTABLE else ("keep", "offload")
            if action not in known:
                raise ValueError(f"techniques.saved_activations.{kind}={action!r} is none of {', '.join(known)}")
        if self.blocks < 1:
            raise ValueError(f"techniques.saved_activations.blocks={self.blocks} must be at least 1")

    @property
    def actions(self) -> Mapping[str, str]:
        """Of the kinds that are not kept."""
        return {kind: action for kind in KINDS if (action := asdict(self)[kind]) != "keep"}

    @classmethod
    def propose(cls, facts: Facts, recipe: Recipe) -> Proposal | Refusal:
        model, hardware, data = facts.model, facts.hardware, facts.data
        if model.provider != "native":
            return cls.refuse(f"the model is computed by {model.provider}, which decides itself what it keeps")
        if recipe.techniques.get("fused_blocks", "off") == "off":
            return cls.refuse("it decides what blocks written by hand keep, and the plan has those only where all they keep "
                              "fits; techniques.fused_blocks=on asks for them")
        room_bytes, tokens = planned_room_bytes(hardware), longest_example(data)
        plain = Workload(data.train_batch_size, tokens, micro_batch=1, attention_saves_scores=False, fused_blocks=True,
                         device=hardware.device)
        needed_bytes = sum(peak_memory(model, plain).values())
        shown = f"one example of {tokens:,} tokens at a time needs {needed_bytes / 2**30:.2f} GiB and " \
                f"{room_bytes / 2**30:.1f} are there"
        if needed_bytes <= room_bytes:
            return cls.refuse(f"{shown}, so nothing has to be made again", possible=cls())
        link = link_of(hardware, planned_dtype(hardware, recipe.techniques))
        if hardware.device == "cuda" and isinstance(link, str):
            shown += f"; nothing may wait on the host, because {link}"
        light = lightest_that_fits(model, plain, room_bytes, link if isinstance(link, Link) else None)
        if light is None:
            return cls.refuse(f"{shown}; not even all that blocks written by hand can do without makes it fit, and "
                              "activation_checkpointing keeps less", possible=cls())
        kept: dict[str, Any] = dict.fromkeys(KINDS, "keep") | dict(light.saved)
        longer = made_again_flops(model, tokens, light.saved, light.saved_blocks) / training_flops(model, [tokens])
        done = f"{' and '.join(light.saved)} of {light.saved_blocks} blocks are enough"
        if isinstance(link, Link):
            longer = (added_s(model, light.saved, tokens, link) * light.saved_blocks * link.flops_per_s
                      / training_flops(model, [tokens]))
            done = f"{_in_words(model, light, tokens, link)}, in {light.saved_blocks} blocks"
        return Proposal(cls(**kept, blocks=light.saved_blocks), because=f"{shown}; {done}",
                        claim=Effect((1.0, 1 + 1.2 * longer), sum(peak_memory(model, light).values()) - needed_bytes,
                                     basis="formula: the products that are made again, and copies that the computation does "
                                           "not hide"))

    def reckon(self, workload: Workload) -> Workload:
        return replace(workload, saved=self.actions, saved_blocks=self.blocks)

    def apply(self, setup: Setup) -> Setup:
        blocks = getattr(setup.run_block, "blocks", None)
        if blocks is None:
            raise NotApplied(f"saved_activations: blocks are run by {setup.run_block!r}, and not by hand; it needs "
                             "techniques.fused_blocks=on")
        saving = self._saving(blocks[0], _host_of(setup))
        training = [index for index, block in enumerate(blocks) if block.weights.trained]
        lowest = min(training, default=0)
        light = tuple(replace(block, saving=saving) if lowest <= index < lowest + self.blocks else block
                      for index, block in enumerate(blocks))
        return replace(setup, run_block=replace(setup.run_block, blocks=light))  # type: ignore[type-var]

    def confirm(self, setup: Setup) -> None:
        """A forward pass of the first micro-batch, in which every light block has to put something away."""
        found: Any = setup.run_block
        while not hasattr(found, "blocks") and hasattr(found, "inner"):
            found = found.inner
        light = [block for block in getattr(found, "blocks", ()) if block.saving is not None]
        if not light or light[0].saving.actions != self.actions:
            raise NotApplied(f"saved_activations: blocks are run by {setup.run_block!r}, which keep all that they need")
        before = light[0].saving.count.put_away
        loss = setup.batch_loss(setup.prepare(0)[0].to(setup.device))
        loss.backward()  # type: ignore[no-untyped-call]
        setup.model.zero_grad(set_to_none=True)
        put_away, kinds = light[0].saving.count.put_away - before, len(self.actions)
        if put_away < len(light) * kinds:
            raise NotApplied(f"saved_activations: {put_away} tensors of {len(light)} blocks were put away, and it should be "
                             f"{kinds} kinds in each")

    def _saving(self, block: HandWritten, host: Host) -> Saving:
        """One for all blocks; its functions are compiled if the blocks' own are."""
        from powertrain.models.kernels.fused.compiled import CompiledPart
        from powertrain.models.kernels.fused.parts import Parts

        is_compiled = isinstance(block.functions.leave, CompiledPart)
        change: Callable[[Any], Any] = CompiledPart if is_compiled else lambda function: function
        return Saving.of(self.actions, host, Parts(block.weights.block.config), change)


def _in_words(model: ModelFacts, light: Workload, tokens: int, link: Link) -> str:
    """What is done with which kinds, and why it pays."""
    again, out = ([kind for kind, action in light.saved.items() if action == wanted] for wanted in ("recompute", "offload"))
    words = [f"{' and '.join(again)} made again"] if again else []
    if out:
        sent, hidden = sent_bytes(model, light.saved, tokens, link), hidden_bytes(model, tokens, link)
        hides = "all of it hides" if sent <= hidden else f"{hidden / sent:.0%} of it hides"
        words.append(f"{' and '.join(out)} wait on the host: {sent / 2**20:,.0f} MiB a block at "
                     f"{link.bytes_per_s / 1e9:.3g} GB/s, {hides} behind the block's computation")
    return "; ".join(words)


def _host_of(setup: Setup) -> Host:
    if setup.device.type != "cuda":
        return PlainHost()
    from powertrain.models.kernels.fused.saving import PinnedHost

    return PinnedHost(setup.device)
