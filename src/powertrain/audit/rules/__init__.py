"""The rules of the audit, in topic files; their sentences stand in findings.yaml. A new rule is a function and its entry."""

from powertrain.audit.rules import (
    calls,
    cases,
    columns,
    command_line,
    configured,
    data,
    fitting,
    good,
    labels,
    launching,
    learning,
    loop,
    meaning,
    memory,
    model,
    names,
    network,
    optimizer,
    overrides,
    own_code,
    paths,
    processes,
    program,
    refusals,
    running,
    starting,
    together,
    tools,
    trl,
    values,
)
from powertrain.records.findings import rules_of

RULES = rules_of(names, calls, program, running, command_line, configured, labels, optimizer, memory, data, loop, model,
                 processes, launching, values, cases, columns, own_code, network, learning, trl, starting, paths, together,
                 meaning, tools, refusals, fitting, overrides, good)
