"""Whether a script or config is for an NVIDIA GPU: where the host of an audit has none, the run is for another machine."""

import ast
import re
from dataclasses import replace

from powertrain.audit.script import Script
from powertrain.audit.subject import Subject
from powertrain.records.findings import Evidence

# settings that a run on a CPU or on a Mac's GPU cannot follow, or would not have
FOR_CUDA = ("training.tf32", "training.use_liger_kernel", "training.deepspeed", "training.fsdp", "model.device_map",
            "quantisation.load_in_4bit", "quantisation.load_in_8bit", "accelerate.deepspeed_config", "accelerate.fsdp_config",
            "accelerate.gpu_ids", "environment.CUDA_VISIBLE_DEVICES")
# of DeepSpeed's file what divides or offloads a GPU's memory: a batch size is one of any machine
SECTIONS = ("deepspeed.zero_optimization.stage", "deepspeed.zero_optimization.offload", "fsdp.")
VALUES = {"model.attn_implementation": ("flash_attention_2", "flash_attention_3", "xformers"),
          "training.ddp_backend": ("nccl",), "training.torch_compile_mode": ("reduce-overhead",),
          "deepspeed.fp16.enabled": (True,), "accelerate.distributed_type": ("MULTI_GPU", "DEEPSPEED", "FSDP")}
HALF = {"training.fp16": (True,), "training.bf16": (True,), "accelerate.mixed_precision": ("fp16",)}
ON_CPUS_TOO = ("pytorch", "character-transformer", "nanogpt")        # these compute in half precision on a CPU without a word
CPU = {"training.use_cpu": (True,), "accelerate.use_cpu": (True,), "environment.device": ("cpu",),
       "model.device_map": ("cpu", {"": "cpu"}), "environment.CUDA_VISIBLE_DEVICES": ("", "-1")}
NAMED, MPS = re.compile(r"cuda(:\d*)?|nccl|cudnn"), re.compile("mps")
PACKAGES = ("torch.cuda", "torch.backends.cud", "flash_attn", "bitsandbytes", "apex", "unsloth")


def asks_for_cuda(subject: Subject, device: str) -> Evidence | None:
    """Return what in the file is for an NVIDIA GPU; None where nothing is, or where the file is for `device`, the host's."""
    script = subject.script
    if subject.framework == "powertrain" or any(subject.value(key) in values for key, values in CPU.items()) or (
            script is not None and device == "mps" and _named_in(script, MPS) is not None):
        return None                          # a recipe is for whatever machine it is planned on
    values = VALUES | (HALF if device == "cpu" and subject.framework not in ON_CPUS_TOO else {})
    if subject.framework == "accelerate":
        values.pop("training.bf16", None)    # which accelerate computes on a CPU too; fp16 it refuses there
    for key, setting in subject.settings.items():
        is_device = key == "environment.device" and NAMED.fullmatch(str(setting.value)) is not None
        is_on = subject.on(key) and (key in FOR_CUDA or key.startswith(SECTIONS))
        if is_device or is_on or setting.value in values.get(key, ()):
            return replace(setting.evidence, what=".".join([*key.split(".")[1:-1], setting.spelled]))
    found = _named_in(script, NAMED) if script is not None else None
    return Evidence(script.lines[found.lineno - 1].strip(), script.place(found)) if script and found else None


def _named_in(script: Script, what: re.Pattern[str]) -> ast.expr | ast.stmt | None:
    """Return the first code that names a device, as torch.cuda, model.cuda() and "cuda:0" do, or imports CUDA's packages."""
    def names(node: ast.AST) -> bool:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            return what is NAMED and any(name.startswith(PACKAGES) for name in imported)
        word = getattr(node, "attr", getattr(node, "value", None))
        return isinstance(word, str) and what.fullmatch(word) is not None

    return min((node for node in script.nodes if isinstance(node, ast.expr | ast.stmt) and names(node)),
               key=lambda node: node.lineno, default=None)
