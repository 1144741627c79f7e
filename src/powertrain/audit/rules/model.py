"""Rules on the model: LoRA adapters, quantised weights below them, attention kernels and torch.compile."""

import math

from powertrain.audit.edits import removed, set_to
from powertrain.audit.installed import in_force
from powertrain.audit.rules.base import Findings, code_rule, found, room, rule
from powertrain.audit.rules.names import of_unsloth
from powertrain.audit.script import Script
from powertrain.audit.subject import TRAINERS, Circumstances, Subject, dtype_named
from powertrain.cost.precision import shown
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
IMPLEMENTATION, MODE = "model.attn_implementation", "training.torch_compile_mode"
NEEDS = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}      # compute capability, from its README
RECOMPILE_LIMIT = 8          # torch._dynamo.config.recompile_limit


@rule
def adapters_with_spilled_optimizer(subject: Subject, where: Circumstances) -> Findings:
    """A paged or 8-bit optimizer serves the few weights of adapters."""
    asked = str(subject.value(OPTIM) or "")
    if subject.method in ("lora", "qlora") and ("paged" in asked or "8bit" in asked):
        moments_mib = MOMENTS_BYTES * where.model.trainable / 2**20 if where.model else None
        yield found("low", OPTIM, edits=set_to(subject, OPTIM, "adamw_torch_fused"), asked=asked, moments_mib=moments_mib)


@rule
def decay_of_adapters(subject: Subject, where: Circumstances) -> Findings:
    """Weight decay pulls adapters back to having no effect."""
    decay = subject.number(DECAY)
    if DECAY in subject.settings and decay is not None and decay > LITTLE_DECAY and subject.method in ("lora", "qlora"):
        yield found("low", DECAY, edits=set_to(subject, DECAY, 0.0), decay=decay)


@rule
def lora_dropout_cost(subject: Subject, where: Circumstances) -> Findings:
    """Adapters have dropout on their inputs."""
    model, numbers = where.model, None
    if DROPOUT in subject.settings and subject.number(DROPOUT):
        if model is not None:
            inputs = (6 if model.gated_mlp else 5) * model.width + model.mlp_width     # of a block's linear layers
            numbers = (len(model.adapted_layers) or model.layers) * inputs
        yield found("low", DROPOUT, edits=set_to(subject, DROPOUT, 0.0), numbers=numbers)


@rule
def lora_on_attention_only(subject: Subject, where: Circumstances) -> Findings:
    """Adapters are on attention only, and not on the MLPs."""
    asked = subject.value(TARGETS)
    names = [asked] if isinstance(asked, str) else asked
    if isinstance(names, (list, tuple, set)) and names and {str(name) for name in names} <= ATTENTION:
        yield found("low", TARGETS, edits=set_to(subject, TARGETS, "all-linear"),
                    names=", ".join(map(str, names)), argument=ALL.get(subject.framework, ALL["trl"]))


@rule
def lora_scaling(subject: Subject, where: Circumstances) -> Findings:
    """The adapters' output is scaled to almost nothing, or to much."""
    if RANK not in subject.settings or (subject.framework not in TRAINERS and ALPHA not in subject.settings):
        return                               # other trainers have defaults of their own
    rank, alpha, rooted = subject.number(RANK), subject.number(ALPHA), subject.is_on("lora.use_rslora")
    scale = alpha / (math.sqrt(rank) if rooted else rank) if rank and alpha is not None else 1.0
    if rank and not LEAST <= scale <= (MOST * 4 if rooted else MOST):
        usual = int(2 * rank)                # QLoRA's own 16 / 64 is below: it works, with its own learning rate
        yield found("low", ALPHA, RANK, edits=set_to(subject, ALPHA, usual), scale=scale, usual=usual,
                    divisor="sqrt(r)" if rooted else "r")


@code_rule
def quantised_without_adapters(script: Script, subject: Subject, where: Circumstances) -> Findings:
    """A trainer gets a quantised model without adapters."""
    if subject.framework not in TRAINERS or subject.is_unread(RANK) or subject.is_unread("lora.target_modules"):
        return
    attaches = subject.method in ("lora", "qlora") or script.says("peft", "adapter", "lora", "LoRA", "Lora") or any(
        name.split(".")[0] == "peft" for name in script.imported.values())
    key = next((key for key in BITS if subject.on(key)), None)
    if key is not None and not attaches:
        yield found("critical", key)


@rule
def scaler_refuses_bf16(subject: Subject, where: Circumstances) -> Findings:
    """Adapters are bf16 on quantised weights, and fp16's scaler takes no gradients of that type."""
    key = next((key for key in BITS if subject.on(key)), None)
    adapts = subject.script is not None and subject.script.says("peft_config", "get_peft_model", "PeftModel") \
        and not of_unsloth(subject.script)               # which takes the change of types out
    of_trl = subject.trainer.startswith("trl.") and in_force("trl", where)
    fp16 = {**subject.settings, **subject.unread}.get("training.fp16")
    asked = fp16 is not None and fp16.name == "fp16" and (
        subject.on("training.fp16") or fp16.spelled.endswith("torch.cuda.is_available()"))
    if key is not None and adapts and of_trl and asked:
        yield found("critical", fp16, key, edits=set_to(subject, "training.fp16", False))


@rule
def qlora_of_eight_bits(subject: Subject, where: Circumstances) -> Findings:
    """The adapter is qlora, or the weights have 4 bits, and they are loaded with 8."""
    if subject.framework == "axolotl" and all(map(subject.on, BITS)):
        yield found("critical", *BITS)


@rule
def compile_quantised(subject: Subject, where: Circumstances) -> Findings:
    """torch.compile is used on a model with quantised weights."""
    bits = next((key for key in BITS if subject.is_on(key) and key in subject.settings), None)
    if subject.compiles is not None and bits is not None:
        raises = subject.script is not None and "torch.compile" in subject.script.trained
        yield found("critical" if raises else "moderate", subject.compiles, bits, case="raises" if raises else "",
                    edits=set_to(subject, "training.torch_compile", False))


@rule
def four_bit_needless(subject: Subject, where: Circumstances) -> Findings:
    """Weights are 4-bit where the same weights fit in bf16."""
    space = room(subject, where, four_bits=False)
    if space is not None and subject.is_four_bit and space[0] <= space[1]:
        yield found("moderate", BITS[0], edits=set_to(subject, BITS[0], False), needed_gib=space[0], free_gib=space[1])


@rule
def four_bit_compute_type(subject: Subject, where: Circumstances) -> Findings:
    """4-bit weights are converted to another type than the rest is computed in."""
    rest, own = subject.products_dtype, dtype_named(subject.effective(COMPUTE))
    decided = COMPUTE in subject.settings or subject.script is None or not subject.script.says("FastLanguageModel")
    known = decided and not subject.is_unread(COMPUTE) and own is not None
    if known and subject.is_four_bit and rest in ("bf16", "fp16") and own != rest:
        type_ = "bfloat16" if rest == "bf16" else "float16"
        yield found("low" if own == "fp32" else "moderate", COMPUTE, f"training.{rest}", edits=set_to(subject, COMPUTE, type_),
                    case="" if own == "fp32" else "half", rest=rest, own=own, type=type_)


@rule
def four_bit_type(subject: Subject, where: Circumstances) -> Findings:
    """4-bit weights are FP4 instead of NF4."""
    decided = KIND in subject.settings or subject.framework in TRAINERS
    if subject.is_four_bit and subject.effective(KIND) == "fp4" and decided:
        yield found("low", KIND, edits=set_to(subject, KIND, "nf4"))


@rule
def double_quantisation_off(subject: Subject, where: Circumstances) -> Findings:
    """The scales of 4-bit weights are stored in fp32."""
    if subject.is_four_bit and subject.effective(DOUBLE) is False:
        saved_mib = SAVED_BYTES * where.model.matmul_parameters / 2**20 if where.model else None
        yield found("low", DOUBLE, edits=set_to(subject, DOUBLE, True), block=QUANTISED_BLOCK,
                    bits=SAVED_BYTES * 8, saved_mib=saved_mib, expected=None if where.model else NO_SPEED)


@rule
def attention_eager(subject: Subject, where: Circumstances) -> Findings:
    """Attention writes all its scores to memory."""
    if subject.value(IMPLEMENTATION) == "eager" and "gemma-2" not in str(subject.value("model.path")):       # it has no sdpa
        tokens = where.data.max_length or where.data.block if where.data is not None else None
        scores_mib = 4 * where.model.heads * tokens**2 / 2**20 if where.model is not None and tokens is not None else None
        unused = subject.script is not None and of_unsloth(subject.script)         # Unsloth has its own attention
        yield found("low" if unused else "moderate", IMPLEMENTATION, edits=set_to(subject, IMPLEMENTATION, "sdpa"),
                    tokens=tokens, scores_mib=scores_mib)


@rule
def flash_attention_unfit(subject: Subject, where: Circumstances) -> Findings:
    """The run asks for FlashAttention where it cannot run."""
    asked = str(subject.value(IMPLEMENTATION))
    reason = _reason(subject, where, asked) if asked in NEEDS else ""
    if reason:
        yield found("critical", IMPLEMENTATION, edits=set_to(subject, IMPLEMENTATION, "sdpa"), asked=asked, reason=reason)


def _reason(subject: Subject, where: Circumstances, asked: str) -> str:
    hardware, software = where.hardware, where.software
    if hardware is not None and hardware.device != "cuda":
        return f"{hardware.name} is no NVIDIA GPU, and FlashAttention needs one"
    if hardware is not None and (capability := hardware.compute_capability or (0, 0)) < NEEDS[asked]:
        return f"{hardware.name} has compute capability {shown(capability)}, and {asked} needs {shown(NEEDS[asked])}"
    if software is not None and asked == "flash_attention_2" and "flash_attn" in software.missing:
        return f"flash-attn cannot be used: {software.missing['flash_attn']}"
    weights = subject.weights_dtype
    plain = subject.products_dtype == "fp32" and weights is None and "model.dtype" not in subject.unread
    return "FlashAttention computes in fp16 and bf16 only, and this run in fp32" if weights == "fp32" or plain else ""


@rule
def compile_changing_lengths(subject: Subject, where: Circumstances) -> Findings:
    """The model is compiled, and each batch has another shape."""
    asked, mode = subject.compiles, subject.settings.get(MODE)
    marked = subject.script is not None and subject.script.says("dynamic")
    if asked is not None and subject.changes_lengths(where.data) and not marked:
        yield found("moderate", asked, None if mode == asked else mode, limit=RECOMPILE_LIMIT,
                    edits=set_to(subject, "training.torch_compile", False),
                    graphs=mode is not None and mode.value in ("reduce-overhead", "max-autotune"))


@rule
def reduce_overhead_without_gpu(subject: Subject, where: Circumstances) -> Findings:
    """torch.compile's mode for CUDA graphs is used without CUDA."""
    if subject.value(MODE) == "reduce-overhead" and where.hardware is not None and where.hardware.device != "cuda":
        yield found("low", MODE, edits=removed(subject, MODE), name=where.hardware.name)
