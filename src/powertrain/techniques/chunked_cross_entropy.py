"""Chunked cross-entropy: the logits of a few thousand rows at a time, never those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from powertrain.models.kernels import build
from powertrain.records import IGNORE, Effect, NotApplied, Proposal, Refusal, Why
from powertrain.shapes import DTYPE_BYTES
from powertrain.techniques.base import Exactness, PlannedRun, Setup, Technique, name_of
from powertrain.training.objectives import objective_of

if TYPE_CHECKING:
    from torch import Tensor

    from powertrain.cost.workload import Workload
    from powertrain.models.kernels.losses import RowsLoss, Terms
    from powertrain.models.model import Model

LOGIT_COPIES_BYTES = 12      # per logit, plain under autocast: compute type, fp32 copy, and the gradient of it
WORTH_BYTES = 64 << 20       # below this the logits are small beside everything else
WORTH_SHARE = 0.02           # of a pass's products: what skipping rows without a target has to save
CPU_STUDY = "2026-11-21_ablation-docstrings"     # 0.90 to 0.97 of the step time, where 82 % of the tokens train nothing
CPU_LOGITS = 1 << 22         # per chunk: 16 MiB in fp32, large enough for a full-speed product
GPU_LOGITS = 1 << 26         # per chunk: a GPU needs a thousand rows or so to read the head's matrix seldom enough
IN_PLACE_LOGITS = 1 << 28    # per chunk, where the gradient takes the place of the logits: no copies
KERNELS = ("torch", "triton", "cpp")
DEVICES = {"triton": "cuda", "cpp": "cpu"}   # kernel -> the device that it is for
PARTS = {"triton": "triton", "cpp": "c++ compiler"}      # that compiles it
OWN_GAIN = {"triton": (0.7, 0.95), "cpp": (0.97, 0.99)}  # of the step by torch's operators
OWN_BASIS = {"triton": "guess: not measured yet", "cpp": "study: 2026-11-27_loss-kernel-lora"}
CPP_COMPILE_S = 5.0                          # once on a machine
CPP_DTYPES = ("fp32", "bf16")
CONFIRMED = 10_007           # logits of a row: more than the kernel has at a time, and no multiple of that
TOLERANCE = 2 ** -7          # of bf16, which the gradient is rounded to


@dataclass(frozen=True)
class ChunkedCrossEntropy(Technique):
    """Rows without a target skip the head. Each chunk's gradient is computed while its logits are in memory.

    The gradient of cross-entropy is softmax - onehot, which the logits give at once. So the forward pass computes the gradients
    of the hidden rows and of the head, and keeps those instead of the logits: rows x width instead of rows x vocabulary.
    A frozen head gets no gradient. The products are the same, summed over chunks in fp32. Our own kernels, in Triton and C++,
    read a chunk's logits two or three times and write the gradient over them; torch's operators go over them eight times.
    """

    rows: int = 1024
    kernels: str = "torch"                   # what computes a chunk's loss and gradient from its logits

    name = "chunked_cross_entropy"
    does = "computes the loss in chunks of rows"
    decides_by: ClassVar = {"loss_chunk_rows": "rows"}
    choices: ClassVar = {"kernels": KERNELS}
    native_only = True
    exactness = Exactness.ROUNDING
    touches = frozenset({"loss"})
    acts_on = frozenset({"loss"})
    slots = frozenset({"loss"})
    source = "Liger kernel's fused linear cross-entropy (Hsu et al. 2024, arXiv:2410.10989); here in plain torch"

    @classmethod
    def propose(cls, run: PlannedRun) -> Proposal | Refusal:
        model, data = run.model, run.data
        if not (objective := objective_of(run.recipe)).uses_loss:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the objective {objective.name} computes no cross-entropy")
        tokens = data.train_batch_size * data.block
        whole_bytes = tokens * model.vocabulary * LOGIT_COPIES_BYTES
        kernels = cls.pinned_setting(run, "kernels")
        if kernels is not None and (refusal := cls._without(kernels, run)) is not None:
            return refusal
        kernels = kernels or next(name for name in ("triton", "cpp", "torch") if cls._is_worth(name, run))
        in_place, on_cpu = kernels != "torch", run.hardware.device == "cpu"
        rows = max(64, (CPU_LOGITS if on_cpu else IN_PLACE_LOGITS if in_place else GPU_LOGITS) // model.vocabulary)
        found = cls(rows, kernels)
        shown = f"the logits of a batch take {whole_bytes / 2**20:,.0f} MiB ({tokens:,} tokens x {model.vocabulary:,})"
        skipped = (1 - data.trained_share) * model.head_parameters / (model.matmul_parameters + model.head_parameters)
        if data.trained_share < 1:
            shown += f", and skipping the {1 - data.trained_share:.0%} without a target saves {skipped:.0%} of the products"
        numbers = {"logits_bytes": whole_bytes, "skipped_share": skipped}
        if whole_bytes < WORTH_BYTES and skipped < WORTH_SHARE:
            return cls.refuse(Why.WOULD_NOT_PAY, f"{shown}; chunks pay off only above {WORTH_BYTES >> 20} MiB of logits, or "
                              f"where skipped rows save {WORTH_SHARE:.0%} of the products", found, numbers=numbers)
        each = DTYPE_BYTES[run.decided.dtype] if in_place else LOGIT_COPIES_BYTES
        chunk_bytes = min(rows, tokens) * model.vocabulary * each
        basis = "guess: memory by formula, time not measured yet" if not skipped else \
            "guess: a formula for the rows without a target, the rest not measured yet"
        low, high = 0.9 * (1 - skipped), 1.02 * (1 - skipped / 2)
        studied = bool(skipped) and on_cpu
        if studied:
            high = 1.02 * (1 - skipped / 3)
            basis = f"formula: rows without a target; the high end by study {CPU_STUDY}"
        by = ""
        if in_place:
            (least, most), basis = OWN_GAIN[kernels], f"{basis}; the kernel: {OWN_BASIS[kernels]}"
            low, high, by = low * least, high * most, f", in one kernel ({kernels}) that writes the gradient over them"
        return found.on(f"{shown}; {rows:,} rows at a time take {chunk_bytes / 2**20:,.0f} MiB{by}",
                            Effect((low, high), chunk_bytes - whole_bytes, basis=basis, guessed=not studied), numbers=numbers)

    @classmethod
    def _without(cls, kernels: str, run: PlannedRun) -> Refusal | None:
        """Return why these kernels cannot run here, or None."""
        if kernels == "torch":
            return None
        device, dtype, cure = run.hardware.device, run.decided.dtype, (f"techniques.{cls.name}.kernels=torch",)
        if device != DEVICES[kernels]:
            return cls.refuse(Why.HARDWARE_LACKS, f"the kernel {kernels} is for {DEVICES[kernels]!r}, and this run computes on "
                              f"{device!r}; use kernels=torch", cure=cure)
        if kernels == "cpp" and dtype not in CPP_DTYPES:
            return cls.refuse(Why.DOES_NOT_APPLY, f"the kernel cpp is for {' and '.join(CPP_DTYPES)}, not for {dtype}; use "
                              "kernels=torch", cure=cure)
        if PARTS[kernels] in run.software.missing:
            return cls.refuse(Why.PART_MISSING, f"the kernel {kernels} needs what is missing here, {PARTS[kernels]}; use "
                              "kernels=torch", part=PARTS[kernels], cure=cure)
        return None

    @classmethod
    def _is_worth(cls, kernels: str, run: PlannedRun) -> bool:
        """Return whether these kernels can run here, and are compiled soon enough to pay."""
        if cls._without(kernels, run) is not None:
            return False
        return kernels != "cpp" or build.is_built(build.ROWS) or run.bargain(OWN_GAIN[kernels], CPP_COMPILE_S)[0]

    @classmethod
    def variants(cls, run: PlannedRun) -> Sequence[Technique | None]:
        if (found := cls.settings_of(cls.answer(run))) is None:
            return ()
        tokens = run.data.train_batch_size * run.data.block      # more rows than that are all at once
        others = (replace(found, rows=rows) for rows in (found.rows // 4, 4 * found.rows) if 0 < rows < tokens)
        return None, found, *others, *([replace(found, kernels="torch")] if found.kernels != "torch" else [])

    def compiles(self) -> bool:
        return self.kernels == "cpp"

    def build(self) -> None:
        if self.compiles():
            self.build_kernels((build.ROWS,), "its kernel", "techniques.chunked_cross_entropy.kernels=torch needs none",
                               replace(self, kernels="torch"))

    def apply(self, setup: Setup) -> Setup:
        self.build()
        return replace(setup, loss=self.loss)

    def confirm(self, setup: Setup) -> None:
        if not setup.objective.uses_loss:
            raise NotApplied(f"chunked_cross_entropy: the objective {setup.objective.name} computes a loss of its own")
        if getattr(setup.loss, "__self__", None) != self:
            raise NotApplied(f"chunked_cross_entropy: the loss is computed by {name_of(setup.loss)}")
        if self.kernels != "torch":
            self._confirm_kernel(setup)

    def _confirm_kernel(self, setup: Setup) -> None:
        """Compare our own kernel with torch's operators, for some rows of random logits."""
        import torch

        from powertrain.models.kernels.losses import plain_rows

        draw = torch.Generator().manual_seed(0)
        targets = torch.tensor([0, IGNORE, CONFIRMED - 1, 7]).to(setup.device)
        logits = (4 * torch.randn(4, CONFIRMED, generator=draw)).to(setup.device, setup.precision.compute_dtype)
        expected = plain_rows(logits.clone(), targets, None, gradient=True, every=False)
        found = self._rows_loss()(logits.clone(), targets, None, gradient=True, every=False)
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            apart = float((one.float() - other.float()).abs().max())
            if not apart <= TOLERANCE * float(other.float().abs().max()):
                raise NotApplied(f"chunked_cross_entropy: the kernel {self.kernels} is {apart:.1e} from torch's operators; set "
                                 "techniques.chunked_cross_entropy.kernels=torch, and report this")

    def _rows_loss(self) -> RowsLoss:
        if self.kernels == "torch":
            from powertrain.models.kernels.losses import plain_rows

            return plain_rows
        if self.kernels == "cpp":
            from powertrain.models.kernels.rows.losses import cpp_rows

            return cpp_rows
        try:
            from powertrain.models.kernels.triton_losses import triton_rows
        except ImportError as error:
            raise NotApplied(f"chunked_cross_entropy: Triton's kernel cannot be loaded ({error}); use kernels=torch") from error
        return triton_rows

    def reckon(self, workload: Workload) -> Workload:
        return replace(super().reckon(workload), loss_in_place=self.kernels != "torch")

    def loss(self, model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None,
             terms: Terms | None = None) -> Tensor:
        """Return the loss of the rows that have a target. See losses.Loss."""
        from powertrain.models.kernels.losses import chunked_loss, trained_places

        return chunked_loss(model, hidden, targets, self.rows, trained_places(targets, trained), terms, self._rows_loss())

    def scores(self, model: Model, hidden: Tensor, targets: Tensor, trained: int) -> Tensor:
        """Return the log-probabilities of the targets. See losses.Scores."""
        from powertrain.models.kernels.losses import chunked_scores, trained_places

        return chunked_scores(model, hidden, targets, self.rows, trained_places(targets, trained), self._rows_loss())

    def loss_of_all(self, model: Model, hidden: Tensor, targets: Tensor, trained: int | None = None,
                    terms: Terms | None = None) -> Tensor:
        """Return the same loss with every row sent to the head, so that no shape depends on the targets."""
        from powertrain.models.kernels.losses import chunked_loss

        return chunked_loss(model, hidden, targets, self.rows, None, terms, self._rows_loss())
