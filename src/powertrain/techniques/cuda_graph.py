"""CUDA graph: forward and backward pass recorded once at a constant shape, then replayed with one call."""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from powertrain.cost.fitting import longest_example, wanted_tokens
from powertrain.records import Effect, ModelFacts, NotApplied, Proposal, Refusal, Why
from powertrain.records.sizes import digits
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique, name_of
from powertrain.training.objectives import objective_of

LOOKED_AT = 4                # steps whose passes the constant shape is taken from
STUDY = "2026-11-25_gpu-h100"
GAIN = (0.13, 0.5)           # a small model's step, over that without; the high end is a guess for larger ones
LAUNCHES_S = 1.5e-3          # of Python for a block, forward and backward, operators one by one, as that study's steps took
REACHED = 0.5                # guess: of the GPU's peak, by products
TOLERANCE = 1e-2             # of gradients, relative: bf16 attention sums them in another order each time


@dataclass(frozen=True)
class CudaGraph(Technique):
    """With a small model the GPU waits for Python between kernels; a replayed pass is one call for all kernels.

    The same kernels run on the same numbers. Each pass gets one shape: documents end to end, filled up to the same number of
    tokens. The ends of documents and the rows with a target are tensors of a constant size, prepared on the host. A pass that
    does not fit the shape runs without the graph, and is counted.
    """

    name = "cuda_graph"
    does = "records forward and backward once and replays them"
    decides: ClassVar = {"replayed": True}
    native_only = True
    needs_all_trained = True
    asked_first = True                       # packing makes passes of one size for it
    exactness = Exactness.ROUNDING
    touches = frozenset({"lay_out", "run_pass"})
    source = "CUDA programming guide, graphs; torch.cuda.graph"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        hardware, model, data = run.hardware, run.model, run.data
        if hardware.device != "cuda":
            return cls.refuse(Why.HARDWARE_LACKS, f"this needs a CUDA GPU, and the run computes on {hardware.device!r}")
        if (objective := objective_of(run.recipe)).is_random:
            return cls.refuse(Why.CONFLICT, f"the objective {objective.name} is random here, so a replayed pass cannot be "
                                            "compared with an eager one; use objective.embedding_noise=0")
        if objective.rows != "answers":
            return cls.refuse(Why.DOES_NOT_APPLY, f"the objective {objective.name} compares documents, of which each pass has "
                                                  "another number")
        if (reason := _cannot_be_recorded(model)) is not None:
            return cls.refuse(Why.DOES_NOT_APPLY, reason)
        if not data.of_one_length:
            return cls.refuse(Why.NOT_MEASURED, f"documents of {data.block} tokens on average and {longest_example(data):,} at "
                              "most, in passes filled up to one size, can be recorded, but no study has measured yet what "
                              "that saves", cls())
        if hardware.processes > 1:
            return cls.refuse(Why.NOT_MEASURED, f"passes of {data.block}-token blocks can be recorded, but no study has "
                              "measured yet what that saves where several processes share a step", cls())
        return cls._where_launches_take_longer(run)

    @classmethod
    def _where_launches_take_longer(cls, run: PlannedRun) -> Proposal | Refusal:
        """Propose it where Python takes longer to start a pass's kernels than the GPU takes for its products."""
        model, peaks = run.model, run.hardware.peak_flops_per_s
        if not peaks:
            return cls.refuse(Why.NOT_MEASURED, "the speed of this GPU is not known, nor whether it waits for Python", cls())
        tokens = min(run.decided.tokens, wanted_tokens(run.hardware))
        products_s = 6 * (model.matmul_parameters + model.head_parameters) * tokens / (REACHED * max(peaks.values()))
        launches_s = LAUNCHES_S * model.layers
        shown = f"for a pass of {tokens:,} tokens Python takes about {digits(1e3 * launches_s)} ms to start the kernels, and " \
                f"the GPU about {digits(1e3 * products_s)} ms for the products"
        numbers = {"launches_s": launches_s, "products_s": products_s}
        if products_s > launches_s / 2:
            return cls.refuse(Why.WOULD_NOT_PAY, shown, cls(), numbers=numbers)
        return cls().on(shown, Effect(GAIN, 0, basis=f"guess: study {STUDY} has one small model's low end", guessed=True),
                        numbers)

    def unmet(self, run: PlannedRun) -> Refusal | None:
        """Return why passes of examples that differ in length have no constant shape here, or None."""
        if run.data.kind == "blocks":
            return None
        decided = run.decided
        if not decided.packs:
            return self.refuse(Why.CONFLICT, "examples are padded, so passes may differ in shape; this needs packing",
                               rival="packing", cure=("techniques.packing=on",))
        if decided.kernel != "varlen" and not run.data.of_one_length:
            return self.refuse(Why.CONFLICT, "examples differ in length, and attention runs in the kernel "
                               f"{decided.attention_kernel} (products in {decided.dtype}); this needs varlen, which reads the "
                               "lengths on the device",
                               rival="attention_kernel", cure=("techniques.attention_kernel.kernel=varlen",))
        return None

    def apply(self, setup: Setup) -> Setup:
        from powertrain.models.decoder import Decoder
        from powertrain.training.replayed_passes import ReplayedPass, lay_out, shape_of

        context = setup.model.config.context if isinstance(setup.model, Decoder) and \
            setup.model.config.positions == "learned" else None
        shape = shape_of([batch for step in range(LOOKED_AT) for batch in setup.prepare(step)], context)
        return replace(setup, lay_out=partial(lay_out, shape=shape), run_pass=ReplayedPass(shape))

    def confirm(self, setup: Setup) -> None:
        """Record the first pass that fits, replay it twice, and compare gradients and loss with those of the eager pass."""
        from powertrain.models.decoder import Decoder
        from powertrain.training.replayed_passes import ReplayedPass

        found = setup.run_pass
        if not isinstance(found, ReplayedPass):
            raise NotApplied(f"cuda_graph: passes are run by {name_of(found)}")
        if isinstance(setup.model, Decoder) and setup.model.config.positions_change_at is not None:
            raise NotApplied("cuda_graph: with longrope a document's length decides its positions on the host; set it to off")
        passes = [batch for step in range(LOOKED_AT) for batch in setup.prepare(step)]
        fitting = [batch for batch in passes if batch.layout is not None]
        if 2 * len(fitting) < len(passes):
            raise NotApplied(f"cuda_graph: only {len(fitting)} of the first {len(passes)} passes have the shape that is "
                             f"recorded, {found.shape.tokens:,} tokens; set techniques.packing.multiple to its tokens, so that "
                             "all are filled up to one size")
        batch, before = fitting[0].to(setup.device), found.counts["replayed"]
        apart, off = setup.apart(found, found.eager, batch)
        if found.counts["replayed"] != before + 2:
            raise NotApplied("cuda_graph: the pass was not replayed")
        if not (apart <= TOLERANCE and off <= TOLERANCE):
            raise NotApplied(f"cuda_graph: the replayed pass is not the eager one: gradients are {apart:.1e} apart and losses "
                             f"{off:.1e}; set it to off, and report this")


def _cannot_be_recorded(model: ModelFacts) -> str | None:
    """Return what in the model keeps a pass from running the same kernels every time, or from being checked; or None."""
    if model.dropout or model.adapter_dropout:
        return f"dropout ({max(model.dropout, model.adapter_dropout):g}) draws new numbers in each pass, so a replayed pass " \
               "cannot be checked against an eager one"
    if any(name.endswith(".log_sigma") for name in model.shapes):
        return "LS-LoRA adds its penalty once a step, outside of the recorded passes"
    if model.frozen_dtype == "nf4":
        return "bitsandbytes dequantises 4-bit weights on streams that a recording does not see"
    return None
