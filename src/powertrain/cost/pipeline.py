"""The memory of one of the processes that each have some blocks, and the time that they wait for each other.

The first process has the embedding, the last one norm and head; the one that holds more is counted. A stage holds the
activations of at most as many passes as there are stages, each of its own blocks: about one pass of the whole model, which is
what counts. torch's schedule receives each pass, and its gradients, into buffers that are there for the whole step. Not all of
that is there at the same moment, so the sum is an upper bound.
"""

from collections.abc import Mapping
from dataclasses import replace

from powertrain.cost.sharding import all_weights, parts_bytes, standing_bytes
from powertrain.cost.weights import state_bytes
from powertrain.cost.workload import Workload
from powertrain.records import ModelFacts, OptimizerFacts
from powertrain.shapes import FP32

FIRST = ("embedding.weight", "position_embedding.weight")    # of the weights outside the blocks, on the first stage


def bubble(stages: int, passes: int) -> float:
    """Return the share of a step (0..1) that a process waits for the others. Source: Narayanan et al. 2021, section 2.2."""
    return (stages - 1) / (passes + stages - 1)


def stage_bytes(model: ModelFacts, optimizer: OptimizerFacts, stages: int) -> int:
    """Return the bytes of weights, gradients and optimizer state of the process that holds the most."""
    return standing_bytes(_fullest(model, optimizer, stages), optimizer)


def staged(held: Mapping[str, int], model: ModelFacts, workload: Workload) -> dict[str, int]:
    """Return the components of a peak, given for one process, as they are in the stage that holds the most."""
    part = _fullest(model, workload.optimizer, workload.stages)
    tokens = max(map(sum, workload.passes))
    kinds = 1 if workload.stages == 2 else 2             # of buffers: a stage between others receives from both
    return {**held, "weights": parts_bytes(part, 1),
            "gradients": FP32 * part.trainable, "optimizer": state_bytes(part, workload.optimizer),
            "received": kinds * len(workload.passes) * tokens * model.width * FP32}


def _fullest(model: ModelFacts, optimizer: OptimizerFacts, stages: int) -> ModelFacts:
    """Return the facts of the stage that holds the most: the first or the last one."""
    ends = (stage_facts(model, stages, stage) for stage in (0, stages - 1))
    return max(ends, key=lambda part: standing_bytes(part, optimizer))


def stage_facts(model: ModelFacts, stages: int, stage: int) -> ModelFacts:
    """Return the facts of one stage, as if its blocks were a model."""
    layers = model.layers // stages
    shapes = {name: shape for name, shape in model.shapes.items()
              if name.startswith("blocks.") or stage == (0 if name in FIRST else stages - 1)}
    adapted = tuple(layer - stage * layers for layer in model.adapted_layers if layer // layers == stage)
    part = replace(model, layers=layers, shapes=shapes, adapted_layers=adapted,
                   matmul_parameters=model.matmul_parameters // stages)
    counts = {trained: sum(one.part(1) for one in all_weights(part) if one.is_trained is trained)
              for trained in (True, False)}
    return replace(part, trainable=counts[True], parameters=sum(counts.values()),
                   adapter_parameters=counts[True] if model.adapter_parameters else 0)
