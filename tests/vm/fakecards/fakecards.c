// SPDX-License-Identifier: GPL-2.0-only
/*
 * fakecards: accelerators for the eyes of discovery, without hardware.
 *
 * Every card gets a PCI root bus of its own, whose configuration space is
 * answered from this module: /sys/bus/pci/devices/DDDD:BB:DD.F then exists with
 * the wanted vendor, class and numa_node, made by the kernel's own PCI code.
 * NVIDIA cards also get what NVIDIA's driver shows of a card under
 * /proc/driver/nvidia/gpus/DDDD:BB:DD.F/ (information, numa_status), in the
 * words of nv-procfs.c of NVIDIA/open-gpu-kernel-modules.
 *
 *   modprobe fakecards cards=0000:a1:00.0@0,0001:05:00.0@-1,0000:c1:00.0@1=1002:74a1:038000
 *
 * ADDRESS@NODE[+MEMORY_NODE][=VENDOR:DEVICE:CLASS], comma-separated: NODE becomes
 * numa_node (-1: the kernel knows none), MEMORY_NODE is the node that numa_status
 * names as the card's own memory. The default is an NVIDIA H100, class 0x030200.
 *
 * The module is x86 only (struct pci_sysdata) and cannot be unloaded: a host
 * does not lose its cards, and a test machine is thrown away.
 */
#include <linux/kernel.h>
#include <linux/list.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>

#define NVIDIA 0x10de

struct card {
	struct pci_sysdata sysdata;	/* domain and node: where x86 looks for them */
	struct resource busn;
	unsigned int bus, slot, vendor, device, class;
	int memory_node, minor;
	char name[24];
};

static char *cards = "";
module_param(cards, charp, 0444);
MODULE_PARM_DESC(cards, "ADDRESS@NODE[+MEMORY_NODE][=VENDOR:DEVICE:CLASS],...");

static struct card *card_of(struct pci_bus *bus)
{
	return container_of((struct pci_sysdata *)bus->sysdata, struct card, sysdata);
}

static int config_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	const struct card *card = card_of(bus);
	u32 word = 0;	/* no BARs, no capabilities, header type 0, one function */

	if (devfn != PCI_DEVFN(card->slot, 0)) {
		*value = ~0U;
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	switch (where & ~3) {
	case PCI_VENDOR_ID:
	case PCI_SUBSYSTEM_VENDOR_ID:
		word = card->device << 16 | card->vendor;
		break;
	case PCI_CLASS_REVISION:
		word = card->class << 8 | 0xa1;
		break;
	}
	word >>= 8 * (where & 3);
	*value = size == 4 ? word : word & ((1U << 8 * size) - 1);
	return PCIBIOS_SUCCESSFUL;
}

static int config_write(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 value)
{
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops config_ops = { .read = config_read, .write = config_write };

static int information_show(struct seq_file *file, void *unused)
{
	const struct card *card = file->private;

	seq_puts(file, "Model: \t\t Fake Card\n");
	seq_puts(file, "IRQ:   \t\t 0\n");
	seq_printf(file, "GPU UUID: \t GPU-fa4ecafe-0000-4000-8000-%012x\n", card->minor);
	seq_puts(file, "Video BIOS: \t ??.??.??.??.??\n");
	seq_puts(file, "Bus Type: \t PCIe\n");
	seq_puts(file, "DMA Size: \t 52 bits\n");
	seq_puts(file, "DMA Mask: \t 0xfffffffffffff\n");
	seq_printf(file, "Bus Location: \t %s\n", card->name);
	seq_printf(file, "Device Minor: \t %u\n", card->minor);
	seq_puts(file, "GPU Excluded:\t No\n");
	return 0;
}

static int numa_status_show(struct seq_file *file, void *unused)
{
	const struct card *card = file->private;

	seq_printf(file, "Node:      %d\n", card->memory_node);
	seq_puts(file, "Status:    online\n");
	return 0;
}

/* false: "text" is not of the form that the head of this file gives */
static bool parse(char *text, struct card *card)
{
	unsigned int domain;
	int node, used = 0;

	card->memory_node = NUMA_NO_NODE;
	card->vendor = NVIDIA;
	card->device = 0x2330;
	card->class = 0x030200;
	/* Function 0 alone: the PCI scan asks for no other where it is missing. */
	if (sscanf(text, "%x:%x:%x.0@%d%n", &domain, &card->bus, &card->slot, &node, &used) != 4)
		return false;
	text += used;
	if (*text == '+') {
		if (sscanf(text, "+%d%n", &card->memory_node, &used) != 1)
			return false;
		text += used;
	}
	if (*text == '=') {
		if (sscanf(text, "=%x:%x:%x%n", &card->vendor, &card->device, &card->class,
			   &used) != 3)
			return false;
		text += used;
	}
	card->sysdata.domain = domain;
	card->sysdata.node = node;
	snprintf(card->name, sizeof(card->name), "%04x:%02x:%02x.0", domain, card->bus,
		 card->slot);
	return !*text;
}

static void add_card(struct card *card, struct proc_dir_entry *gpus)
{
	LIST_HEAD(resources);
	struct proc_dir_entry *directory;
	struct pci_bus *bus;

	card->busn.name = card->name;
	card->busn.start = card->bus;
	card->busn.end = card->bus;
	card->busn.flags = IORESOURCE_BUS;
	pci_add_resource(&resources, &card->busn);
	bus = pci_scan_root_bus(NULL, card->bus, &config_ops, &card->sysdata, &resources);
	if (!bus) {
		pr_err("fakecards: no bus for %s\n", card->name);
		return;
	}
	pci_bus_add_devices(bus);
	if (card->vendor != NVIDIA)
		return;
	directory = proc_mkdir(card->name, gpus);
	if (!directory)
		return;
	proc_create_single_data("information", 0444, directory, information_show, card);
	if (card->memory_node != NUMA_NO_NODE)
		proc_create_single_data("numa_status", 0444, directory, numa_status_show, card);
}

static int __init fakecards_init(void)
{
	char *copy = kstrdup(cards, GFP_KERNEL), *rest = copy, *text;
	struct proc_dir_entry *gpus = NULL;
	unsigned int count = 1, i;
	struct card *all;

	for (text = cards; *text; text++)
		count += *text == ',';
	/* Kept for as long as the module is, which is for good. */
	all = kcalloc(count, sizeof(*all), GFP_KERNEL);
	if (!copy || !all)
		goto refuse;
	/* All are read before the first is made: a bus in use cannot be taken back. */
	for (i = 0; (text = strsep(&rest, ",")) != NULL; i++) {
		if (!parse(text, &all[i])) {
			pr_err("fakecards: cannot read the card \"%s\"\n", text);
			goto refuse;
		}
		all[i].minor = i;
	}
	kfree(copy);
	pci_lock_rescan_remove();
	for (i = 0; i < count; i++) {
		if (all[i].vendor == NVIDIA && !gpus && proc_mkdir("driver/nvidia", NULL))
			gpus = proc_mkdir("driver/nvidia/gpus", NULL);
		add_card(&all[i], gpus);
	}
	pci_unlock_rescan_remove();
	return 0;
refuse:
	kfree(copy);
	kfree(all);
	return -EINVAL;
}
module_init(fakecards_init);

MODULE_DESCRIPTION("PCI accelerators that are not there, for tests");
MODULE_LICENSE("GPL");
