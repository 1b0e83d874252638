"""`python -m provisioner.worker`: what this process would be bound to, and why. It changes nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from provisioner.errors import EXIT_DONE, EXIT_FAILED, ProvisionError
from provisioner.root import DirectoryRoot
from provisioner.worker.binding import ask_kernel
from provisioner.worker.child import Refusal
from provisioner.worker.mempolicy import probe_policy
from provisioner.worker.report import SCHEMA, format_target, to_json
from provisioner.worker.target import MEMORY_MODES, PLAN_PATHS, Target, find_target


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the target of a rank; the exit status is 1 where none is known, or something is wrong with it."""
    options = _parse(arguments)
    root = None
    cpus = nodes = None
    refused: tuple[Refusal, ...] = ()
    try:
        if options.root is not None:
            root = DirectoryRoot(options.root)
        else:
            cpus, nodes, refused = ask_kernel()
        target = find_target(
            options.rank,
            environ=os.environ,
            root=root,
            allowed_cpus=cpus,
            allowed_nodes=nodes,
            devices_per_rank=options.devices_per_rank,
            memory=options.memory,
            locality=dict(options.locality),
            plan_paths=PLAN_PATHS if options.plan is None else (options.plan,),
        )
    except (ProvisionError, OSError) as error:
        sys.stderr.write(f"Error: {error}\n")
        hint = getattr(error, "hint", "")
        sys.stderr.write(f"({hint})\n" if hint else "")
        return error.exit_status if isinstance(error, ProvisionError) else EXIT_FAILED
    if root is None:
        refused += _try_memory(target)
    if options.json:
        value = {
            "schema": SCHEMA,
            **dict(to_json(target)),  # type: ignore[call-overload]  # of a record: an object
            "allowed_cpus": to_json(cpus),
            "allowed_nodes": to_json(nodes),
            "refused": to_json(refused),
        }
        sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write(format_target(target) + "\n")
        if root is None:
            sys.stdout.write(
                f"cpuset   CPUs {cpus or 'unknown'}, memory of NUMA node {nodes or 'unknown'}\n"
            )
        for one in refused:
            sys.stdout.write(f"refused  {one}\n")
    return EXIT_FAILED if target.cpus is None or target.problems or refused else EXIT_DONE


def _try_memory(target: Target) -> tuple[Refusal, ...]:
    """What refuses the memory policy here; empty if nothing does, or none is to be set."""
    if target.memory == "off" or not target.memory_nodes:
        return ()
    mode = "bind" if target.memory == "bind" else "preferred_many"
    refusal = probe_policy(mode, target.memory_nodes)
    return () if refusal is None else (refusal,)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m provisioner.worker",
        description="Prints what a rank would be bound to here, and why. It changes nothing.",
    )
    parser.add_argument(
        "--rank", type=int, metavar="N", help="the local rank (default: LOCAL_RANK)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--memory", choices=MEMORY_MODES, help="default: the plan's, else bind")
    parser.add_argument(
        "--devices-per-rank", type=int, metavar="N", help="default: the plan's, else 1"
    )
    parser.add_argument(
        "--locality",
        type=_parse_locality,
        action="append",
        default=[],
        metavar="CARD=NODE",
        help="the NUMA node of a card that does not know its own; may be repeated",
    )
    parser.add_argument("--plan", metavar="FILE", help=f"default: {' or '.join(PLAN_PATHS)}")
    parser.add_argument("--root", metavar="DIR", help="a recorded machine instead of this one")
    return parser.parse_args(arguments)


def _parse_locality(text: str) -> tuple[str, int]:
    card, _, node = text.rpartition("=")
    if not card or not node.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}': expected CARD=NODE")
    return card, int(node)


if __name__ == "__main__":
    sys.exit(main())
