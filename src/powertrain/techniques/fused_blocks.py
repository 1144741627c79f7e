"""Fused blocks: a block's forward and backward pass written by hand, its elementwise work in a few compiled loops."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.cost.estimate import COMPILER_PARTS
from powertrain.cost.workload import Workload
from powertrain.models.kernels import build
from powertrain.records import Effect, NotApplied, Proposal, Refusal, Why, WrongUse
from powertrain.shapes import EIGHT_BIT
from powertrain.techniques.base import Exactness, PlannedRun, Technique, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.models.decoder import Block, Decoder
    from powertrain.models.kernels.attention import Attention
    from powertrain.models.kernels.block.whole import OneCall
    from powertrain.models.kernels.fused.block import HandWritten
    from powertrain.models.kernels.fused.parts import Parts
    from powertrain.models.model import Rotary
    from powertrain.training.setup import Setup, Trial

# four functions by torch's compiler, nothing cached. On a CPU into libraries, which later runs load: cold starts less warm ones
# of study 2026-11-22_bench-start; on a GPU a guess
COMPILE_S = {"cpu": 35.0, "cuda": 30.0}
CPP_COMPILE_S = {"cpp": 5.0, "one_call": 9.0}            # of our own kernels, once on a machine
GAIN = {"cpu": (0.83, 0.97), "cuda": (0.6, 0.95)}        # on an H100 0.60 of the step without, LoRA on a model of 0.6B
BASIS = {"cpu": "study: 2026-11-21_fused-blocks-docstrings", "cuda": "guess: study 2026-11-25_gpu-h100 has one model"}
DROPPING_GAIN = (0.76, 0.91)
DROPPING_STUDY = "2026-11-21_fused-blocks-char-dropout"          # on a CPU
COMPILED_STUDY = "2026-11-21_fused-or-compiled-default"          # blocks of one length
SMALL_STUDY = "2026-11-21_fused-blocks-char-cpu"
ONE_CALL_GAIN, ONE_CALL_STUDY = (0.81, 0.87), "2026-11-27_one-call-char-cpu"
CALLS_S = 4 * 140e-6         # of a block's pass, in torch's checks before compiled code, as profiled on two cores
LARGEST_CALLS_SHARE = 0.1    # of the time that the block's products take; at 0.25 a small model was slower (SMALL_STUDY)
KERNELS = ("compiled", "cpp", "one_call", "triton")      # no study has chosen the last yet: it is for pins
WIDEST_ROW = 8192            # that Triton's kernels have in registers: at 16,384 they spill, on sm_80 with 8 warps and with 16
PARTS = {"cpp": "RowParts", "triton": "TritonParts"}             # classes of the functions
SOURCES = {"cpp": (build.ROWS,), "one_call": (build.RAGGED, build.BLOCK)}
NOT_BY_HAND = {"magnitude": "DoRA", "log_sigma": "LS-LoRA"}      # adapters, by a weight that only they have


@dataclass(frozen=True)
class ByHand:
    """Runs every block with the passes written by hand."""

    blocks: tuple[HandWritten | OneCall, ...] = field(repr=False)

    def __call__(self, block: Block, index: int, x: Tensor, rotary: Rotary | None, lengths: tuple[int, ...],
                 attention: Attention) -> Tensor:
        return self.blocks[index](x, rotary, lengths, attention)


@dataclass(frozen=True)
class FusedBlocks(Technique):
    """Autograd saves the inputs of every operator and runs operators one by one; a block as one function does neither.

    The function saves only what spares every matrix product, and computes no gradient that nobody needs. The work between two
    products is done at once: norm, positions, activation, residual and their gradients are one loop each over the batch, for
    any number of tokens. On a CPU these loops are a kernel of our own; what it does not have (dropout, a base in 8 bits),
    torch's compiler makes. The products stay the same, in the same precision. Where a model is so small that calls take longer
    than the work, all of a block's pass is one call of our own code, products and attention included.
    """

    kernels: str = "compiled"                # what does the elementwise work: torch's compiler, our own "cpp", or "triton"; or
                                             # all of a block's work is "one_call"
    ahead: bool = False                      # what no library holds yet is compiled into one, for later runs too

    name = "fused_blocks"
    does = "computes each block, forward and backward, with hand-written compiled code"
    needs_whole_weights = True
    decides: ClassVar = {"fused_blocks": True}
    choices: ClassVar = {"kernels": KERNELS}
    native_only = True
    needs_all_trained = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"run_block"})
    acts_on = frozenset({"products", "attention", "elementwise"})
    slots = frozenset({"blocks", "recomputing"})
    source = "regions compiled by Inductor (Ansel et al. 2024, ASPLOS)"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        device, model = run.hardware.device, run.model
        kinds = [kind for name, kind in NOT_BY_HAND.items() if any(shape.endswith(f".{name}") for shape in model.shapes)]
        if kinds:
            return cls.refuse(Why.DOES_NOT_APPLY, f"{kinds[0]} adapters have no hand-written backward pass")
        if model.adapter_dropout:
            return cls.refuse(Why.DOES_NOT_APPLY, f"with adapter dropout ({model.adapter_dropout:g}) adapters read different "
                                                  "inputs, and cannot share products")
        if (refusal := cls._why_not_pinned(run)) is not None:
            return refusal
        drops = device == "cpu" and model.dropout > 0            # whole compiled blocks are slow with dropout
        in_cpp = cls._takes_cpp(run)
        if run.data.kind == "blocks" and not drops and not in_cpp:
            return cls.refuse(Why.NOT_NEEDED, "all passes have the same length; torch_compile was faster for such passes "
                                              f"(study: {COMPILED_STUDY})", cls(), rival="torch_compile")
        small, no_call = cls._too_small(run), cls._why_no_one_call(run)
        if cls.pinned_setting(run, "kernels") == "one_call" and no_call is not None:
            return cls.refuse(Why.DOES_NOT_APPLY, f"a block cannot be one call, because {no_call}; use other kernels",
                              cure=("techniques.fused_blocks.kernels=cpp",))
        if small is not None and no_call is not None:
            return small
        one = run.one_example()
        if not (need := run.need(one)).is_met:
            return cls.refuse(Why.NO_ROOM, f"memory is short: without recomputing activations one example of {one.block:,} "
                              f"tokens needs {need}", cls(), numbers=need.numbers)
        if device not in COMPILER_PARTS:
            return cls.refuse(Why.HARDWARE_LACKS, f"this is not tested on {device!r}")
        if small is not None or cls.pinned_setting(run, "kernels") == "one_call":
            return cls._in_cpp(run, "one_call", Effect(ONE_CALL_GAIN, 0, basis=f"study: {ONE_CALL_STUDY}"))
        gain, basis = (DROPPING_GAIN, f"study: {DROPPING_STUDY}") if drops else (GAIN[device], BASIS[device])
        claim = Effect(gain, 0, basis=basis, guessed=device == "cuda" and not drops)
        if in_cpp:
            return cls._in_cpp(run, "cpp", claim)
        ahead = device == "cpu"
        return cls.if_compiling_pays(run, claim, COMPILE_S[device], COMPILER_PARTS[device], settings=cls(ahead=ahead),
                                     also="; later runs load the compiled code" if ahead else "")

    @classmethod
    def _why_not_pinned(cls, run: PlannedRun) -> Refusal | None:
        """Return why the kernels that the recipe asks for cannot run here, or None."""
        kernels, device = cls.pinned_setting(run, "kernels"), run.hardware.device
        cure = ("techniques.fused_blocks.kernels=compiled",)
        if kernels in SOURCES and device != "cpu":
            return cls.refuse(Why.HARDWARE_LACKS, f"the kernel in C++ is for CPUs, and this run computes on {device!r}; use "
                              "kernels=compiled", cure=cure)
        if kernels != "triton":
            return None
        if device != "cuda":
            return cls.refuse(Why.HARDWARE_LACKS, f"Triton's kernels need a GPU, and this run computes on {device!r}; use "
                              "kernels=compiled", cure=cure)
        if run.model.width > WIDEST_ROW:
            return cls.refuse(Why.DOES_NOT_APPLY, f"Triton's kernels hold a token's {run.model.width:,} numbers in registers, "
                              f"where at most {WIDEST_ROW:,} fit; use kernels=compiled", cure=cure)
        return cls.without_parts(run, ("triton",))

    @classmethod
    def _takes_cpp(cls, run: PlannedRun) -> bool:
        """Return whether our own kernel has all the elementwise work of this run, and no pin asks for another."""
        decided, pinned = run.decided, cls.pinned_setting(run, "kernels")
        return (pinned in (None, *SOURCES) and run.hardware.device == "cpu" and decided.dtype in ("fp32", "bf16")
                and decided.base_dtype not in EIGHT_BIT and not run.model.dropout)

    @classmethod
    def _in_cpp(cls, run: PlannedRun, kernels: str, claim: Effect) -> Proposal | Refusal:
        """Return yes where our own kernel is compiled already, or compiling it pays."""
        if all(map(build.is_built, SOURCES[kernels])):
            return cls(kernels).on("the kernel is compiled already", claim)
        return cls.if_compiling_pays(run, claim, CPP_COMPILE_S[kernels], ("c++ compiler",), settings=cls(kernels),
                                     also="; once on a machine")

    @classmethod
    def _why_no_one_call(cls, run: PlannedRun) -> str | None:
        """Return why a block's work cannot be one call of our own kernel in this run, or None."""
        model, pinned = run.model, cls.pinned_setting(run, "kernels")
        if pinned not in (None, "one_call"):
            return f"the recipe asks for kernels={pinned}"
        if run.decided.kernel != "ragged" or run.decided.dtype not in ("fp32", "bf16"):
            return "attention is not computed by the ragged kernel in fp32 or bf16 (techniques.attention_kernel.kernel=ragged)"
        whys = {"the answers of a pair may share their prompt": run.decided.answers > 1,
                "the model has dropout": model.dropout, "its residual is parallel": model.parallel_residual,
                "it has norms of queries and keys": any("q_norm" in name for name in model.shapes),
                "some of its weights are not trained": model.trainable != model.parameters,
                "its widths are not even": any(size % 2 for size in (model.width, model.mlp_width, model.head_width))}
        return next((why for why, is_so in whys.items() if is_so), None)

    @classmethod
    def _too_small(cls, run: PlannedRun) -> Refusal | None:
        """Return why calling compiled code costs more than it saves; None where it saves more, or nothing is measured."""
        model, peak = run.model, run.hardware.peak_flops_per_s.get(run.decided.dtype)
        if run.hardware.device != "cpu" or not peak:
            return None
        products_s = 6 * model.matmul_parameters / model.layers * run.decided.pass_slots / peak
        if LARGEST_CALLS_SHARE * products_s >= CALLS_S:
            return None
        return cls.refuse(Why.WOULD_NOT_PAY, f"the model is too small: a block's products take {1e3 * products_s:.1f} ms a "
                          f"pass, and calling compiled code would add {CALLS_S / products_s:.0%} to that (study: "
                          f"{SMALL_STUDY})", cls("cpp") if cls._takes_cpp(run) else cls(),
                          numbers={"products_s": products_s, "calls_s": CALLS_S})

    def reckon(self, workload: Workload) -> Workload:
        in_place = self.kernels != "compiled" or workload.device == "cuda"
        return replace(super().reckon(workload), one_call=self.kernels == "one_call", adds_in_place=in_place)

    def compiles(self) -> bool:
        return True

    def build(self) -> None:
        sources = SOURCES.get(self.kernels, ())
        if self.kernels == "one_call":       # the model is so small that no compiled code pays
            self.build_kernels(sources, "its kernel", "techniques.fused_blocks=off trains without it", None)
        else:
            self.build_kernels(sources, "its kernel", "techniques.fused_blocks.kernels=compiled takes torch's compiler",
                               replace(self, kernels="compiled", ahead=True))

    def apply(self, setup: Setup) -> Setup:
        self.build()
        from powertrain.models.decoder import Block, Decoder
        from powertrain.models.kernels.fused.block import Functions, HandWritten
        from powertrain.models.kernels.fused.compiled import CompiledPart, StoredPart
        from powertrain.models.kernels.fused.parts import Parts
        from powertrain.models.kernels.rows.parts import RowParts

        assert isinstance(setup.model, Decoder)
        if self.kernels == "one_call":
            return replace(setup, run_block=ByHand(_in_one_call(setup.model)))
        if self.kernels == "compiled":
            change = CompiledPart if setup.code is None or setup.device.type != "cpu" else \
                partial(StoredPart, folder=setup.code)
            functions = Functions.of(Parts(setup.model.config), change)
        else:
            functions = Functions.of((RowParts if self.kernels == "cpp" else _triton_parts())(setup.model.config))
        blocks = [block for block in setup.model.blocks if isinstance(block, Block)]
        return replace(setup, run_block=ByHand(tuple(HandWritten(block, functions) for block in blocks)))

    def confirm(self, setup: Setup) -> None:
        """Look at a pass of few tokens: each block that trains must be recorded as one function."""
        found = setup.run_block
        while not isinstance(found, ByHand) and hasattr(found, "inner"):
            if getattr(found, "recomputes", False):
                raise NotApplied("fused_blocks: activation_checkpointing recomputes nothing in fused blocks; switch one off")
            found = found.inner
        if not isinstance(found, ByHand):
            raise NotApplied(f"fused_blocks: blocks are run by {name_of(setup.run_block)}")
        functions = getattr(found.blocks[0], "functions", None)              # one call has none
        trial = self._settled(setup, functions) if self.kernels == "compiled" else setup.trial
        recorded = trial.nodes["_OneCallBackward" if self.kernels == "one_call" else "_BlockBackward"]
        training = [block for block in found.blocks if block.trained]
        if recorded < len(training):
            raise NotApplied(f"fused_blocks: {recorded} of {len(training)} blocks that train are recorded as one function")
        if functions is None:
            return
        parts = (functions.leave, functions.leave_back)
        if self.kernels != "compiled":
            if any(type(getattr(part, "__self__", None)).__name__ != PARTS[self.kernels] for part in parts):
                raise NotApplied(f"fused_blocks: the elementwise work is done by {name_of(parts[0])}, not by {self.kernels}")
        elif not all(getattr(part, "is_compiled", False) for part in parts):
            raise NotApplied("fused_blocks: nothing was compiled; torch fell back to running the parts as they are")

    def _settled(self, setup: Setup, functions: Any) -> Trial:
        """Return what a pass of few tokens shows once `functions` are compiled, which the first such pass begins."""
        from powertrain.models.decoder import Decoder
        from powertrain.models.kernels.fused.compiled import settle, tokens_to_divide

        assert isinstance(setup.model, Decoder)
        few = setup.few_tokens(tokens_to_divide(setup.model.config.width))
        trial = setup.try_pass(few)
        return setup.try_pass(few) if settle(vars(functions).values(), ahead=self.ahead) else trial


def _triton_parts() -> type[Parts]:
    try:
        from powertrain.models.kernels.fused.triton_kernels import TritonParts
    except ImportError as error:
        raise NotApplied(f"fused_blocks: Triton's kernels cannot be loaded ({error}); use kernels=compiled") from error
    return TritonParts


def _in_one_call(model: Decoder) -> tuple[OneCall, ...]:
    from powertrain.models.kernels.block.whole import OneCall

    try:
        return tuple(OneCall(block) for block in model.blocks)  # type: ignore[arg-type]
    except WrongUse as error:
        raise NotApplied(f"fused_blocks: {error}; use techniques.fused_blocks.kernels=cpp") from error
