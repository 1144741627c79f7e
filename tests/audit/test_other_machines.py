"""A file that is for a GPU, audited where there is none, and an audit for a machine that is not here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_subjects import UNKNOWN, cpu, examples, gpu, here, model, script, software
from setting_cases import SETTING_CASES

from powertrain.audit.audit import audit, audit_subject, read_subject
from powertrain.audit.device import asks_for_cuda
from powertrain.audit.rules import RULES
from powertrain.audit.subject import Circumstances
from powertrain.cli.auditing import _circumstances, audit_files
from powertrain.facts.clusters import machine_of
from powertrain.records import Hardware, WrongUse, to_plain
from powertrain.records.findings import Audit, Finding

FOLDER = Path(__file__).parent
FILES = [path for folder in ("documents", "everyday", "clean") for path in sorted((FOLDER / folder).iterdir())
         if path.suffix in (".py", ".yaml", ".yml", ".json")]
# these name no device, and nothing that only a GPU does
FOR_ANY = {"config_000.yaml", "config_003.yaml", "training_config_004.py"}
BY_NAME = {rule.name: rule for rule in RULES}
LOOP = """import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
LINE
for batch in loader:
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TRAINER = """from transformers import Trainer, TrainingArguments
Trainer(model=model, args=TrainingArguments("out", ARGUMENTS), train_dataset=rows).train()
"""


def judged(path: Path, host: Hardware, monkeypatch: pytest.MonkeyPatch, machine: str | None = None) -> Audit:
    """Return the audit as the command makes it on such a host."""
    monkeypatch.setattr("powertrain.facts.hardware.read_hardware", lambda cache, measure=True: host)
    subject = read_subject(path)
    return audit_subject(subject, _circumstances(False, machine)(subject))


def asked(text: str, folder: Path, device: str = "cpu", name: str = "train.py") -> str | None:
    (folder / name).write_text(text, encoding="utf-8")
    found = asks_for_cuda(read_subject(folder / name), device)
    return found.what if found is not None else None


# ------------------------------------------------------------------------------------------------ no machine is named


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_finding_of_a_file_for_gpus_depends_on_a_host_without_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = (cpu(2), cpu(64, has_bf16=False))
    found = [judged(path, host, monkeypatch) for host in hosts]
    if path.name in FOR_ANY:
        assert found[0].environment["machine"] == "AMD EPYC, 2 cores, 24 GiB, no GPU"
        return
    assert found[0].findings == found[1].findings == audit(path, UNKNOWN).findings
    assert found[0].environment["machine"].startswith("assumed elsewhere: torch sees no NVIDIA GPU here, and ")
    assert "--machine h100" in found[0].environment["machine"]
    assert "installed here" not in found[0].environment


def test_on_a_host_with_a_gpu_the_host_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(FOLDER / "clean" / "tuned_trl.py", gpu(), monkeypatch)
    assert found.environment["machine"] == "1 x NVIDIA H100, 80 GiB"


@pytest.mark.parametrize(("line", "what"), [
    ("model.cuda()", "model.cuda()"), ('model.to("cuda:1")', 'model.to("cuda:1")'),
    ('device = "cuda" if torch.cuda.is_available() else "cpu"', 'device = "cuda" if torch.cuda.is_available() else "cpu"'),
    ('torch.distributed.init_process_group("nccl")', 'torch.distributed.init_process_group("nccl")'),
    ("import bitsandbytes as bnb", "import bitsandbytes as bnb"),
    ("from torch.cuda.amp import autocast", "from torch.cuda.amp import autocast"),
    ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark = True"),
    ("# model.cuda()", None), ('"""model.cuda()"""', None), ('print("barracuda")', None), ('model.to("cpu")', None),
    ("def unused():\n    model.cuda()", None), ("import bits", None),
    ('torch.autocast("cpu", dtype=torch.bfloat16)', None)])
def test_the_code_that_training_reaches_says_whether_a_script_is_for_a_gpu(line: str, what: str | None, tmp_path: Path) -> None:
    assert asked(LOOP.replace("LINE", line), tmp_path) == what


@pytest.mark.parametrize(("arguments", "what"), [
    ("fp16=True", "fp16=True"), ("bf16=True", "bf16=True"), ("tf32=True", "tf32=True"), ("tf32=False", None),
    ('ddp_backend="nccl"', 'ddp_backend="nccl"'), ('ddp_backend="gloo"', None), ("bf16=False", None),
    ("bf16=True, use_cpu=True", None), ("bf16=True, no_cuda=True", None), ("learning_rate=1e-4", None)])
def test_the_settings_of_a_trainer_say_it_too(arguments: str, what: str | None, tmp_path: Path) -> None:
    assert asked(TRAINER.replace("ARGUMENTS", arguments), tmp_path) == what


@pytest.mark.parametrize(("text", "what"), [
    ("base_model: a/b\nsequence_len: 8\nflash_attention: true\n", "flash_attention: true"),
    ("base_model: a/b\nsequence_len: 8\nflash_attention: false\n", None),
    ("model:\n  path: somewhere\nmethod: qlora\ntechniques:\n  bf16: 'on'\n", None)])
def test_a_config_says_it_and_a_recipe_of_powertrain_is_for_any_machine(text: str, what: str | None, tmp_path: Path) -> None:
    assert asked(text, tmp_path, name="config.yaml") == what


@pytest.mark.parametrize(("settings", "what"), [
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, None),
    ({"fp16": {"enabled": "auto"}, "train_batch_size": "auto"}, None),
    ({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}, None),
    ({"train_batch_size": 8, "fp16": {"enabled": True}}, "fp16.enabled: true"),
    ({"train_batch_size": 8, "zero_optimization": {"stage": 2}}, "zero_optimization.stage: 2"),
    ({"train_batch_size": 8, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
     "zero_optimization.offload_optimizer.device: cpu")])
def test_of_deepspeeds_file_only_what_divides_or_offloads_or_computes_in_fp16(settings: dict[str, Any], what: str | None,
                                                                              tmp_path: Path) -> None:
    assert asked(json.dumps(settings, indent=1), tmp_path, name="ds.json") == what


@pytest.mark.parametrize(("line", "what"), [
    ('accelerator = accelerate.Accelerator(mixed_precision="bf16")', None),
    ('accelerator = accelerate.Accelerator(mixed_precision="fp16")', 'mixed_precision="fp16"'),
    ('os.environ["CUDA_VISIBLE_DEVICES"] = "0"', 'os.environ["CUDA_VISIBLE_DEVICES"] = "0"'),
    ('os.environ["CUDA_VISIBLE_DEVICES"] = ""', None)])
def test_accelerate_computes_in_bf16_on_a_cpu_too(line: str, what: str | None, tmp_path: Path) -> None:
    assert asked("import accelerate\nimport os\n" + LOOP.replace("LINE", line), tmp_path) == what


@pytest.mark.parametrize(("text", "what"), [
    ("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n", None),
    ("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\ngpu_ids: all\nnum_processes: 1\n", "gpu_ids: all")])
def test_accelerates_file_says_it_by_its_gpus(text: str, what: str | None, tmp_path: Path) -> None:
    assert asked(text, tmp_path, name="default_config.yaml") == what


def test_a_mac_is_not_taken_for_a_machine_without_a_gpu(tmp_path: Path) -> None:
    either = 'model.to("mps" if torch.backends.mps.is_available() else "cuda")'
    assert asked(LOOP.replace("LINE", either), tmp_path, "mps") is None
    assert asked(TRAINER.replace("ARGUMENTS", "bf16=True"), tmp_path, "mps") is None
    assert asked(LOOP.replace("LINE", "model.cuda()"), tmp_path, "mps") == "model.cuda()"


def test_without_a_machine_its_memory_is_not_taken_for_the_hosts(tmp_path: Path) -> None:
    subject = script(tmp_path / "train.py", "transformers", training__per_device_train_batch_size=1,
                     training__gradient_accumulation_steps=16, training__gradient_checkpointing=True,
                     training__activation_checkpointing=True)
    known = here(cpu(), examples(), model())
    for name in ("micro_batch_small", "checkpointing_needless"):
        assert [one.expected.speed for one in BY_NAME[name].find(subject, known)], "the host has room"
        assert all("fits" not in one.why for one in BY_NAME[name].find(subject, replace(known, hardware=None)))
    small = list(BY_NAME["micro_batch_small"].find(subject, replace(known, hardware=None)))
    assert [finding.severity for finding in small] == ["low"]
    assert not list(BY_NAME["checkpointing_needless"].find(subject, replace(known, hardware=None)))


# ------------------------------------------------------------------------------------------------ a machine is named


def of(name: str, machine: str, folder: Path, **settings: Any) -> list[Finding]:
    subject = script(folder / "train.py", "transformers", **settings)
    return list(BY_NAME[name].find(subject, Circumstances(machine_of(machine, folder))))


def test_published_figures_say_so_and_nothing_is_said_of_software_and_cores(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(FOLDER / "documents" / "after_002.py", cpu(), monkeypatch, "2x8xh100")
    assert found.environment["machine"].startswith("16 x NVIDIA H100 80GB HBM3, 80 GiB; published figures, not measured (guess")
    assert "installed here" not in found.environment
    assert not {"workers_beyond_cores", "threads_fixed", "flash_attention_unfit"} & {one.rule for one in found.findings}
    assert not of("threads_fixed", "h100", tmp_path, environment__OMP_NUM_THREADS="8")
    assert not of("workers_beyond_cores", "h100", tmp_path, training__dataloader_num_workers=64)


@pytest.mark.parametrize(("rule", "machine", "settings", "says"), [
    ("bf16_without_hardware", "t4", {"training__bf16": True}, "compute capability 7.5, and bf16 begins at 8.0"),
    ("flash_attention_unfit", "t4", {"model__attn_implementation": "flash_attention_2"}, "capability 7.5, and flash_"),
])
def test_a_compute_capability_is_written_as_nvidia_writes_it(rule: str, machine: str, settings: dict[str, Any], says: str,
                                                             tmp_path: Path) -> None:
    finding, = of(rule, machine, tmp_path, **settings)
    assert says in finding.why
    assert "(7, 5)" not in finding.why


def test_a_gain_from_published_peaks_is_named_as_one(tmp_path: Path) -> None:
    finding, = of("fp32_on_half_hardware", "a100", tmp_path, training__bf16=False)
    assert finding.expected.basis == "formula: the published GEMM peaks, bf16 over fp32"
    assert finding.expected.speed == (1.0, pytest.approx(312 / 19.5))


def test_nodes_of_one_device_are_several_devices(tmp_path: Path) -> None:
    assert of("sharding_one_device", "h100", tmp_path, training__fsdp="full_shard")
    assert not of("sharding_one_device", "4x1xh100", tmp_path, training__fsdp="full_shard")


def test_the_facts_of_another_machine_are_used_with_its_software(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = replace(gpu("Tesla V100", (7, 0), 16, devices=2), cores=4)
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"hardware": to_plain(there), "software": to_plain(software("4.40.0"))}), encoding="utf-8")
    found = judged(FOLDER / "documents" / "lora_trainer_000.py", cpu(), monkeypatch, str(file))
    assert found.environment["machine"] == f"2 x Tesla V100, 16 GiB; measured there ({file})"
    assert "transformers 4.40.0" in found.environment["installed there"]
    severity = {one.rule: one.severity for one in found.findings}
    assert (severity["removed_names"], severity["bf16_without_hardware"]) == ("low", "critical")


@pytest.mark.parametrize("machine", ["h100", "m4-max", ""])
def test_what_was_measured_on_a_cpu_is_not_said_of_another_machine(machine: str, tmp_path: Path) -> None:
    there = Circumstances(machine_of(machine, tmp_path)) if machine else UNKNOWN
    said = {}
    for name, (case, _) in SETTING_CASES.items():
        for finding in BY_NAME[name].find(case.subject(tmp_path), there):
            said[name] = f"{finding.title}. {finding.why}. {finding.expected.says} ({finding.expected.basis})"
    assert "logging_each_step" in said
    assert [text for text in said.values() if re.search(r"study|claim|\bCPU\b(?! offload)|no GPU", text)] == []
    asked = script(tmp_path / "train.py", "transformers", training__logging_steps=1)
    finding, = BY_NAME["logging_each_step"].find(asked, here(cpu()))
    assert finding.expected.says == "no measurable gain (claim 003-14)"
    assert "GPU" not in finding.why


def test_the_cpu_of_this_machine_can_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.facts.clusters.read_hardware", lambda cache, measure=True: cpu())
    found = judged(FOLDER / "clean" / "tuned_trl.py", cpu(), monkeypatch, "cpu")
    assert found.environment["machine"] == "AMD EPYC, 2 cores, 24 GiB, no GPU"
    assert "bf16_without_hardware" in {one.rule for one in found.findings}


def test_a_machine_that_is_not_known_is_one_sentence_with_the_kinds(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no figures are known for x100; known kinds are b200, h200, h100"):
        audit_files(FILES[0], apply=False, destination=None, elsewhere=False, machine="x100")


@pytest.mark.parametrize(("peaks", "asked", "says"), [
    ({"fp32": 5e12, "bf16": 4e12, "fp16": 1e13}, "fp16", {"good_precision": "good"}),
    ({"fp32": 5e12, "bf16": 4e12, "fp16": 1e13}, "bf16", {}),
    ({"fp32": 5e12, "bf16": 1e13, "fp16": 1e13}, "fp16", {"fp16_on_bf16_hardware": "moderate"}),
    ({"fp32": 5e12, "bf16": 1e13, "fp16": 1e13}, "bf16", {"good_precision": "good"}),
    ({"fp32": 5e12, "bf16": 1e13, "fp16": 1e13}, "tf32",
     {"fp32_on_half_hardware": "moderate", "tf32_without_effect": "critical"})])
def test_a_mac_is_judged_by_what_was_measured(peaks: dict[str, float], asked: str, says: dict[str, str],
                                              tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
                    "model = AutoModelForCausalLM.from_pretrained('gpt2')\n"
                    f"Trainer(model, TrainingArguments('out', {asked}=True), train_dataset=rows).train()\n", encoding="utf-8")
    mac = replace(gpu("arm"), device="mps", compute_capability=None, peak_flops_per_s=peaks)
    found = {one.rule: one.severity for one in audit(path, here(mac)).findings if "precision" in one.rule or "16" in one.rule
             or "32" in one.rule or "half" in one.rule}
    assert found == says


def test_tf32_on_an_amd_gpu_is_refused_by_the_trainer_and_not_for_its_age(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("from transformers import Trainer, TrainingArguments\n"
                    "Trainer(model, TrainingArguments('out', tf32=True), train_dataset=rows).train()\n", encoding="utf-8")
    amd = replace(gpu("AMD Instinct MI300X"), compute_capability=None, architecture="gfx942")
    (found,) = (one for one in audit(path, here(amd)).findings if one.rule == "tf32_without_effect")
    assert "accepts tf32 only with CUDA" in found.why
    assert "8.0" not in found.why
