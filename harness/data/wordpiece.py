"""BERT's tokenizer for lower-cased text: words are cut into the longest pieces that its vocabulary has.

The rule of Devlin et al. (2019): control characters vanish, Chinese characters are words of their own, accents are
taken off, letters are lower-cased, punctuation marks are words of their own. Standard library only: the library
``tokenizers`` would bring a client of a model hub and a dozen packages into the harness's environment.
``tests/dpcore/test_encoder.py`` compares the two.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping

PADDING, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
CONTINUED = "##"
LONGEST_WORD = 100
"""Characters; a longer word is unknown."""
CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
"""First and last code points of the blocks whose characters are words of their own."""
KEPT_CONTROL = "\t\n\r"


class WordPiece:
    """A vocabulary and the texts' way into it."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """Take the vocabulary.

        Args:
            ids: of every piece; one that continues a word begins with ``##``.
        """
        self.ids = ids
        self._known: dict[str, list[int]] = {}

    @classmethod
    def of_file(cls, text: str) -> WordPiece:
        """Return the tokenizer of a ``tokenizer.json`` with a WordPiece model.

        Raises:
            ValueError: it has another model or another normalisation than BERT's for lower-cased text.
        """
        content = json.loads(text)
        model, normalizer = content["model"], content["normalizer"]
        if model["type"] != "WordPiece" or model["continuing_subword_prefix"] != CONTINUED:
            raise ValueError("tokenizer.json holds no WordPiece model of BERT's kind")
        if normalizer["type"] != "BertNormalizer" or not normalizer["lowercase"]:
            raise ValueError("tokenizer.json does not lower-case its text as BERT does")
        return cls(model["vocab"])

    def encode(self, text: str, length: int) -> list[int]:
        """Return exactly ``length`` ids: the start, the first pieces of ``text``, the end, padding behind."""
        pieces: list[int] = []
        for word in _cleaned(text).split():
            pieces += self._pieces_of(word)
            if len(pieces) >= length - 2:
                break
        found = [self.ids[START], *pieces[: length - 2], self.ids[END]]
        return found + [self.ids[PADDING]] * (length - len(found))

    def _pieces_of(self, word: str) -> list[int]:
        """Ids of what stands between two spaces, remembered, for few words make up most of a text."""
        known = self._known.get(word)
        if known is None:
            known = [piece for part in _parts(_plain(word)) for piece in self._cut(part)]
            self._known[word] = known
        return known

    def _cut(self, word: str) -> list[int]:
        """The longest piece first, then the longest of what is left; one unknown where that fails."""
        found: list[int] = []
        start = 0
        while start < len(word) <= LONGEST_WORD:
            prefix = CONTINUED if start else ""
            ends = range(len(word), start, -1)
            end = next((e for e in ends if prefix + word[start:e] in self.ids), None)
            if end is None:
                return [self.ids[UNKNOWN]]
            found.append(self.ids[prefix + word[start:end]])
            start = end
        return found or [self.ids[UNKNOWN]]


def _cleaned(text: str) -> str:
    """Without control characters, with spaces around Chinese ones."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_clean(character) for character in text)


def _clean(character: str) -> str:
    code = ord(character)
    if character in KEPT_CONTROL or (character.isspace() and unicodedata.category(character)[0] == "Z"):
        return " "
    if code in (0, 0xFFFD) or unicodedata.category(character)[0] == "C":
        return ""
    return f" {character} " if any(first <= code <= last for first, last in CHINESE) else character


def _plain(word: str) -> str:
    """Without accents, lower-cased."""
    if word.isascii():
        return word.lower()
    apart = unicodedata.normalize("NFD", word)
    return "".join(c for c in apart if unicodedata.category(c) != "Mn").lower()


def _parts(word: str) -> list[str]:
    """Punctuation marks apart from what stands between them."""
    found: list[str] = []
    is_open = False
    for character in word:
        if _is_punctuation(character):
            found.append(character)
            is_open = False
        elif is_open:
            found[-1] += character
        else:
            found.append(character)
            is_open = True
    return found


def _is_punctuation(character: str) -> bool:
    """All marks of ASCII are, also those that Unicode calls symbols."""
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character)[0] == "P"
