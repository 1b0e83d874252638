"""A tree as one compressed archive, and back, without trusting what the archive says.

Source: POSIX.1-2017, pax, "pax Interchange Format" and "ustar Interchange Format"; RFC 1952 (gzip).
Any tar unpacks one, and what it unpacks is a root.

The reader takes files, folders and links, each once, all below the archive's own top, and of pax's
extended headers the long names. It is written out here because Python's tarfile takes three times as
long, and takes more: devices, hard links, sparse files, sizes that an extended header changes.
"""

from __future__ import annotations

import io
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from provisioner.errors import ReadError, shorten
from provisioner.root import MemoryRoot

SCHEMA = "provision.snapshot/1"
# The first entry, which says what the rest is.
_SCHEMA_FILE = "provision-snapshot"

# What discovery reads of a host of 4,096 CPUs is a tenth of each of these.
MAX_ARCHIVE_BYTES = 16 << 20
MAX_UNPACKED_BYTES = 64 << 20
MAX_ENTRIES = 1 << 16

_BLOCK = 512
_CHUNK = 1 << 20
_FILE, _LINK, _FOLDER, _NAMES = b"0", b"2", b"5", b"x"
_KINDS = {
    b"1": "a hard link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a fifo",
    b"7": "a contiguous file",
    b"S": "a sparse file",
    b"L": "a long name of GNU tar",
    b"K": "a long link of GNU tar",
    b"g": "a header for all that follows",
}
_HINT = "Take the snapshot again, with provision snapshot"
# Printable ASCII, each part of it a name.
_PATH = re.compile(r"(?:(?!\.{1,2}(?:/|$))[ -.0-~]+(?:/(?!$)|$))+")
_TARGET = re.compile(r"[ -.0-~][ -~]*")
_OCTAL = re.compile(rb"[ ]*([0-7]{1,11})[ \0]*")


def pack_tree(tree: MemoryRoot) -> bytes:
    """The archive of a tree; the same tree gives the same bytes."""
    entries: list[tuple[str, bytes, str]] = [
        *((path, _FILE, text) for path, text in tree.files.items()),
        *((path, _LINK, target) for path, target in tree.links.items()),
        *((path, _FOLDER, "") for path in tree.empty_folders),
    ]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, kind, text in [(_SCHEMA_FILE, _FILE, f"{SCHEMA}\n"), *sorted(entries)]:
            member = tarfile.TarInfo(path)
            member.type = kind
            member.mode = 0o755 if kind == _FOLDER else 0o644
            data = b""
            if kind == _LINK:
                member.linkname = text
            else:
                data = text.encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    # 31: with the header and the checksum of gzip; zlib leaves time and name in it empty.
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(stream.getvalue()) + packer.flush()


def unpack_tree(data: bytes, name: str) -> MemoryRoot:
    """The tree that an archive holds.

    Args:
        data: the archive.
        name: what it is called in messages, and in the tree's.

    Raises ReadError for anything but an archive of this schema that is whole, of bounded size, and
    holds nothing that a tree of its own can't hold.
    """
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    folders: set[str] = set()
    entries = _read_entries(_decompress(data, name), name)
    first = next(entries, None)
    if first is None or first.path != _SCHEMA_FILE or first.kind != _FILE:
        raise ReadError(f"{name}: is no snapshot: its first entry is not '{_SCHEMA_FILE}'", _HINT)
    schema = first.data.decode("utf-8", "replace").strip()
    if schema != SCHEMA:
        raise ReadError(
            f"{name}: is no snapshot that can be read here: schema is '{shorten(schema)}', expected '{SCHEMA}'",
            "Read it with the version of provision that took it, or take it again",
        )
    for entry in entries:
        path = entry.path
        if path in files or path in links or path in folders:
            raise ReadError(f"{name}: entry '{shorten(path)}' is there twice: expected it once")
        if entry.kind == _FOLDER:
            folders.add(path)
        elif entry.kind == _LINK:
            links[path] = _check_target(entry, name)
        else:
            try:
                files[path] = entry.data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ReadError(
                    f"{name}: entry '{shorten(path)}' is no text: byte {error.start} is "
                    f"0x{entry.data[error.start]:02x}"
                ) from error
    _check_parents(files, links, folders, name)
    return MemoryRoot(name, files, links, folders)


class _Entry(NamedTuple):
    path: str  # checked: below the top, each part a name
    kind: bytes
    data: bytes
    target: str  # of a link


def _decompress(data: bytes, name: str) -> bytes:
    """The tar file. Raises ReadError; never more than the limit is held."""
    if not data:
        raise ReadError(f"{name}: is empty", _HINT)
    if not data.startswith(b"\x1f\x8b"):
        raise ReadError(
            f"{name}: is no snapshot: it is not compressed by gzip",
            f"{_HINT}; what was unpacked of one is read with --root",
        )
    unpacker = zlib.decompressobj(31)
    parts: list[bytes] = []
    size = 0
    try:
        while data and not unpacker.eof:
            part = unpacker.decompress(data, _CHUNK)
            parts.append(part)
            size += len(part)
            if size > MAX_UNPACKED_BYTES:
                raise ReadError(
                    f"{name}: is over {MAX_UNPACKED_BYTES} bytes when unpacked: no snapshot is"
                )
            data = unpacker.unconsumed_tail
    except zlib.error as error:
        raise ReadError(f"{name}: is no snapshot: {error}", _HINT) from error
    if not unpacker.eof:
        raise ReadError(f"{name}: is cut short: it ends within the compressed data", _HINT)
    if unpacker.unused_data:
        raise ReadError(
            f"{name}: goes on for {len(unpacker.unused_data)} bytes after its end: expected none",
            _HINT,
        )
    return b"".join(parts)


def _read_entries(data: bytes, name: str) -> Iterator[_Entry]:
    at = count = 0
    names: dict[str, str] = {}
    while True:
        header = data[at : at + _BLOCK]
        if len(header) < _BLOCK:
            raise ReadError(f"{name}: is cut short: it has no end of archive", _HINT)
        if not header.strip(b"\0"):
            break
        count += 1
        if count > MAX_ENTRIES:
            raise ReadError(f"{name}: has over {MAX_ENTRIES} entries: no snapshot has")
        place = f"{name}: entry {count}"
        size, kind = _read_header(header, place)
        at += _BLOCK
        content = data[at : at + size]
        if len(content) < size:
            raise ReadError(f"{place}: is cut short: expected {size} bytes", _HINT)
        at += (size + _BLOCK - 1) // _BLOCK * _BLOCK
        if kind == _NAMES:
            if names:
                raise ReadError(f"{place}: is a second header of long names in a row", _HINT)
            names = _read_names(content, place)
            continue
        path = names.get("path") or _read_path(header)
        if kind == _FOLDER:
            path = path.removesuffix("/")
        if _PATH.fullmatch(path) is None:
            raise ReadError(
                f"{place} '{shorten(path)}': leads out of the archive, or is no name: "
                "expected a plain path below its top"
            )
        if size and kind != _FILE:
            raise ReadError(f"{place} '{shorten(path)}': has data: expected it of a file alone")
        target = names.get("linkpath") or _text(header[157:257])
        yield _Entry(path, kind, content, target)
        names = {}
    if names or data[at:].strip(b"\0"):
        raise ReadError(f"{name}: goes on after its end of archive: expected nothing more", _HINT)


def _read_header(header: bytes, place: str) -> tuple[int, bytes]:
    """(size of the data, kind) of an entry."""
    # Its checksum is not looked at: gzip has a better one, over everything.
    if header[257:265] != b"ustar\00000":
        raise ReadError(
            f"{place}: is none of tar's as provision snapshot writes them",
            f"{_HINT}; what another tar packed is read when unpacked, with --root",
        )
    kind = header[156:157]
    if kind not in (_FILE, _LINK, _FOLDER, _NAMES):
        raise ReadError(
            f"{place} '{shorten(_read_path(header))}': is {_KINDS.get(kind, 'of an unknown kind')}: "
            "expected a file, a folder or a link"
        )
    size = _OCTAL.fullmatch(header, 124, 136)
    if size is None:
        raise ReadError(f"{place}: its size is no octal number", _HINT)
    return int(size[1], 8), kind


def _read_path(header: bytes) -> str:
    path, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{path}" if prefix else path


def _read_names(content: bytes, place: str) -> dict[str, str]:
    """The long names of an extended header: records LENGTH, KEY=VALUE, newline. Raises ReadError for others."""
    names: dict[str, str] = {}
    while content:
        match = re.match(rb"([0-9]{1,5}) (path|linkpath)=", content)
        length = int(match[1]) if match else 0
        if match is None or content[length - 1 : length] != b"\n" or length <= match.end():
            raise ReadError(f"{place}: is an extended header of more than long names", _HINT)
        names[match[2].decode()] = content[match.end() : length - 1].decode("latin-1")
        content = content[length:]
    return names


def _text(field: bytes) -> str:
    # Latin 1 takes any byte; what is not ASCII is refused later, by name.
    return field.partition(b"\0")[0].decode("latin-1")


def _check_target(entry: _Entry, name: str) -> str:
    target = entry.target
    joined = posixpath.normpath(posixpath.join(posixpath.dirname(entry.path), target))
    if _TARGET.fullmatch(target) is None or joined == ".." or joined.startswith("../"):
        raise ReadError(
            f"{name}: link '{shorten(entry.path)}' leads out of the archive, to '{shorten(target)}'"
        )
    return target


def _check_parents(
    files: dict[str, str], links: dict[str, str], folders: set[str], name: str
) -> None:
    """Raises ReadError for an entry below a file or a link: what it replaces would depend on the order."""
    todo = {posixpath.dirname(path) for path in (*files, *links, *folders)}
    checked = {""}
    while todo:
        above = todo.pop()
        if above in files or above in links:
            raise ReadError(
                f"{name}: there are entries below '{shorten(above)}', which is no folder"
            )
        checked.add(above)
        if (higher := posixpath.dirname(above)) not in checked:
            todo.add(higher)
