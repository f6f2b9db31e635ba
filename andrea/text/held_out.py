"""The split of a source's documents: which are for training, and which are held out for validation.

A document is held out by the hash of its name. Of texts that stand on both sides, all copies go to one side. With few
documents, the last tenth of each is held out. Conversations are never cut: a tenth of them is held out, or those of a file.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cached_property

from andrea.config import UserError
from andrea.text.formats import Document, read_pieces

HELD_OUT_BELOW = 26  # a document is held out if its hash's first byte is less than this: about a tenth of the documents
FEWEST_DOCUMENTS = 10  # with fewer documents, the last tenth of each document is held out
HELD_OUT_FILE = "held_out.jsonl"  # in a folder of conversations or below it: exactly these are held out


class HeldOut:
    """Which documents of one source are held out.

    documents: iterates over all documents, in a fixed order. names: of the source's files. where: the source as messages
    name it. is_library: Python's library, of whose documents none is moved.
    """

    def __init__(
        self,
        documents: Callable[[], Iterator[Document]],
        names: Collection[str],
        where: str,
        is_chat: bool,
        is_library: bool,
    ) -> None:
        self.documents, self.names, self.where = documents, names, where
        self.is_chat, self.is_library = is_chat, is_library

    @cached_property
    def cuts_documents(self) -> bool:
        """Whether the last tenth of each document is held out: they are few, or all hashes fall on one side."""
        if self.is_chat:
            return False
        sides, count = set(), 0
        for document in self.documents():
            count += 1
            sides.add(self.is_held_out(document))
            if count >= FEWEST_DOCUMENTS and len(sides) == 2:
                return False
        return True

    def is_held_out(self, document: Document) -> bool:
        """Whether a whole document is held out: by its name's hash, or, of copies on both sides, by their text's hash."""
        if self.is_chat:
            if self.has_held_out_file:
                return is_held_out_file(document.key.partition("#")[0])
            return size_and_digest(document)[1] in self.held_out_conversations
        text = size_and_digest(document) if document.size in self.copied_sizes else None
        return text[1][0] < HELD_OUT_BELOW if text in self.copies else is_held_out(document.key)

    @property
    def has_held_out_file(self) -> bool:
        return any(is_held_out_file(name) for name in self.names)

    def held_out_twice(self) -> int:
        """The number of held-out conversations that are in another file too. Raises UserError if one side has none."""
        if not (self.is_chat and self.has_held_out_file):
            return 0
        sides: dict[bool, set[bytes]] = {True: set(), False: set()}
        for document in self.documents():
            sides[self.is_held_out(document)].add(size_and_digest(document)[1])
        if not sides[False]:
            raise UserError(
                f"{self.where} has conversations in {HELD_OUT_FILE} alone, and none to train on; add some, or rename "
                f"this file to train on nine tenths of it"
            )
        if not sides[True]:
            raise UserError(f"{self.where} has no conversation in {HELD_OUT_FILE}; add some, or remove the file")
        return len(sides[True] & sides[False])

    @cached_property
    def held_out_conversations(self) -> set[bytes]:
        """The digests of a tenth of the conversations, at least of one. All copies of a conversation have one digest."""
        digests = sorted({size_and_digest(document)[1] for document in self.documents()})
        return set(digests[: max(1, len(digests) * HELD_OUT_BELOW // 256)])

    @cached_property
    def copied_sizes(self) -> set[int]:
        return {size for size, _ in self.copies}

    @cached_property
    def copies(self) -> Counter[tuple[int, bytes]]:
        """Size and digest of each text that the hashes of names put on both sides of the split, and how often it is there.

        Only held-out texts are kept in memory, a tenth. Python's library is left as it is, because its split is
        documented, and figures of many runs depend on it: it has two such texts, of 135 bytes together.
        """
        if self.is_library or self.is_chat:
            return Counter()
        held_out = Counter(size_and_digest(each) for each in self.documents() if is_held_out(each.key))
        sizes = {size for size, _ in held_out}
        others = (each for each in self.documents() if each.size in sizes and not is_held_out(each.key))
        copied = Counter(text for text in map(size_and_digest, others) if text in held_out)
        return Counter({text: count + held_out[text] for text, count in copied.items()})


def is_held_out_file(name: str) -> bool:
    """Whether a file of a folder holds the conversations that are held out. name: its relative path."""
    return name.rpartition("/")[2].removesuffix(".gz") == HELD_OUT_FILE


def is_held_out(key: str) -> bool:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()[0] < HELD_OUT_BELOW


def size_and_digest(document: Document) -> tuple[int, bytes]:
    digest = hashlib.blake2b(digest_size=16)
    for text in read_pieces(document, 0, document.size):
        digest.update(text.encode())
    return document.size, digest.digest()
