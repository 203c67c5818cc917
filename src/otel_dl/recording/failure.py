"""What is kept of an exception: text, and no reference to it, nor to its traceback with all that its frames hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from otel_dl.faults import from_signal_handler

if TYPE_CHECKING:
    from otel_dl.recording.ranks import Explained

LONGEST: Final = 256
"""Characters of a message at most."""


class Failure(NamedTuple):
    """The exception that left a phase: `type` for the attribute `error.type`, `message` for the span's status.

    `attributes` is what is known beyond (which ranks did not come), None where nothing is.
    """

    type: str
    message: str
    attributes: dict[str, Any] | None = None

    @classmethod
    def of(cls, error: BaseException, explained: Explained | None = None) -> Failure:
        """`explained`: what is known of it beyond what it says itself."""
        try:
            message = str(error)
        except Exception as fault:
            if from_signal_handler(fault):
                raise
            message = ""  # an exception's own __str__ may raise
        failure = cls.told(type(error), message)
        if explained is None:
            return failure
        return failure._replace(type=explained.error_type, attributes=explained.attributes)

    def after(self, words: str) -> Failure:
        """The same, which says `words` before what the exception says."""
        return self._replace(message="; ".join(filter(None, (words, self.message)))[:LONGEST])

    @classmethod
    def told(cls, kind: type[BaseException], message: str) -> Failure:
        """Of an exception that is only known by its class and its text."""
        # An exporter would refuse the whole batch for a lone surrogate.
        return cls(qualified(kind), message[:LONGEST].encode("utf-8", "replace").decode())


def qualified(kind: type[BaseException]) -> str:
    """The name of an exception's class, as `error.type` wants it."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
