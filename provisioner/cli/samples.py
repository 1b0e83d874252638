"""`provision samples`: the machines that ship with provision."""

from __future__ import annotations

import click

from provisioner.cli.console import print_json, print_table


@click.command("samples", epilog="Example: provision samples; provision plan --sample nps4-8gpu")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (schema provision.samples/1).")
def command(as_json: bool) -> None:
    """List the sample machines that --sample takes."""
    from provisioner.samples import list_samples

    samples = list_samples()
    if as_json:
        rows = [
            {"name": s.name, "title": s.title, "cpus": s.cpus, "nodes": s.nodes, "cards": s.cards}
            for s in samples
        ]
        print_json({"schema": "provision.samples/1", "samples": rows})
        return
    print_table(
        ("NAME", "CPUS", "NODES", "CARDS", "MACHINE"),
        [[s.name, str(s.cpus), str(s.nodes), str(s.cards), s.title] for s in samples],
    )
