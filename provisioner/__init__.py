"""provision: puts every GPU worker on the right cores and the right memory, by cgroup."""

__version__ = "0.1.0"
