"""The curves of a run, by the names that transformers gives them: which event gives which values."""

from collections.abc import Mapping

from powertrain.records.event import Event
from powertrain.records.events import Adapters, Evaluated, Memory, Saved, Step

OF_PROCESSES = ("communication_share", "waiting_share", "token_imbalance")


def values_of(event: Event) -> Mapping[str, float]:
    """Return the values of an event by curve; none for an event without numbers that change with the step."""
    match event:
        case Step():
            return {"train/loss": event.loss, "train/learning_rate": event.learning_rate, "train/grad_norm": event.grad_norm,
                    "train/tokens": event.tokens, "train/step_s": event.seconds,
                    **({"train/tokens_per_s": event.real_tokens / event.seconds} if event.seconds else {}),
                    **{f"train/{name}": value for name, value in event.metrics.items()},
                    **{f"time/{name}_s": value for name, value in event.parts.items()},
                    **{f"processes/{name}": value for name in OF_PROCESSES if (value := getattr(event, name)) is not None}}
        case Evaluated():
            return {"eval/loss": event.loss,
                    **({} if event.bits_per_byte is None else {"eval/bits_per_byte": event.bits_per_byte})}
        case Memory():
            return {"memory/allocated_bytes": event.allocated_bytes,
                    "memory/predicted_bytes": sum(event.predicted.values())}
        case Saved():
            return {"checkpoint/bytes": event.bytes, "checkpoint/waited_s": event.seconds}
        case Adapters():
            return {f"adapters/{module}/{name}": value for module, found in event.modules.items()
                    for name, value in found.items()}
    return {}
