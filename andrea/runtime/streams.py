"""Standard output and standard error that never fail, because a lost terminal must not end a run.

Writing fails when a reader has ended (`| head`), when the stream was closed (`>&-`), when the disk of a log is full, and
when a terminal has hung up. Output that cannot be written is left out.

A terminal obeys control characters: they change its title, clear the screen or hide text. A name, a checkpoint or a text
that a model writes may hold them. On a terminal they are therefore escaped, whoever prints them.
"""

import contextlib
import errno
import io
import os
import re
import select
import shutil
import sys
from collections.abc import Iterator
from typing import Any, TextIO, final

# What a line is not broken in: text in backticks, a command up to the end of the line, a word
UNITS = re.compile(r"`[^`]*`\S*|\S*(?:python\d?|torchrun|andrea) .*|\S+")
STANDARD_DESCRIPTORS = (0, 1, 2)
CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")  # all but tab and line ends


def without_controls(text: str) -> str:
    """`text` with control characters escaped, as in \\x1b, except tabs and line ends."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable(text: str) -> str:
    """`text` on one line: all characters that cannot be printed are escaped, also those that change the direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def at_words(text: str, indent: str = "  ") -> str:
    """`text` with lines broken between words where a terminal would break them inside words. A pipe gets whole lines.

    A command, which somebody may copy, stays whole. indent: before each line that continues another.
    """
    width = shutil.get_terminal_size((sys.maxsize, 24)).columns
    lines = []
    for line in text.split("\n"):
        while len(line) > width:
            begin = len(indent) if line.startswith(indent) else 0
            places = [found.start() for found in UNITS.finditer(line) if line[begin : found.start()].strip()]
            if not places:
                break
            place = max((place for place in places if place <= width), default=places[0])
            lines.append(line[:place].rstrip())
            line = indent + line[place:]
        lines.append(line)
    return "\n".join(lines)


@final
class UnfailingFile(io.FileIO):
    """A file that drops any output that it cannot write. failure: the first error, None if there was none."""

    failure: OSError | None = None
    reported = False  # whether `new_failures` has returned the failure

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data).cast("B")
        n_bytes = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # another program has made the terminal non-blocking, and it is full
                    select.select([], [self], [])
                else:
                    rest = rest[written:]
        except OSError as error:
            self.failure = self.failure or error
        return n_bytes


@final
class TerminalText(io.TextIOWrapper):
    """The text stream of a terminal. Control characters in what is printed are escaped."""

    def write(self, text: str) -> int:
        return super().write(without_controls(text))


@final
class ControlSequences:
    """A text stream for a library that draws on the terminal: control characters are not escaped."""

    def __init__(self, stream: TerminalText) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return io.TextIOWrapper.write(self.stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def drawable(stream: Any) -> ControlSequences | None:
    """The terminal of `stream`, for a library that draws with control characters itself; None if it is no terminal."""
    return ControlSequences(stream) if isinstance(stream, TerminalText) else None


@contextlib.contextmanager
def unfailing_output() -> Iterator[None]:
    """Context in which writing to sys.stdout and sys.stderr never fails. Streams that are not files are not changed."""
    before = sys.stdin, sys.stdout, sys.stderr
    fill_closed_descriptors()
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 (stays open as long as the process)
    sys.stdout, sys.stderr = unfailing(sys.stdout), unfailing(sys.stderr)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def fill_closed_descriptors() -> None:
    """Open the null device for each closed one, which the next file, maybe a checkpoint, would get, with all output."""
    for descriptor in STANDARD_DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system gives it the lowest free number, which is `descriptor`


def unfailing(stream: TextIO | None) -> TextIO:
    """A stream that writes to the same file as `stream` and never fails. stream: None if it was closed at the start."""
    if stream is None:
        file = UnfailingFile(os.open(os.devnull, os.O_WRONLY), "w")
        file.failure = OSError(errno.EBADF, "it was closed at the start")
        return io.TextIOWrapper(io.BufferedWriter(file), encoding="utf-8")
    old = raw_file(stream)
    if not isinstance(old, io.FileIO):
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    file = UnfailingFile(old.fileno(), "w", closefd=False)
    is_unbuffered = stream.buffer is old  # python -u
    buffer: Any = file if is_unbuffered else io.BufferedWriter(file)  # a raw file serves too; the stub lacks this case
    kind = TerminalText if file.isatty() else io.TextIOWrapper
    return kind(
        buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=is_unbuffered,
    )


def raw_file(stream: Any) -> Any:
    """The raw file that a text stream writes to. A stream without such a file gives another object, or None."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def new_failures() -> list[str]:
    """One line for each standard stream that has failed; each line is returned once."""
    lines = []
    for name, stream in (("standard output", sys.stdout), ("standard error", sys.stderr)):
        file = raw_file(stream)
        if isinstance(file, UnfailingFile) and file.failure and not file.reported:
            file.reported = True
            lines.append(f"{name} cannot be written ({file.failure.strerror}); its text is lost")
    return lines


def raise_output_failure() -> None:
    """Raise the OSError of standard output, for a command that is useless without standard output."""
    file = raw_file(sys.stdout)
    if isinstance(file, UnfailingFile) and file.failure:
        raise file.failure


def tell(text: str) -> None:
    """Write to standard error. Everything that is not generated text is written there."""
    write(sys.stderr, text)


def write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # closed before the start (2>&-)
        return
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
