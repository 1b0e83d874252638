"""`provision status`: what runs in the plan's slices."""

from __future__ import annotations

from typing import Any

import click

from provisioner.cli.console import print_json, print_line, print_table

SCHEMA = "provision.status/1"


@click.command("status", epilog="Example: provision status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema provision.status/1).")
def command(as_json: bool) -> None:
    """Show what runs in each rank's slice.

    Whether it runs where it should, provision verify says.
    """
    from provisioner.cli.live import open_systemd
    from provisioner.cli.run import read_plan_in_force
    from provisioner.observe import rank_units

    plan, in_force = read_plan_in_force()
    bus = open_systemd()
    ranks: list[dict[str, Any]] = []
    for service in plan.services:
        for rank in service.ranks:
            state = bus.unit(rank.slice)
            units = bus.list_units(*rank_units(service, rank))
            ranks.append(
                {
                    "service": service.name,
                    "rank": rank.rank,
                    "slice": rank.slice,
                    "slice_state": state.active_state,
                    "cpus": str(rank.cpus),
                    "memory_nodes": str(rank.memory_nodes),
                    "devices": list(rank.devices),
                    "processes": _describe_processes(bus.list_processes(rank.slice)),
                    "units": [
                        {"name": one.name, "state": one.active_state, "sub_state": one.sub_state}
                        for one in units
                    ],
                }
            )
    if as_json:
        print_json(
            {
                "schema": SCHEMA,
                "mode": in_force.applied.mode,
                "complete": in_force.applied.complete,
                "ranks": ranks,
            }
        )
        return
    several = len(plan.services) > 1
    print_table(
        ["RANK", "SLICE", "CPUS", "MEMORY", "CARDS", "PROCESSES", "UNITS"],
        [
            [
                f"{one['service']} {one['rank']}" if several else str(one["rank"]),
                one["slice_state"],
                one["cpus"],
                one["memory_nodes"] or "any",
                ",".join(one["devices"]),
                ",".join(_process_cell(process) for process in one["processes"]),
                ",".join(f"{unit['name']} {unit['sub_state']}" for unit in one["units"]),
            ]
            for one in ranks
        ],
        wrapped=("CPUS", "UNITS", "CARDS", "PROCESSES"),
    )
    print_line()
    print_line(
        f"Applied as {in_force.applied.mode}"
        + ("." if in_force.applied.complete else ", and interrupted: provision apply finishes it.")
    )


def _describe_processes(pids: tuple[int, ...]) -> list[dict[str, Any]]:
    """What runs, by process id; what has ended meanwhile is left out."""
    import psutil

    found: list[dict[str, Any]] = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                found.append(
                    {
                        "pid": pid,
                        "name": process.name(),
                        "threads": process.num_threads(),
                        "rss_bytes": process.memory_info().rss,
                    }
                )
        except psutil.Error:
            continue
    return found


def _process_cell(process: dict[str, Any]) -> str:
    return f"{process['name']}[{process['pid']}] {process['rss_bytes'] / (1 << 20):.0f} MiB"
