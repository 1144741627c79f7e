"""Rules on LoRA adapters and on quantised weights below them."""

from __future__ import annotations

import math

from powertrain.audit.editing import set_to
from powertrain.audit.reckoning import GIB, room
from powertrain.audit.resolved import (
    TRAINERS,
    dtype_named,
    is_four_bit,
    is_on,
    is_unread,
    method,
    number,
    products_dtype,
    seen,
    value,
)
from powertrain.audit.rules.base import STARTS, Findings, found, of_script
from powertrain.audit.script import Script
from powertrain.audit.subject import Circumstances, Subject
from powertrain.records.findings import NO_SPEED, UNMEASURED, Expected, rule
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
    if method(subject) in ("lora", "qlora") and ("paged" in asked or "8bit" in asked):
        here = f": {MOMENTS_BYTES * where.model.trainable / 2**20:.0f} MiB here" if where.model else ""
        yield found("low", f"Adapters have few weights, so AdamW's moments are small{here}. {asked} saves a part of that and "
                    "updates through another library's kernels", subject.settings[OPTIM], expected=UNMEASURED,
                    cure="Use adamw_torch_fused", edits=set_to(subject, OPTIM, "adamw_torch_fused"),
                    words=("techniques.fused_adamw=on",))


@rule("fact: decay shrinks A and B, and with BA = 0 the model is the one that was there before")
def decay_of_adapters(subject: Subject, where: Circumstances) -> Findings:
    """Weight decay pulls adapters back to having no effect."""
    decay = number(subject, DECAY)
    if DECAY in subject.settings and decay is not None and decay > LITTLE_DECAY and method(subject) in ("lora", "qlora"):
        yield found("low", f"weight_decay={decay:g} pulls A and B to zero: not to smaller weights of the model, but back to "
                    "the model as it was", subject.settings[DECAY], cure="Leave it at 0 for adapters",
                    edits=set_to(subject, DECAY, 0.0), words=("weight_decay=0",))


@rule("fact: dropout before A gives each adapted layer a second, full-width input to draw, write and keep")
def lora_dropout_cost(subject: Subject, where: Circumstances) -> Findings:
    """Adapters have dropout on their inputs."""
    model, here = where.model, ""
    if DROPOUT not in subject.settings or not number(subject, DROPOUT):
        return
    if model is not None:
        layers = len(model.adapted_layers) or model.layers
        inputs = (6 if model.gated_mlp else 5) * model.width + model.mlp_width     # of a block's linear layers
        here = f", about {layers * inputs:,} random numbers a token with adapters on all linear layers"
    yield found("low",
                f"Each adapted layer draws a mask as wide as its input{here}, and fused kernels for adapters have no dropout",
                subject.settings[DROPOUT], expected=UNMEASURED, accuracy="low",
                cure="Remove it unless the run repeats little data many times", edits=set_to(subject, DROPOUT, 0.0),
                words=("lora.dropout=0",))


@rule("documentation: QLoRA (Dettmers et al. 2023, section 4) and TRL's LoRA Without Regret: adapters on all linear layers")
def lora_on_attention_only(subject: Subject, where: Circumstances) -> Findings:
    """Adapters are on attention only, and not on the MLPs."""
    asked = subject.value(TARGETS)
    names = [asked] if isinstance(asked, str) else asked
    if isinstance(names, (list, tuple, set)) and names and {str(name) for name in names} <= ATTENTION:
        yield found("low", f"Adapters are on {', '.join(map(str, names))}. The MLPs, with most of the weights, are not "
                    "adapted, and a higher rank does not make up for that. On all linear layers adapters learn like full "
                    "tuning, with more matrix products", subject.settings[TARGETS],
                    cure=f"Use {ALL.get(subject.framework, ALL['trl'])}", edits=set_to(subject, TARGETS, "all-linear"),
                    words=("lora.target_modules=all-linear",))


@rule("documentation: peft LoraConfig (scaling = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora)")
def lora_scaling(subject: Subject, where: Circumstances) -> Findings:
    """The adapters' output is scaled to almost nothing, or to much."""
    if RANK not in subject.settings or (subject.framework not in TRAINERS and ALPHA not in subject.settings):
        return                               # other trainers have defaults of their own
    rank, alpha, rooted = number(subject, RANK), number(subject, ALPHA), is_on(subject, "lora.use_rslora")
    scale = alpha / (math.sqrt(rank) if rooted else rank) if rank and alpha is not None else 1.0
    if rank and not LEAST <= scale <= (MOST * 4 if rooted else MOST):
        usual = int(2 * rank)                # QLoRA's own 16 / 64 is below: it works, with its own learning rate
        yield found("low", f"Their scale, alpha / {'sqrt(r)' if rooted else 'r'}, is {scale:.2g}, where 1 to 2 is usual. It "
                    "multiplies the adapters' output and gradients, like another learning rate", seen(subject, ALPHA),
                    seen(subject, RANK), accuracy="medium", cure=f"Set lora_alpha={usual}", edits=set_to(subject, ALPHA, usual),
                    words=(f"lora.alpha={usual}",))


# ------------------------------------------------------------------------------------------------ quantised weights


@rule("documentation: transformers' validate_quantization_for_training")
@of_script
def quantised_without_adapters(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer gets a quantised model without adapters."""
    if subject.framework not in TRAINERS or is_unread(subject, RANK) or is_unread(subject,
                                                                                                    "lora.target_modules"):
        return
    attaches = method(subject) in ("lora", "qlora") or script.says("peft", "adapter", "lora", "LoRA", "Lora") or any(
        name.split(".")[0] in ("peft", "unsloth") for name in script.imported.values())
    key = next((key for key in BITS if subject.on(key)), None)
    if key is not None and not attaches:
        yield found("critical", "Quantised weights cannot be trained: Trainer raises \"You cannot perform fine-tuning on "
                    "purely quantized models. Please attach trainable adapters\"", subject.settings[key], expected=STARTS,
                    cure="Add adapters to the model (peft's LoraConfig), or load it unquantised", words=("method=qlora",))


@rule("features: F9; documentation: transformers' validate_quantization_for_training")
def compile_quantised(subject: Subject, where: Circumstances) -> Findings:
    """torch.compile is used on a model with quantised weights."""
    asked = next((subject.settings[key] for key in ("training.torch_compile", "training.torch_compile_mode",
                                                    "training.torch_compile_backend")
                  if subject.on(key)), None)
    bits = next((subject.settings[key] for key in BITS if is_on(subject, key) and key in subject.settings), None)
    if asked is None or bits is None:
        return
    raises = subject.script is not None and "torch.compile" in subject.script.trained
    yield found("critical" if raises else "moderate", "Trainer raises \"You cannot fine-tune quantized model with "
                "torch.compile()\" for a compiled model" if raises else "The graph breaks at every quantised matrix, and "
                "little is left to fuse; a Trainer refuses a quantised model that was compiled before", asked, bits,
                expected=UNMEASURED, cure="Use one of the two: compile the model unquantised if it fits, else do not compile",
                edits=set_to(subject, "training.torch_compile", False), words=("techniques.torch_compile=off",))


@rule("technique: four_bit_base; features: X10 (it saves memory and costs speed)", gives_way_to=("quantised_without_adapters",))
def four_bit_needless(subject: Subject, where: Circumstances) -> Findings:
    """Weights are 4-bit where the same weights fit in bf16."""
    space = room(subject, where, four_bits=False)
    if space is not None and is_four_bit(subject) and space[0] <= space[1]:
        needed, there = space
        yield found("moderate", f"In bf16 a step needs about {needed / GIB:.1f} GiB, and {there / GIB:.1f} GiB are free: 4 "
                    "bits round the weights and convert each matrix before each product, for no gain", seen(subject, BITS[0]),
                    expected=Expected("faster, by how much is not measured here; no rounding of the base", "none"),
                    breaking="low", cure="Load the model in bf16 and train adapters on that",
                    edits=set_to(subject, BITS[0], False), words=("method=lora",))


@rule("documentation: BitsAndBytesConfig (bnb_4bit_compute_dtype is torch.float32 where it is not set)")
def four_bit_compute_type(subject: Subject, where: Circumstances) -> Findings:
    """4-bit weights are multiplied in another type than the rest."""
    rest, widened = products_dtype(subject), dtype_named(value(subject, COMPUTE))
    if not is_four_bit(subject) or is_unread(subject, COMPUTE) or rest not in ("bf16", "fp16") or widened in (None, rest):
        return
    why = f"Frozen matrices are converted to fp32 and multiplied in fp32, while the rest is computed in {rest}"
    if widened != "fp32":
        why = (f"Frozen matrices are multiplied in {widened} and the rest in {rest}: each layer converts twice, and values "
               f"that {widened} cannot hold are lost")
    type_ = "bfloat16" if rest == "bf16" else "float16"
    yield found("moderate", why, seen(subject, COMPUTE), seen(subject, f"training.{rest}"),
                expected=Expected(f"products in {rest}", "none"), accuracy="low", cure="Set bnb_4bit_compute_dtype to "
                f"{type_}", edits=set_to(subject, COMPUTE, type_), words=("method=qlora",),
                title=f"4-bit weights are multiplied in {widened}")


@rule("documentation: BitsAndBytesConfig (fp4 where it is not set); Dettmers et al. 2023 (NF4 is the more exact one)")
def four_bit_type(subject: Subject, where: Circumstances) -> Findings:
    """4-bit weights are FP4 instead of NF4."""
    if is_four_bit(subject) and value(subject, KIND) == "fp4" and (KIND in subject.settings or subject.framework in TRAINERS):
        yield found("low", "Weights are spread like a normal distribution, and NF4's 16 values fit that better than FP4's: "
                    "the same memory, a more exact model", seen(subject, KIND), accuracy="low",
                    cure="Set bnb_4bit_quant_type=\"nf4\"", edits=set_to(subject, KIND, "nf4"),
                    words=("quantisation.type=nf4",))


@rule("technique: four_bit_base; Dettmers et al. 2023 (QLoRA), section 3")
def double_quantisation_off(subject: Subject, where: Circumstances) -> Findings:
    """The scales of 4-bit weights are stored in fp32."""
    if not is_four_bit(subject) or value(subject, DOUBLE) is not False:
        return
    saved = f": {SAVED_BYTES * where.model.matmul_parameters / 2**20:.0f} MiB here" if where.model else ""
    expected = Expected(f"{SAVED_BYTES * 8:.2f} bits a weight less{saved}", "formula: a scale of 8 bits instead of 32 "
                        f"for each {QUANTISED_BLOCK} weights") if where.model else NO_SPEED
    yield found("low", f"Each {QUANTISED_BLOCK} weights have a scale in fp32. Quantised scales take {SAVED_BYTES * 8:.2f} "
                f"bits a weight less{saved}", seen(subject, DOUBLE), expected=expected,
                cure="Set bnb_4bit_use_double_quant=True if memory is short", edits=set_to(subject, DOUBLE, True),
                words=("quantisation.double=true",))
