"""How this host reaches Debian: read from its own apt configuration, told to mmdebstrap.

No address of a mirror is written here, so the machines are made from the mirror, through the
proxy and under the checks that the host's administrator chose for the host itself.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES_VARIABLE = "PROVISION_VM_SOURCES"

# Of what apt knows about fetching, that which a host needs to reach its mirror at all.
_OPTIONS = re.compile(r"Acquire::(?:https?::|Check-|ForceIPv|Retries)")
_POCKETS = ("", "-updates", "-security")


class NoSourcesError(Exception):
    """The host's apt configuration names no Debian archive."""


@dataclass(frozen=True, slots=True)
class Source:
    """One archive: what a line of sources.list(5) says, without the suite."""

    uri: str
    pocket: str

    def line(self, suite: str) -> str:
        """The line of sources.list(5) that reaches SUITE in this archive."""
        return f"deb {self.uri} {suite}{self.pocket} main"


def parse_release(text: str) -> str:
    """The codename in the text of os-release(5), "" where there is none."""
    found = re.search(r'^VERSION_CODENAME="?([^"\n]*)', text, re.MULTILINE)
    return found[1] if found else ""


def parse_deb822(text: str, codename: str) -> Iterator[Source]:
    """The Debian archives in the text of a *.sources file: deb822 stanzas."""
    for stanza in re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)):
        fields = {
            key.lower(): value.split()
            for key, value in re.findall(r"^([^\s:]+):((?:.*)(?:\n[ \t].*)*)", stanza, re.MULTILINE)
        }
        if "deb" not in fields.get("types", []) or fields.get("enabled") == ["no"]:
            continue
        signed = " ".join(fields.get("signed-by", []))
        for uri in fields.get("uris", []):
            for suite in fields.get("suites", []):
                yield from _source(uri, suite, fields.get("components", []), signed, codename)


def parse_one_line(text: str, codename: str) -> Iterator[Source]:
    """The Debian archives in the text of a *.list file: one line each."""
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if not found:
            continue
        signed = re.search(r"signed-by=(\S+)", found[1] or "")
        yield from _source(
            found[2], found[3], found[4].split(), signed[1] if signed else "", codename
        )


def _source(
    uri: str, suite: str, components: list[str], signed: str, codename: str
) -> Iterator[Source]:
    # Others publish under Debian's suite names too; theirs have a keyring of their own.
    if "main" not in components or (signed and "debian-archive" not in signed):
        return
    for pocket in _POCKETS:
        if codename and suite == codename + pocket:
            yield Source(uri, pocket)


def sources(suite: str, root: Path = Path("/")) -> str:
    """sources.list(5) for SUITE, made from the one that the host has for its own suite."""
    override = os.environ.get(SOURCES_VARIABLE)
    if override:
        return Path(override).read_text().replace("@SUITE@", suite)
    release = root / "etc/os-release"
    codename = parse_release(release.read_text()) if release.exists() else ""
    etc = root / "etc/apt"
    found: list[Source] = []
    for path in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*.list"))]:
        if path.is_file():
            found += parse_one_line(path.read_text(), codename)
    for path in sorted((etc / "sources.list.d").glob("*.sources")):
        found += parse_deb822(path.read_text(), codename)
    if not any(source.pocket == "" for source in found):
        raise NoSourcesError(
            f"no Debian archive for the suite {codename or '(unknown)'!r} in {etc}; "
            f"{SOURCES_VARIABLE} may name a sources.list with @SUITE@ in place of the suite"
        )
    return "".join(f"{source.line(suite)}\n" for source in dict.fromkeys(found))


def options() -> str:
    """apt.conf(5) with the host's ways to its mirror: proxies, certificates, checks."""
    dump = subprocess.run(
        ["apt-config", "dump", "--format", '%f "%v";%n', "Acquire"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line for line in dump.splitlines() if _OPTIONS.match(line)]
    return "\n".join(['Acquire::Languages "none";', *lines, ""])
