"""transformers' Trainer, and those built on it, one step at a time. For the peer's interpreter."""

from __future__ import annotations

from typing import Any

from steps import Steps
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback

FOREVER = 10**6                              # steps: who asks says when it is enough


class Told(TrainerCallback):
    """With logging_steps=1 the log is the last thing of a step, and it has the loss and the norm."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.steps.begin()

    def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.steps.done(float(logs["loss"]), float(logs.get("grad_norm", "nan")))


class InOrder:
    """Lets a Trainer read the examples as they stand in the file, which is the order of the other arm."""

    train_dataset: Any

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def step_by_step(trainer: Trainer) -> None:
    """Train for as long as somebody asks for steps."""
    steps, plain = Steps(), trainer.training_step

    def counted(model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        mask, tokens = inputs.get("attention_mask"), inputs["input_ids"]
        learned = inputs["completion_mask"] == 1 if "completion_mask" in inputs else inputs["labels"] != -100
        real = tokens.numel() if mask is None else int(mask.sum())
        steps.count(trained=int(learned[..., 1:].sum()), real=real, padding=tokens.numel() - real)
        return plain(model, inputs, *rest, **named)

    trainer.training_step = counted  # type: ignore[method-assign]
    trainer.add_callback(Told(steps))
    trainer.train()


def plain_settings(options: dict[str, Any]) -> dict[str, Any]:
    """What both sides agree on, and nothing that costs time besides training."""
    return {"max_steps": FOREVER, "learning_rate": options["learning_rate"], "lr_scheduler_type": "constant",
            "weight_decay": options["weight_decay"], "adam_beta2": options["adam_beta2"], "max_grad_norm": 1.0,
            "per_device_train_batch_size": options["batch"], "gradient_accumulation_steps": options.get("accumulation", 1),
            "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": options.get("use_cpu", True),
            "disable_tqdm": True, "seed": 0}
