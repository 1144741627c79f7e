"""The rules of the audit, in topic files; their sentences stand in findings.yaml. A new rule is a function and its entry."""

from powertrain.audit.rules import (
    calls,
    cases,
    columns,
    command_line,
    data,
    good,
    labels,
    launching,
    learning,
    loop,
    memory,
    model,
    names,
    network,
    optimizer,
    overrides,
    own_code,
    processes,
    program,
    running,
    starting,
    tools,
    trl,
    values,
)
from powertrain.records.findings import rules_of

RULES = rules_of(names, calls, program, running, command_line, labels, optimizer, memory, data, loop, model, processes,
                 launching, values, cases, columns, own_code, network, learning, trl, starting, tools, overrides, good)
