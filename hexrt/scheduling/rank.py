"""Upward ranks: how long the rest of a workflow takes at least, from each step to the end.

Source: Topcuoglu, Hariri, Wu 2002, "Performance-Effective and Low-Complexity Task Scheduling", section 4.1; communication is left out
in this form. Pure.
"""

from __future__ import annotations

from collections.abc import Callable

from hexrt.workflow.graph import Node, TaskGraph


def upward_ranks(graph: TaskGraph, cost_ns: Callable[[Node], float]) -> list[float]:
    """Per node, its own cost and that of the longest path behind it, in ns. O(nodes + edges)."""
    ranks = [0.0] * len(graph.nodes)
    for index in reversed(graph.order):
        node = graph.nodes[index]
        behind = 0.0
        for successor in node.successors:
            if ranks[successor] > behind:
                behind = ranks[successor]
        ranks[index] = cost_ns(node) + behind
    return ranks
