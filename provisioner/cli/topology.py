"""`provision topology`: the machine, as it hangs together."""

from __future__ import annotations

import click

from provisioner.cli.console import bold, print_json, print_line, print_notes, print_table
from provisioner.cli.options import (
    Where,
    add_npu_smi,
    machine_options,
    npu_smi_option,
    read_machine,
)


@click.command("topology", epilog="Example: provision topology --root captures/host7 --json")
@machine_options
@npu_smi_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema provision.topology/1).")
@click.option(
    "--verbose", "-v", is_flag=True, help="Say where each fact came from, and list every core."
)
def command(
    root: Where,
    sample: str | None,
    within: str,
    npu_smi: str | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Show packages, NUMA nodes, cores, cards and network devices, and what is odd."""
    from provisioner.fingerprint import machine_fingerprint
    from provisioner.oddities import DRIVERS
    from provisioner.sentences import count
    from provisioner.topology_report import (
        card_rows,
        nic_rows,
        node_rows,
        topology_notes,
        topology_to_json,
    )

    machine = read_machine(root, sample, within)
    if npu_smi is not None:
        from provisioner.request import PlacementRequest

        machine, _ = add_npu_smi(machine, PlacementRequest(), npu_smi)
    if as_json:
        print_json(topology_to_json(machine))
        return
    packages = {cpu.package for cpu in machine.cpus if cpu.package is not None}
    smt = sorted({len(core.cpus) for core in machine.cores})
    print_line(
        f"{count(len(packages), 'package') if packages else '? packages'}, "
        f"{count(len(machine.nodes), 'NUMA node')}, {count(len(machine.cores), 'core')}, "
        f"{count(len(machine.cpus), 'CPU')} (SMT {'/'.join(str(one) for one in smt)}), "
        f"{count(len(machine.accelerators), 'card')}, {count(len(machine.nics), 'network device')}"
    )
    print_line(f"CPUs online {machine.online_cpus}, allowed {machine.allowed_cpus or 'none'}")
    for name, cpus in (("offline", machine.offline_cpus), ("isolated", machine.isolated_cpus)):
        if cpus:
            print_line(f"CPUs {name} {cpus}")
    print_line(f"Fingerprint {machine_fingerprint(machine)}")
    print_line()
    print_table(
        ("NODE", "KIND", "MEMORY", "PACKAGE", "CORES", "CPUS", "LLCS", "CARDS", "DISTANCES"),
        node_rows(machine),
        wrapped=("CPUS", "DISTANCES", "CARDS"),
    )
    if machine.accelerators:
        print_line()
        print_table(
            ("CARD", "PCI", "MODEL", "NODE", "KNOWN BY", "LOCAL CPUS", "BELOW", "RDMA"),
            card_rows(machine),
            wrapped=("LOCAL CPUS", "BELOW", "RDMA", "MODEL"),
        )
    if machine.nics:
        print_line()
        print_table(
            ("NETWORK", "PCI", "NODE", "KNOWN BY", "BELOW"),
            nic_rows(machine),
            wrapped=("BELOW", "NETWORK"),
        )
    print_notes("Odd about this machine", topology_notes(machine))
    if verbose:
        print_line()
        print_line(bold("Where each fact came from"))
        for fact, source in (*machine.sources, ("ceiling", machine.ceiling.source)):
            print_line(f"  {fact}: {source}")
        for card in machine.accelerators:
            source = _SOURCES.get(card.source) or DRIVERS[card.vendor]
            print_line(f"  card {card.name}: named by {source}")
        print_line()
        print_table(
            ("CORE", "CPUS", "PACKAGE", "DIE", "LLC", "NODE"),
            (
                [
                    str(core.id),
                    str(core.cpus),
                    *("?" if one is None else str(one) for one in core[2:]),
                ]
                for core in machine.cores
            ),
        )


_SOURCES = {
    "ubcore": "the unified bus (/sys/class/ubcore)",
    "pci": "the PCI bus",
    "hwloc": "hwloc's XML",
    "dev": "/dev alone",
}
