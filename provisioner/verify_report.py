"""A report of verifying as text for a node exporter. Pure.

Source: the text exposition format of Prometheus, as the textfile collector reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from provisioner.verify import Report

_Row = tuple[Mapping[str, object], float]


def format_prometheus(report: Report) -> str:
    """Gauges of each rank and of what was found."""
    lines: list[str] = []
    ranks = [({"service": one.service, "rank": one.rank}, one) for one in report.ranks]

    def add(name: str, about: str, rows: Iterable[_Row]) -> None:
        lines.append(f"# HELP provision_{name} {about}")
        lines.append(f"# TYPE provision_{name} gauge")
        for labels, value in rows:
            told = ",".join(f'{key}="{_escape(str(one))}"' for key, one in labels.items())
            lines.append(f"provision_{name}{f'{{{told}}}' if told else ''} {value:.12g}")

    add("verify_ok", "Whether everything is as planned.", [({}, float(report.ok))])
    add(
        "findings",
        "Differences from the plan, by kind.",
        (
            ({"code": code}, count)
            for code, count in sorted(Counter(one.code for one in report.findings).items())
        ),
    )
    add("rank_ok", "Whether the rank is as planned.", ((who, float(one.ok)) for who, one in ranks))
    add("rank_planned_cpus", "CPUs planned.", ((who, len(one.planned_cpus)) for who, one in ranks))
    add(
        "rank_effective_cpus",
        "CPUs that the kernel grants.",
        ((who, len(one.effective_cpus)) for who, one in ranks if one.effective_cpus is not None),
    )
    add("rank_processes", "Processes in the slice.", ((who, one.processes) for who, one in ranks))
    add("rank_threads", "Threads in the slice.", ((who, one.threads) for who, one in ranks))
    add(
        "rank_anonymous_bytes",
        "Anonymous memory by NUMA node.",
        (
            ({**who, "node": node}, size)
            for who, one in ranks
            for node, size in sorted((one.anonymous_bytes or {}).items())
        ),
    )
    add(
        "rank_file_bytes",
        "Mapped page cache and shared memory by NUMA node.",
        (
            ({**who, "node": node}, size)
            for who, one in ranks
            for node, size in sorted((one.file_bytes or {}).items())
        ),
    )
    add(
        "rank_local_ratio",
        "Share of anonymous memory on the planned nodes.",
        ((who, one.local_share) for who, one in ranks if one.local_share is not None),
    )
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
