"""How a world says that a rule was broken."""

from __future__ import annotations


class Violation(AssertionError):
    """A rule was broken. ``checker`` names who saw it; the message names the engines, the transfer and the blocks."""

    def __init__(self, checker: str, message: str) -> None:
        super().__init__(checker, message)
        self.checker = checker
        self.message = message

    def __str__(self) -> str:
        return f"{self.checker}: {self.message}"


class Stuck(Violation):
    """What was waited for did not happen in time."""

    def __init__(self, message: str) -> None:
        super().__init__("settles", message)

    def __reduce__(self) -> tuple[type[Stuck], tuple[str]]:
        return Stuck, (self.message,)
