"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Tokenizer(Protocol):
    """What the demo needs of a tokenizer."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a generation. May be empty."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with the leading special tokens that the model expects."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Text for people. Special tokens are left out; what is no valid text is replaced."""


class ByteTokenizer:
    """One token per UTF-8 byte, behind a token that marks the beginning. It never ends a generation."""

    bos_token = 256
    vocab_size = 257
    stop_tokens: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return [self.bos_token, *text.encode()]

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token != self.bos_token).decode(errors="replace")
