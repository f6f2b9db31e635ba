"""Chooses the files of a folder to read: all text files but hidden ones, those that Git ignores, and what we wrote ourselves.

`Findings` counts and names what is not read.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import Any

from andrea.config import SourceConfig, UserError
from andrea.runtime.files import lines_of, read_plain_file
from andrea.runtime.program import typed_words
from andrea.runtime.streams import printable
from andrea.text.encodings import HEAD_BYTES, begins_binary

LARGEST_IGNORE_BYTES = 1 << 20  # of a .gitignore file
COMPRESSED = (b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf")  # bzip2, xz, zstd, 7-Zip
OTHER_FORMATS = (  # first bytes of formats that hold text, but are none; the endings, if they tell; what is said
    (b"%PDF-", (), "PDF; convert it to text, as with pdftotext"),
    (b"{\\rtf", (), "RTF; convert it to text, as with pandoc -t plain"),
    (b"PK\3\4", (".docx", ".odt", ".epub"), "office documents; convert them to text, as with pandoc -t plain"),
    (b"PK\3\4", (), "zip archives and office documents; unpack or convert them to text"),
    (b"\xd0\xcf\x11\xe0", (), "old office documents; save them as text"),
    (COMPRESSED, (), "compressed; unpack it, or compress it with gzip"),
    (b"version https://git-lfs", (), "pointers of Git LFS; fetch the files with git lfs pull"),
)
OWN = "written by ANDREA"
OWN_PAGE = b'<meta name="generator" content="ANDREA">'  # in the pages that compare and lens write
UNMATCHED = "matched no text file"
LINKED = "link to a file or folder that is listed already"
TOKEN = re.compile(r"\\.|\[[!^]?[^]]+\]|.", re.DOTALL)  # of a glob: an escaped character, a class, or a character
NAMED_AT_MOST = 3
PASSING = (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE)  # a run without such a file would have other data
FIELDS_NAMED_AT_MOST, FIELD_CHARACTERS = 12, 40
NUMBERED = re.compile(r"(\.\d+)+$")  # libm.so.6 ends in .so
FoundFile = tuple[str, Path, os.stat_result]  # relative posix path, path, stat


@dataclass
class Findings:
    """Files and documents that were left out or converted, by reason. n_file_left_out: the number of files that are not read."""

    names: dict[str, list[str]] = field(default_factory=dict)  # the first of each kind of event
    counts: Counter[str] = field(default_factory=Counter)
    binary_endings: Counter[str] = field(default_factory=Counter)
    other_fields: dict[str, dict[str, None]] = field(default_factory=dict)  # fields of records whose text is not known
    read_by: Counter[tuple[str, ...]] = field(default_factory=Counter)  # records by the fields that are their text
    n_file_left_out: int = 0

    def leave_out(self, reason: str, name: str, fields: Iterable[str] = ()) -> None:
        """Count a document as left out."""
        self.add(f"left out {{}} ({reason})", name, fields)

    def leave_out_file(self, reason: str, name: str, fields: Iterable[str] = ()) -> None:
        self.n_file_left_out += 1
        self.leave_out(reason, name, fields)

    def leave_out_unreadable(self, error: Exception, name: str, reason: str = "unreadable") -> None:
        """Count a file or folder that cannot be read. Raises the error if it may be another one the next time."""
        if isinstance(error, OSError) and error.errno in PASSING:
            raise error
        self.leave_out_file(reason, name)

    def leave_out_binary(self, name: str) -> None:
        """Count a file as left out. Binary files are named by their endings, because there may be many."""
        self.n_file_left_out += 1
        self.binary_endings[PurePosixPath(NUMBERED.sub("", name)).suffix.lower() or "without an ending"] += 1

    def lacks_field(self, wanted: str | None, fields: Iterable[str], name: str, is_file: bool) -> None:
        """Count a record, or a whole file, as left out because it lacks the field `wanted`. fields: its fields."""
        reason = f'without the field "{wanted}"' if wanted else "without a field whose name says that it is text"
        (self.leave_out_file if is_file else self.leave_out)(reason, name, fields)

    def add(self, words: str, name: str, fields: Iterable[str] = ()) -> None:
        """Count one file or document. words: the event, such as 'left out {} (binary)', with {} in place of the count.

        fields: of records, from which the user may choose one.
        """
        self.counts[words] += 1
        named = self.names.setdefault(words, [])
        if len(named) < NAMED_AT_MOST:
            named.append(printable(name))
        self.other_fields.setdefault(words, {}).update(dict.fromkeys(fields))

    def copy(self) -> Findings:
        return copy.deepcopy(self)

    def lines(self, field_key: str = "data.field") -> list[str]:
        """One line for each kind of event. field_key: the key that chooses a field."""
        lines = [
            f"the text of {count:,} records is {' + '.join(map(printable, fields))}"
            for fields, count in self.read_by.items()
            if fields != ("text",)
        ]
        for words, count in self.counts.items():
            counted = words.replace("{}", f"{count:,}", 1)  # what follows may be a role or a field, also with braces
            line = f"{counted}: {', '.join(self.names[words])}{', …' * (count > NAMED_AT_MOST)}"
            if fields := [printable(name)[:FIELD_CHARACTERS] for name in self.other_fields[words]]:
                shown = ", ".join(fields[:FIELDS_NAMED_AT_MOST]) + ", …" * (len(fields) > FIELDS_NAMED_AT_MOST)
                line += f" (fields found: {shown}; choose one with {field_key}=…)"
            lines.append(line)
        if self.binary_endings:
            ordered = sorted(self.binary_endings.items(), key=lambda item: (-item[1], item[0]))
            endings = ", ".join(f"{count:,} {printable(ending)}" for ending, count in ordered)
            lines.append(f"left out {self.binary_endings.total():,} (binary): {endings}")
        return lines


@dataclass(frozen=True)
class Listing:
    """The files to read, by name. entries: for each file the list that is hashed into the prepared folder's name."""

    files: list[Path]
    entries: list[list[Any]]  # [relative posix path, bytes, time of the last change], and of text the crc32 of its head
    findings: Findings  # files that are not read


def list_python(root: Path, folders_left_out: set[str]) -> Listing:
    """The file `root`, or the Python files under it. Links to folders are not followed. Raises OSError."""
    base, paths = (root.parent, [root]) if root.is_file() else (root, [])
    for folder, folders, files in os.walk(root):  # nothing, if it is a file
        folders[:] = [name for name in folders if name not in folders_left_out and not name.startswith(".")]
        paths += [Path(folder, name) for name in files if name.endswith(".py") and not name.startswith(".")]
    found = sorted((path.relative_to(base).as_posix(), path) for path in paths if path.is_file())
    stats = [path.stat() for _, path in found]
    entries = [[name, stat.st_size, stat.st_mtime_ns] for (name, _), stat in zip(found, stats, strict=True)]
    return Listing([path for _, path in found], entries, Findings())


def list_text(root: Path) -> Listing:
    """The file `root`, or the files under it that do not look binary, each once, whatever the links. Raises OSError."""
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
        except OSError as error:
            findings.leave_out_unreadable(error, name)
            continue
        if reason := other_format(head, path.suffix.lower()):
            findings.leave_out_file(reason, name)
        elif begins_binary(head):
            findings.leave_out_binary(name)
        else:
            files.append(path)
            entries.append([name, stat.st_size, stat.st_mtime_ns, zlib.crc32(head)])
    return Listing(files, entries, findings)


def other_format(head: bytes, ending: str) -> str:
    """Why a file that begins with `head` is not read although it may look like text; '' if it does not."""
    if OWN_PAGE in head:
        return OWN
    for start, endings, why in OTHER_FORMATS:
        if head.startswith(start) and (not endings or ending in endings):
            return why
    return ""


class Walk:
    """All files under a folder. Links are followed last, so that a file is listed under its own path, not a link's."""

    def __init__(self, root: Path, findings: Findings) -> None:
        self.root, self.findings = root, findings
        self.around = {identity(folder.stat()) for folder in [root.resolve(), *root.resolve().parents]}
        self.listed: set[tuple[int, int]] = set()  # identities of the folders walked and of the files found
        self.files: list[FoundFile] = []
        self.links: list[tuple[str, Path]] = []

    def found(self) -> list[FoundFile]:
        """The files that are found, each once. Raises OSError if the root cannot be read."""
        os.scandir(self.root).close()
        self.walk("", self.root)
        while self.links:
            links, self.links = sorted(self.links), []
            for name, path in links:
                self.take(name, path, is_link=True)
        return self.files

    def walk(self, prefix: str, folder: Path, ignore: Ignore = ()) -> None:
        waiting = [(prefix, folder, "", ignore)]  # and why the folder is left out, if it is
        while waiting:
            prefix, folder, reason, ignore = waiting.pop()
            try:
                here, entries = identity(folder.stat()), sorted(os.scandir(folder), key=lambda entry: entry.name)
            except OSError as error:
                self.findings.leave_out_unreadable(error, prefix)
                continue
            if here in self.listed:
                continue
            names = {entry.name for entry in entries}
            reason = reason or reason_to_skip(folder, names, is_root=not prefix)
            if not reason:
                self.listed.add(here)
            if ".gitignore" in names and not reason:
                ignore = (*ignore, *read_ignore(folder / ".gitignore", prefix))
            for entry in entries:
                name, path, is_folder = prefix + entry.name, folder / entry.name, entry.is_dir(follow_symlinks=False)
                why = reason or ("hidden" if entry.name.startswith(".") else "") or is_ignored(ignore, name, is_folder)
                if is_folder:
                    waiting.append((name + "/", path, why, ignore))
                elif why:
                    self.findings.leave_out_file(why, name)
                elif entry.is_symlink():
                    self.links.append((name, path))
                else:
                    self.take(name, path)

    def take(self, name: str, path: Path, is_link: bool = False) -> None:
        """Add the file at `path`, or the files that a link there leads to, if they are not listed yet."""
        try:
            stat = path.stat()
        except OSError as error:  # of a link: the target is gone, or is the link itself
            self.findings.leave_out_unreadable(error, name, "broken link" if is_link else "unreadable")
            return
        here = identity(stat)
        if here in self.around:
            self.findings.leave_out_file("link to a folder that contains it", name)
        elif here in self.listed and (is_link or stat.st_nlink == 1):
            self.findings.leave_out_file(LINKED, name)
        elif S_ISDIR(stat.st_mode):
            self.walk(name + "/", path)
        elif S_ISREG(stat.st_mode):
            self.listed.add(here)
            self.files.append((name, path, stat))
        else:
            self.findings.leave_out_file("neither file nor folder", name)


def identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def reason_to_skip(folder: Path, names: set[str], is_root: bool) -> str:
    """Why a folder with these entries is left out; '' if it is not. What the user names, the root, is read if it is not ours."""
    if is_own(folder, names):
        return OWN
    if is_root:
        return ""
    if folder.name == "node_modules" or "pyvenv.cfg" in names:
        return "installed packages"
    if folder.name.startswith("python_chat-") and {"train.jsonl", "held_out.jsonl"} <= names:  # of data=python_chat
        return OWN
    has_weights = any(name.endswith((".safetensors", "pytorch_model.bin")) for name in names)
    return "beside the weights of a model" if has_weights and {"config.json", "adapter_config.json"} & names else ""


def is_own(folder: Path, names: set[str]) -> bool:
    """Whether this program wrote the folder: its entries have names that nobody else uses together."""
    a_run = {"config.yaml", "metrics.jsonl"} <= names or {"run.json", "checkpoints"} <= names
    a_checkpoint = {"manifest.json", "state.json"} <= names
    prepared = "tokenizer.json" in names and ("meta.json" in names or folder.name.endswith(".partial"))
    downloaded = folder.name == "downloads" and bool(names) and names <= {"shakespeare", "fineweb_edu"}
    beside_runs = folder.name in ("sweeps", "wandb") and any(folder.parent.glob("*/run.json"))
    return a_run or a_checkpoint or prepared or downloaded or beside_runs or "modeling_andrea.py" in names


# ------------------------------------------------------------------------------------------------------- .gitignore

Ignore = tuple[tuple[str, re.Pattern[str], bool, bool], ...]  # folder, pattern, is for folders alone, is an exception


def read_ignore(path: Path, folder: str) -> Ignore:
    """The rules of a .gitignore file. folder: its folder's path with a slash at the end, or ''."""
    try:
        text = read_plain_file(path, LARGEST_IGNORE_BYTES).decode("utf-8-sig", "replace")
    except (OSError, ValueError):
        return ()
    rules = []
    for line in lines_of(text):
        glob = line if line.endswith("\\ ") else line.rstrip()
        is_exception = glob.startswith("!")
        glob = glob[is_exception:]
        if glob.strip("/") and not glob.startswith("#"):
            rules.append((folder, re.compile(regex_of(glob), re.DOTALL), glob.endswith("/"), is_exception))
    return tuple(rules)


def is_ignored(rules: Ignore, name: str, is_folder: bool) -> str:
    """'ignored by .gitignore', or ''. As in Git, the last rule that matches decides."""
    for folder, pattern, for_folders, is_exception in reversed(rules):
        if (is_folder or not for_folders) and name.startswith(folder) and pattern.fullmatch(name, len(folder)):
            return "" if is_exception else "ignored by .gitignore"
    return ""


# ----------------------------------------------------------------------------------------------- include and exclude


def selected(listing: Listing, config: SourceConfig, prefix: str) -> Listing:
    """The listing without the files that include and exclude leave out. prefix: of their names. Raises UserError."""
    if not config.include and not config.exclude:
        return listing
    include, exclude = ([pattern_of(glob) for glob in globs] for globs in (config.include, config.exclude))
    files, entries, findings = [], [], listing.findings
    for path, entry in zip(listing.files, listing.entries, strict=True):
        name = entry[0]
        if include and not matches(include, name):
            findings.leave_out_file(f"not matched by {prefix}include", name)
        elif matches(exclude, name):
            findings.leave_out_file(f"matched by {prefix}exclude", name)
        else:
            files.append(path)
            entries.append(entry)
    names = [entry[0] for entry in listing.entries]
    for option, globs, patterns in (("include", config.include, include), ("exclude", config.exclude, exclude)):
        for glob, pattern in zip(globs, patterns, strict=True):
            if any(map(pattern.fullmatch, names)):
                continue
            if re.fullmatch(r"\[.*\]", glob):  # meant as a list; as a glob it stands for one character
                parts = [part.strip(" '\"") for part in glob[1:-1].split(",")]
                words = " ".join(typed_words(**{f"{prefix}{option}": part}) for part in parts)
                raise UserError(
                    f"{prefix}{option}={glob} matches no file: a glob in brackets stands for one of these characters; type the key "
                    f"once for each glob: {words}"
                )
            findings.add(f"{{}} glob of {prefix}{option} {UNMATCHED}", glob)
    return Listing(files, entries, findings)


def pattern_of(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression that matches a path, or the first folders of a path."""
    return re.compile(f"{regex_of(glob)}(?:/.*)?", re.DOTALL)


def regex_of(glob: str) -> str:
    """A glob of a .gitignore file as a regular expression.

    `*` and `?` stand for characters other than '/', `**` for any folders, `[ab]` for one of these characters. A glob
    without '/' but at its end may match at any depth.
    """
    parts = [part for part in glob.split("/") if part not in ("", ".")] or [""]
    if len(parts) == 1 and not glob.startswith("/"):
        parts = ["**", *parts]
    return "".join(r"(?:[^/]+/)*" if part == "**" else translated(part) + "/" for part in parts[:-1]) + (
        ".*" if parts[-1] == "**" else translated(parts[-1])
    )


def translated(part: str) -> str:
    """One part of a glob, between two slashes, as a regular expression.

    Text between two stars is looked for once, in an atomic group, because going back cannot help, and could take hours.
    """
    chunks = [""]  # between two stars
    for token in TOKEN.findall(part):
        if token == "*":
            chunks.append("")
        elif len(token) > 2 and token.startswith("["):
            chunks[-1] += class_of(token)
        else:
            chunks[-1] += "[^/]" if token == "?" else re.escape(token[-1])
    first, *inner = chunks
    last = f"[^/]*{inner.pop()}" if inner else ""
    return first + "".join(f"(?>[^/]*?{chunk})" for chunk in inner) + last


def class_of(token: str) -> str:
    """A glob's class of characters as a regular expression. One that no character fits, such as [s-2], stands for itself."""
    negated = token[1] in "!^"
    inside = re.sub(r"[^\w-]", r"\\\g<0>", token[1 + negated : -1])
    try:
        return re.compile(f"[{'^' * negated}{inside}]").pattern
    except re.error:
        return re.escape(token)


def matches(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)
