"""Rules on LoRA adapters and on quantised weights below them."""

from __future__ import annotations

import math

from powertrain.audit.edits import set_to
from powertrain.audit.reckoning import GIB, room
from powertrain.audit.rules.base import Findings, code_rule, found, rule
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject, dtype_named
from powertrain.records.findings import NO_SPEED
from powertrain.shapes import FOUR_BIT_BYTES, FP32, QUANTISED_BLOCK

RANK, ALPHA, DROPOUT, TARGETS = "lora.r", "lora.lora_alpha", "lora.lora_dropout", "lora.target_modules"
OPTIM, DECAY = "training.optim", "training.weight_decay"
BITS = ("quantisation.load_in_4bit", "quantisation.load_in_8bit")
COMPUTE, KIND, DOUBLE = ("quantisation.bnb_4bit_compute_dtype", "quantisation.bnb_4bit_quant_type",
                         "quantisation.bnb_4bit_use_double_quant")
MOMENTS_BYTES = 8            # of AdamW, for each trained weight
LITTLE_DECAY = 0.01          # a usual habit without much effect
LEAST, MOST = 0.5, 8.0       # of alpha / r; 1 to 2 is usual
ALL = {"trl": 'target_modules="all-linear"', "axolotl": "lora_target_linear: true", "llama-factory": "lora_target: all"}
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv",
                       "query", "key", "value", "q", "k", "v", "o"})
SAVED_BYTES = 0.5 + FP32 / QUANTISED_BLOCK - FOUR_BIT_BYTES            # a weight


@rule("technique: paged_adamw, eight_bit_adamw")
def adapters_with_spilled_optimizer(subject: Subject, where: Circumstances) -> Findings:
    """A paged or 8-bit optimizer serves the few weights of adapters."""
    asked = str(subject.value(OPTIM) or "")
    if subject.method in ("lora", "qlora") and ("paged" in asked or "8bit" in asked):
        moments_mib = MOMENTS_BYTES * where.model.trainable / 2**20 if where.model else None
        yield found("low", subject.settings[OPTIM], edits=set_to(subject, OPTIM, "adamw_torch_fused"), asked=asked,
                    moments_mib=moments_mib)


@rule("fact: decay shrinks A and B, and with BA = 0 the model is the one that was there before")
def decay_of_adapters(subject: Subject, where: Circumstances) -> Findings:
    """Weight decay pulls adapters back to having no effect."""
    decay = subject.number(DECAY)
    if DECAY in subject.settings and decay is not None and decay > LITTLE_DECAY and subject.method in ("lora", "qlora"):
        yield found("low", subject.settings[DECAY], edits=set_to(subject, DECAY, 0.0), decay=decay)


@rule("fact: dropout before A gives each adapted layer a second, full-width input to draw, write and keep")
def lora_dropout_cost(subject: Subject, where: Circumstances) -> Findings:
    """Adapters have dropout on their inputs."""
    model, numbers = where.model, None
    if DROPOUT in subject.settings and subject.number(DROPOUT):
        if model is not None:
            inputs = (6 if model.gated_mlp else 5) * model.width + model.mlp_width     # of a block's linear layers
            numbers = (len(model.adapted_layers) or model.layers) * inputs
        yield found("low", subject.settings[DROPOUT], edits=set_to(subject, DROPOUT, 0.0), numbers=numbers)


@rule("documentation: QLoRA (Dettmers et al. 2023, section 4) and TRL's LoRA Without Regret: adapters on all linear layers")
def lora_on_attention_only(subject: Subject, where: Circumstances) -> Findings:
    """Adapters are on attention only, and not on the MLPs."""
    asked = subject.value(TARGETS)
    names = [asked] if isinstance(asked, str) else asked
    if isinstance(names, (list, tuple, set)) and names and {str(name) for name in names} <= ATTENTION:
        yield found("low", subject.settings[TARGETS], edits=set_to(subject, TARGETS, "all-linear"),
                    names=", ".join(map(str, names)), argument=ALL.get(subject.framework, ALL["trl"]))


@rule("documentation: peft LoraConfig (scaling = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora)")
def lora_scaling(subject: Subject, where: Circumstances) -> Findings:
    """The adapters' output is scaled to almost nothing, or to much."""
    if RANK not in subject.settings or (subject.framework not in TRAINERS and ALPHA not in subject.settings):
        return                               # other trainers have defaults of their own
    rank, alpha, rooted = subject.number(RANK), subject.number(ALPHA), subject.is_on("lora.use_rslora")
    scale = alpha / (math.sqrt(rank) if rooted else rank) if rank and alpha is not None else 1.0
    if rank and not LEAST <= scale <= (MOST * 4 if rooted else MOST):
        usual = int(2 * rank)                # QLoRA's own 16 / 64 is below: it works, with its own learning rate
        yield found("low", subject.seen(ALPHA), subject.seen(RANK), edits=set_to(subject, ALPHA, usual), scale=scale,
                    usual=usual, divisor="sqrt(r)" if rooted else "r")


# ------------------------------------------------------------------------------------------------ quantised weights


@code_rule("documentation: transformers' validate_quantization_for_training")
def quantised_without_adapters(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer gets a quantised model without adapters."""
    if subject.framework not in TRAINERS or subject.is_unread(RANK) or subject.is_unread("lora.target_modules"):
        return
    attaches = subject.method in ("lora", "qlora") or script.says("peft", "adapter", "lora", "LoRA", "Lora") or any(
        name.split(".")[0] in ("peft", "unsloth") for name in script.imported.values())
    key = next((key for key in BITS if subject.on(key)), None)
    if key is not None and not attaches:
        yield found("critical", subject.settings[key])


@rule("features: F9; documentation: transformers' validate_quantization_for_training")
def compile_quantised(subject: Subject, where: Circumstances) -> Findings:
    """torch.compile is used on a model with quantised weights."""
    bits = next((subject.settings[key] for key in BITS if subject.is_on(key) and key in subject.settings), None)
    if subject.compiles is not None and bits is not None:
        raises = subject.script is not None and "torch.compile" in subject.script.trained
        yield found("critical" if raises else "moderate", subject.compiles, bits, case="raises" if raises else "",
                    edits=set_to(subject, "training.torch_compile", False))


@rule("technique: four_bit_base; features: X10 (it saves memory and costs speed)", gives_way_to=("quantised_without_adapters",))
def four_bit_needless(subject: Subject, where: Circumstances) -> Findings:
    """Weights are 4-bit where the same weights fit in bf16."""
    space = room(subject, where, four_bits=False)
    if space is not None and subject.is_four_bit and space[0] <= space[1]:
        yield found("moderate", subject.seen(BITS[0]), edits=set_to(subject, BITS[0], False), needed_gib=space[0] / GIB,
                    free_gib=space[1] / GIB)


@rule("documentation: BitsAndBytesConfig (bnb_4bit_compute_dtype is torch.float32 where it is not set)")
def four_bit_compute_type(subject: Subject, where: Circumstances) -> Findings:
    """4-bit weights are multiplied in another type than the rest."""
    rest, own = subject.products_dtype, dtype_named(subject.effective(COMPUTE))
    if subject.is_four_bit and not subject.is_unread(COMPUTE) and rest in ("bf16", "fp16") and own not in (None, rest):
        type_ = "bfloat16" if rest == "bf16" else "float16"
        yield found("moderate", subject.seen(COMPUTE), subject.seen(f"training.{rest}"), edits=set_to(subject, COMPUTE, type_),
                    case="" if own == "fp32" else "half", rest=rest, own=own, type=type_)


@rule("documentation: BitsAndBytesConfig (fp4 where it is not set); Dettmers et al. 2023 (NF4 is the more exact one)")
def four_bit_type(subject: Subject, where: Circumstances) -> Findings:
    """4-bit weights are FP4 instead of NF4."""
    decided = KIND in subject.settings or subject.framework in TRAINERS
    if subject.is_four_bit and subject.effective(KIND) == "fp4" and decided:
        yield found("low", subject.seen(KIND), edits=set_to(subject, KIND, "nf4"))


@rule("technique: four_bit_base; Dettmers et al. 2023 (QLoRA), section 3")
def double_quantisation_off(subject: Subject, where: Circumstances) -> Findings:
    """The scales of 4-bit weights are stored in fp32."""
    if subject.is_four_bit and subject.effective(DOUBLE) is False:
        saved_mib = SAVED_BYTES * where.model.matmul_parameters / 2**20 if where.model else None
        yield found("low", subject.seen(DOUBLE), edits=set_to(subject, DOUBLE, True), block=QUANTISED_BLOCK,
                    bits=SAVED_BYTES * 8, saved_mib=saved_mib, expected=None if where.model else NO_SPEED)
