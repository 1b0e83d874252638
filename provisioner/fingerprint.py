"""The fingerprint of a machine: what a plan depends on, and nothing else.

It survives a reboot, a new kernel and a renamed interface. It does not survive another BIOS setting
(SMT, NPS, SNC), a moved card, an offlined core or another cpuset ceiling. Memory sizes are not in
it: the kernel's own share of memory changes from boot to boot.
"""

from __future__ import annotations

import hashlib

from provisioner.topology import Machine

# A change to the text below changes every fingerprint; then this number changes too.
_VERSION = 1


def machine_fingerprint(machine: Machine) -> str:
    """``sha256:`` and 64 hexadecimal digits."""
    lines = [
        f"provision.fingerprint/{_VERSION}",
        f"allowed {machine.ceiling_cpus} {machine.isolated_cpus} {machine.allowed_nodes}",
        # By the % form, which takes a row as it is, in half the time: there are thousands.
        *("cpu %d %d %s %s %s %s" % cpu for cpu in machine.cpus),  # noqa: UP031
    ]
    for node in machine.nodes:
        distances = None if node.distances is None else sorted(node.distances.items())
        lines.append(f"node {node.id} {node.kind} {distances}")
    for card in machine.accelerators:
        line = f"card {card.vendor} {card.index} {card.name} {card.memory_nodes}"
        # Words that only some vendors' cards have, so that the others' lines stay as they were.
        # An NPU's number on PCI is npu-smi's word, which a later command may not have at hand.
        if card.numbers and not (card.vendor == "ascend" and card.address is not None):
            line += f" numbers {card.numbers}"
        line += "" if card.module is None else f" module {card.module}"
        line += "" if card.numa_node is None else f" node {card.numa_node}"
        lines.append(line)
    # Other network devices take no part in a plan, and virtual functions come and go.
    rdma = [nic for nic in machine.nics if nic.rdma_names and not nic.is_virtual]
    lines += [f"rdma {nic.address} {' '.join(nic.rdma_names)}" for nic in rdma]
    ends = [card.address for card in machine.accelerators] + [nic.address for nic in rdma]
    functions = {one.address: one for end in ends for one in machine.pci_path(end)}
    lines += [
        f"pci {f.address} {f.parent} {f.host_bridge} {f.numa_node} {f.local_cpus} {f.vendor} {f.device}"
        for _, f in sorted(functions.items())
    ]
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()
