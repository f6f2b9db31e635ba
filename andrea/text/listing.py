"""Chooses the files of a folder to read: all text files, or, as in earlier versions, the files with certain endings."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from andrea.text.encodings import begins_binary
from andrea.text.findings import Findings

HEAD_BYTES = 4096  # read of each file, to recognise binary files
LINKED = "link to a file or folder that is listed already"
FoundFile = tuple[str, Path, os.stat_result]  # relative posix path, path, stat


@dataclass(frozen=True)
class Selection:
    """Which files of a folder are read, and which field of .jsonl and .parquet files; see configs/data/pystdlib.yaml."""

    by_content: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    field: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files to read, by name. entries: for each file the list that is hashed into the prepared folder's name."""

    files: list[Path]
    entries: list[list[Any]]  # [relative posix path, bytes, time of the last change], and by content crc32 of the head
    findings: Findings  # files that are not read


def list_by_ending(root: Path, suffixes: tuple[str, ...], folders_left_out: set[str]) -> Listing:
    """The file `root`, or the files under it with these endings. Links to folders are not followed. Raises OSError."""
    found: list[tuple[str, Path]] = []
    if root.is_file():
        found = [(root.name, root)]
    else:
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if name not in folders_left_out and not name.startswith(".")]
            here = Path(folder)
            paths = [here / name for name in files if name.endswith(suffixes) and not name.startswith(".")]
            found += [(path.relative_to(root).as_posix(), path) for path in paths if path.is_file()]
    found.sort()
    stats = [path.stat() for _, path in found]
    entries = [[name, stat.st_size, stat.st_mtime_ns] for (name, _), stat in zip(found, stats, strict=True)]
    return Listing([path for _, path in found], entries, Findings())


def list_by_content(root: Path) -> Listing:
    """The file `root`, or the files under it whose beginnings do not look binary.

    Links are followed, but a file or folder is read only once, even if several links lead to it. Raises OSError if
    `root` cannot be read.
    """
    findings = Findings()
    if root.is_file():
        found = [(root.name, root, root.stat())]
    else:
        found = sorted(Walk(root, findings).found(), key=lambda entry: entry[0])
    files, entries = [], []
    for name, path, stat in found:
        try:
            with open(path, "rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError:
            findings.leave_out_file("unreadable", name)
            continue
        if begins_binary(head):
            findings.leave_out_binary(name)
        else:
            files.append(path)
            entries.append([name, stat.st_size, stat.st_mtime_ns, zlib.crc32(head)])
    return Listing(files, entries, findings)


class Walk:
    """All files under a folder. Links are followed last, so that a file is listed under its own path, not a link's."""

    def __init__(self, root: Path, findings: Findings) -> None:
        self.root, self.findings = root, findings
        self.around = {identity(folder.stat()) for folder in [root.resolve(), *root.resolve().parents]}
        self.folders: set[tuple[int, int]] = set()  # identities of the folders walked
        self.found_files: set[tuple[int, int]] = set()  # identities of the files found
        self.links: list[tuple[str, Path]] = []

    def found(self) -> list[FoundFile]:
        """The files that are found, each once. Raises OSError if the root cannot be read."""
        os.scandir(self.root).close()
        files = self.walk("", self.root)
        while self.links:
            links, self.links = sorted(self.links), []
            for name, path in links:
                files += self.follow(name, path)
        return files

    def walk(self, prefix: str, folder: Path) -> list[FoundFile]:
        files, waiting = [], [(prefix, folder)]
        while waiting:
            prefix, folder = waiting.pop()
            try:
                here, entries = identity(folder.stat()), sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError:
                self.findings.leave_out_file("unreadable", prefix)
                continue
            if here in self.folders:
                continue
            if not is_hidden(prefix):
                self.folders.add(here)
            for entry in entries:
                name, path = prefix + entry.name, folder / entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((name + "/", path))
                elif is_hidden(name):
                    self.findings.leave_out_file("hidden", name)
                elif entry.is_symlink():
                    self.links.append((name, path))
                else:
                    files += self.take(name, path)
        return files

    def take(self, name: str, path: Path) -> list[FoundFile]:
        try:
            stat = path.stat()
        except OSError:
            self.findings.leave_out_file("unreadable", name)
            return []
        if not S_ISREG(stat.st_mode):
            self.findings.leave_out_file("neither file nor folder", name)
        elif identity(stat) in self.found_files and stat.st_nlink == 1:
            self.findings.leave_out_file(LINKED, name)
        else:
            self.found_files.add(identity(stat))
            return [(name, path, stat)]
        return []

    def follow(self, name: str, path: Path) -> list[FoundFile]:
        """The files that the link at `path` leads to and that are not listed yet."""
        try:
            stat = path.stat()
        except OSError:  # the target is gone, or a link to itself
            self.findings.leave_out_file("broken link", name)
            return []
        if identity(stat) in self.around:
            self.findings.leave_out_file("link to a folder that contains it", name)
        elif identity(stat) in self.folders or identity(stat) in self.found_files:
            self.findings.leave_out_file(LINKED, name)
        elif S_ISDIR(stat.st_mode):
            return self.walk(name + "/", path)
        else:
            return self.take(name, path)
        return []


def identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


# ----------------------------------------------------------------------------------------------- include and exclude


def selected(listing: Listing, selection: Selection, key: str) -> Listing:
    """The listing without the files that include and exclude leave out. key: the source's key, for messages."""
    if not selection.include and not selection.exclude:
        return listing
    include, exclude = ([pattern_of(glob) for glob in globs] for globs in (selection.include, selection.exclude))
    files, entries, findings = [], [], listing.findings
    for path, entry in zip(listing.files, listing.entries, strict=True):
        name = entry[0]
        if include and not matches(include, name):
            findings.leave_out_file(f"not matched by {key}.include", name)
        elif matches(exclude, name):
            findings.leave_out_file(f"matched by {key}.exclude", name)
        else:
            files.append(path)
            entries.append(entry)
    names = [entry[0] for entry in listing.entries]
    for option, globs, patterns in (("include", selection.include, include), ("exclude", selection.exclude, exclude)):
        for glob, pattern in zip(globs, patterns, strict=True):
            if not any(map(pattern.fullmatch, names)):
                findings.add(f"{{}} glob of {key}.{option} matched no text file", glob)
    return Listing(files, entries, findings)


def pattern_of(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression. As in a .gitignore file, it matches a path, or the first folders of a path.

    `*` and `?` stand for characters other than '/', `**` for any folders. A glob without '/' may match at any depth.
    """
    parts = [part for part in glob.split("/") if part not in ("", ".")] or [""]
    if len(parts) == 1:
        parts = ["**", *parts]
    wanted = "".join(r"(?:[^/]+/)*" if part == "**" else translated(part) + "/" for part in parts[:-1]) + (
        ".*" if parts[-1] == "**" else translated(parts[-1])
    )
    return re.compile(f"{wanted}(?:/.*)?", re.DOTALL)


def translated(part: str) -> str:
    """One part of a glob, between two slashes, as a regular expression."""
    return "".join({"*": "[^/]*", "?": "[^/]"}.get(character, re.escape(character)) for character in part)


def matches(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)
