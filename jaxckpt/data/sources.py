"""What a token store is made from: documents, and where they are found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text, whole."""

    name: str
    """the file's name and the line or row in it, as in "speeches.jsonl:17" """
    text: str
    targets: tuple[tuple[int, int], ...] | None = None
    """half-open character ranges, in order, whose tokens are loss targets; None: all of them"""
