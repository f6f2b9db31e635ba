"""Bytes of files as UTF-8 text: blocks that end after a line, recognised encodings, and conversion to UTF-8."""

import codecs
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

PIECE_BYTES = 1 << 20
SPOOLED_BYTES = 1 << 24  # a converted file that is larger is held in the system's temporary folder
OpenFile = Callable[[], IO[bytes]]

HEAD_BYTES = 4096  # read of each file, to recognise its kind
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"  # the first bytes of these formats
UTF_8_MARK = codecs.BOM_UTF8
MARKS = {  # byte-order marks; UTF-32's before UTF-16's, with which it begins
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
NOT_IN_TEXT = bytes({*range(32), 127} - {*b"\b\t\n\v\f\r\x1b"})  # control characters that no text file has
ASCII = bytes(range(128))
LATIN_1_SHARE = 0.3  # of bytes beyond ASCII; European text in Latin-1 has about a tenth, other alphabets have most
BINARY, HAS_NUL = "binary", "with a NUL byte, which no text has"
DAMAGED, UNKNOWN = "with damaged UTF-8", "in an unknown encoding; convert to UTF-8"


@dataclass(frozen=True)
class Form:
    """The encoding of a file's bytes. If it is None, `fault` says why they are not text, and `place` where."""

    encoding: str | None
    size: int  # bytes of the text in UTF-8
    fault: str = ""
    place: str = ""


def whole_blocks(file: IO[bytes], start: int, stop: int) -> Iterator[bytes]:
    """Bytes start … stop in blocks of at most about PIECE_BYTES. A block ends after a line, or else after a character."""
    file.seek(start)
    left, rest = stop - start, b""
    while left and (read := file.read(min(left, PIECE_BYTES))):
        left -= len(read)
        block = rest + read
        end = len(block) if not left else block.rfind(b"\n") + 1 or last_character_end(block)
        yield block[:end]
        rest = block[end:]
    if rest:  # the file has become shorter
        yield rest


def last_character_end(block: bytes) -> int:
    """The index after the last whole UTF-8 character of `block`."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(block)
    return len(block) - len(decoder.getstate()[0])


def cut_at(file: IO[bytes], size: int) -> int:
    """Where the held-out last tenth of a document begins: at the start of a line, or else of a character."""
    cut = size * 9 // 10
    file.seek(cut)
    tail = file.read(min(PIECE_BYTES, size - cut))
    line_end = tail.find(b"\n") + 1
    if 0 < line_end and cut + line_end < size:
        return cut + line_end
    while tail and tail[0] & 0xC0 == 0x80:  # not the first byte of a character
        tail, cut = tail[1:], cut + 1
    return cut


def is_utf8(data: bytes) -> bool:
    """Whether `data` is UTF-8 without NUL bytes."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


# --------------------------------------------------------------------------------------------- recognised by content


def begins_binary(head: bytes) -> bool:
    """Whether a file that begins with `head` cannot be text. False does not mean that all of the file is text."""
    if head.startswith((GZIP, PARQUET)) or encoding_of(head) != "utf-8" or is_utf8(head[: last_character_end(head)]):
        return False
    return b"\0" in head or head.translate(None, NOT_IN_TEXT) != head


def encoding_of(head: bytes) -> str:
    """The encoding that the first HEAD_BYTES of a file show: by a mark, or UTF-16 without one; else UTF-8, if it is text."""
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return encoding
    for encoding in ("utf-16-le", "utf-16-be"):
        if b"\0" in head and reads_as(head, encoding):
            return encoding
    return "utf-8"


def reads_as(head: bytes, encoding: str) -> bool:
    """Whether `head` is ordinary text in this encoding. Other bytes soon give a character that nobody has assigned."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    n_ascii = sum(character < "\x80" for character in text)
    is_evident = 2 * n_ascii >= len(text) >= 4 or (n_ascii and len(text) >= 64)
    return bool(is_evident) and all(character.isprintable() or character.isspace() for character in text)


def recognise(open_file: OpenFile) -> Form:
    """The encoding of a file: UTF-8, UTF-16, UTF-32, Latin-1 or Windows-1252. Raises OSError, EOFError, zlib.error."""
    with open_file() as file:
        encoding = encoding_of(file.read(HEAD_BYTES))
    if encoding != "utf-8":
        return converted_form(open_file, encoding)
    decoder, size, n_line = codecs.getincrementaldecoder("utf-8")(), 0, 0
    for block in itertools.chain(blocks_of(open_file), [b""]):
        size += len(block)
        try:
            if b"\0" in block:
                at = size - len(block) + block.index(b"\0")
                n_line += block[: block.index(b"\0")].count(b"\n")
                return Form(None, 0, HAS_NUL, place_of(at, n_line)) if at >= HEAD_BYTES else Form(None, 0, BINARY)
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:  # its object begins with the bytes that the decoder had kept
            n_line += error.object[: error.start].count(b"\n")
            return recognise_8_bits(open_file, place_of(size - len(error.object) + error.start, n_line))
        n_line += block.count(b"\n")
    return Form("utf-8", size)


def place_of(n_byte: int, n_line: int) -> str:
    """A place in a file, after n_byte bytes and n_line line ends."""
    return f"at byte {n_byte:,}, in line {n_line + 1:,}"


def recognise_8_bits(open_file: OpenFile, place: str) -> Form:
    """The encoding of a file that is not UTF-8. place: of the first byte that is not."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    size = beyond_ascii = valid = invalid = 0  # bytes; bytes; characters that are valid UTF-8; bytes that are not
    uses_windows_1252 = False
    for block in blocks_of(open_file):
        if block.translate(None, NOT_IN_TEXT) != block:
            return Form(None, 0, BINARY)
        high = block.translate(None, ASCII)
        size, beyond_ascii = size + len(block), beyond_ascii + len(high)
        uses_windows_1252 |= any(byte < 0xA0 for byte in set(high))
        text = decoder.decode(block)
        beyond = [character for character in set(text) if character > "\x7f"]
        bad = sum(text.count(character) for character in beyond if "\udc80" <= character <= "\udcff")
        valid, invalid = valid + sum(map(text.count, beyond)) - bad, invalid + bad
    if valid > invalid:
        return Form(None, 0, DAMAGED, place)
    if beyond_ascii > LATIN_1_SHARE * size:
        return Form(None, 0, UNKNOWN)
    return converted_form(open_file, "cp1252" if uses_windows_1252 else "latin-1")


def converted_form(open_file: OpenFile, encoding: str) -> Form:
    size = 0
    try:
        for block in converted_blocks(open_file, encoding):
            if b"\0" in block:
                return Form(None, 0, BINARY)
            size += len(block)
    except UnicodeError:
        return Form(None, 0, UNKNOWN)
    return Form(encoding, size)


def blocks_of(open_file: OpenFile) -> Iterator[bytes]:
    with open_file() as file:
        while block := file.read(PIECE_BYTES):
            yield block


def converted_blocks(open_file: OpenFile, encoding: str) -> Iterator[bytes]:
    """The file's text as blocks of UTF-8. Raises UnicodeError if the file does not have this encoding."""
    for text in codecs.iterdecode(blocks_of(open_file), encoding):
        yield text.encode()


def open_converted(open_file: OpenFile, encoding: str) -> IO[bytes]:
    """The file's text in UTF-8, as a temporary file at its beginning."""
    spooled = tempfile.SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115 (the caller closes it)
    for block in converted_blocks(open_file, encoding):
        spooled.write(block)
    spooled.seek(0)
    return spooled
