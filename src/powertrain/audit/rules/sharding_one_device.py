"""ZeRO or FSDP with nothing to spread over."""

from __future__ import annotations

from collections.abc import Iterator

from powertrain.audit.reckoning import GIB, as_trained, needed_and_there, reckonable
from powertrain.audit.resolved import first_set, is_on, number
from powertrain.audit.rules.base import UNMEASURED, Circumstances, Rule
from powertrain.audit.subject import Subject
from powertrain.records.findings import Cure, Evidence, Expected, Finding, Risk

STAGES = ("deepspeed.zero_optimization.stage", "accelerate.deepspeed_config.zero_stage", "training.deepspeed", "training.fsdp",
          "accelerate.distributed_type")
OFFLOADS = ("deepspeed.zero_optimization.offload_optimizer.device", "deepspeed.zero_optimization.offload_param.device",
            "accelerate.deepspeed_config.offload_optimizer_device", "accelerate.deepspeed_config.offload_param_device",
            "accelerate.fsdp_config.fsdp_offload_params", "fsdp.offload_params", "fsdp.cpu_offload")
PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU")     # accelerate's distributed types that shard nothing


class ShardingOneDevice(Rule):
    name = "sharding_one_device"
    rests_on = "documentation: DeepSpeed (ZeRO divides states between processes); claims: 000-19"

    @classmethod
    def find(cls, subject: Subject, where: Circumstances) -> Iterator[Finding]:
        asked = first_set(subject, (key for key in STAGES if subject.on(key) and subject.value(key) not in PLAIN))
        offload = first_set(subject, (key for key in OFFLOADS if subject.on(key)))
        if offload is None and "offload" in str(subject.value("training.fsdp")):
            offload = subject.settings["training.fsdp"]
        facts = reckonable(where)
        if offload is not None and facts is not None:
            needed, there = needed_and_there(facts.model, as_trained(subject, facts), facts)
            if needed <= there:
                yield cls._offloaded(offload.evidence, f"a step takes about {needed / GIB:.2f} GiB, and {there / GIB:.1f} may "
                                     "be counted on")
                return
        alone = number(subject, "accelerate.num_processes") == 1 or (
            where.hardware is not None and where.hardware.devices == 1 and not is_on(subject, "accelerate.num_processes"))
        if asked is not None and alone and offload is None:
            yield cls.found("low", "sharding over one device", "What ZeRO and FSDP save is divided by the number of "
                            "processes, and there is one; what they cost remains",
                            asked, subject.settings.get("accelerate.num_processes"),
                            expected=Expected("no effect on memory, and none on speed that could be measured (claim 000-19)",
                                              "study: 2026-11-21_claims"), risk=Risk("low", "none", "low"),
                            cure=Cure("Train without it on one device"))

    @classmethod
    def _offloaded(cls, seen: Evidence, fits: str) -> Finding:
        return cls.found("moderate", "weights or optimizer kept in host memory without need", f"Here {fits}: all that is "
                         "offloaded crosses the bus in each step for nothing",
                         seen, expected=UNMEASURED, risk=Risk("low", "none", "low"),
                         cure=Cure("Keep everything on the device"))
