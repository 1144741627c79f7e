"""What each of several processes has that divide the blocks into stages, and the time that they wait for each other.

The first process has the embedding, the last one norm and head.
"""

from collections.abc import Sequence
from dataclasses import replace

from powertrain.cost.sharding import all_weights, standing_bytes
from powertrain.records import ModelFacts, OptimizerFacts

FIRST = ("embedding.weight", "position_embedding.weight")    # of the weights outside the blocks, on the first stage


def bubble(stages: int, passes: int) -> float:
    """Return the share of a step (0..1) that a process waits for the others. Source: Narayanan et al. 2021, section 2.2."""
    return (stages - 1) / (passes + stages - 1)


def stage_bytes(model: ModelFacts, optimizer: OptimizerFacts, stages: int) -> int:
    """Return the bytes of weights, gradients and optimizer state of the process that holds the most: the first or the last."""
    return max(standing_bytes(stage_facts(model, stages, stage), optimizer) for stage in (0, stages - 1))


def levelled(passes: Sequence[tuple[int, ...]], least: int) -> list[tuple[int, ...]]:
    """Return the document lengths of passes filled up to the longest of them, those with the longest documents first.

    There are at least so many passes. See training/pipeline.py.
    """
    tokens, found = max(map(sum, passes)), []
    for lengths in passes:
        whole, rest = divmod(tokens - sum(lengths), max(lengths))
        found.append((*lengths, *[max(lengths)] * whole, *[rest] * (rest > 0)))
    found += found[-1:] * (least - len(found))
    return sorted(found, key=lambda lengths: -sum(length * length for length in lengths))


def stage_facts(model: ModelFacts, stages: int, stage: int) -> ModelFacts:
    """Return the facts of one stage, as if its blocks were a model."""
    layers = model.layers // stages
    ends = {name: {0} if name in FIRST else {stages - 1} for name in model.shapes}
    if model.tied_head:                      # then both ends need it
        ends["embedding.weight"].add(stages - 1)
    shapes = {name: shape for name, shape in model.shapes.items() if name.startswith("blocks.") or stage in ends[name]}
    adapted = tuple(layer - stage * layers for layer in model.adapted_layers if layer // layers == stage)
    learned = "position_embedding.weight" in model.shapes
    part = replace(model, layers=layers, shapes=shapes, adapted_layers=adapted,
                   rotary_width=0 if learned else model.rotary_width, matmul_parameters=model.matmul_parameters // stages)
    counts = {trained: sum(one.part(1) for one in all_weights(part) if one.is_trained is trained)
              for trained in (True, False)}
    return replace(part, trainable=counts[True], parameters=sum(counts.values()),
                   adapter_parameters=counts[True] if model.adapter_parameters else 0)
