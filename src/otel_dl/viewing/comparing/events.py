"""The events of a Chrome trace, one by one: a profile of a gigabyte is read in the memory of some events.

The JSON readers that stream (ijson) make Python objects of tokens, several times slower than the standard library
makes them of a whole event, and refuse the NaN and the control characters that profilers write.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from otel_dl.viewing.comparing.profile import ProfileError

_CHUNK: Final = 1 << 20
_MOST: Final = 1 << 26
"""Characters of one value at most."""
_LITERAL: Final = 8
"""Characters of `-Infinity`, without its end: where so few are left, more may make a value of them."""
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_decode: Final = json.JSONDecoder(strict=False).raw_decode


class Events:
    """Iterate over it; what else stands beside `traceEvents` is in `header` once that was passed."""

    def __init__(self, file: BinaryIO) -> None:
        self.header: dict[str, Any] = {}
        self._file = file
        self._text = ""
        self._at = 0
        self._done = 0
        """Characters before `_text`."""
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __iter__(self) -> Iterator[Any]:
        """Raises ProfileError where it is no such JSON, or is cut off."""
        first = self._next()
        if first == "[":  # a trace may be the array alone
            yield from self._elements()
        elif first == "{":
            yield from self._members()
        else:
            raise ProfileError("is not JSON: it is no profile of torch.profiler")

    def _members(self) -> Iterator[Any]:
        found = False
        sign = self._peek()
        while sign != "}":
            key = self._value()
            if not isinstance(key, str) or self._next() != ":":
                raise self._broken()
            if key == "traceEvents" and self._peek() == "[":
                self._next()
                found = True
                yield from self._elements()
            else:
                self.header[key] = self._value()
            sign = self._next()
            if sign not in ",}":
                raise self._broken()
            if sign == "," and self._peek() == "}":
                break  # a comma too many, which torch has written
        if not found:
            raise ProfileError("has no traceEvents: it is no profile of torch.profiler")

    def _elements(self) -> Iterator[Any]:
        if self._peek() == "]":
            self._next()
            return
        sign = ","
        while sign == ",":
            yield self._value()
            sign = self._next()
        if sign != "]":
            raise self._broken()

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = _decode(self._text, self._at)
            except json.JSONDecodeError as error:
                open_ended = error.pos >= len(self._text) - _LITERAL or error.msg.startswith("Unterminated")
                if self._ended or not open_ended or len(self._text) - self._at > _MOST:
                    raise self._broken(cut_off=open_ended) from None
            except (ValueError, RecursionError):  # an integer of thousands of digits; brackets without end
                raise self._broken() from None
            else:
                # A number that ends where the text does may go on.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._more()

    def _peek(self) -> str:
        """The next character that is no space."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                raise self._broken(cut_off=True)
            self._more()

    def _next(self) -> str:
        character = self._peek()
        self._at += 1
        return character

    def _more(self) -> None:
        chunk = self._file.read(_CHUNK)
        self._ended = not chunk
        self._done += self._at
        self._text = self._text[self._at :] + self._decoder.decode(chunk, final=self._ended)
        self._at = 0

    def _broken(self, cut_off: bool = False) -> ProfileError:
        at = self._done + self._at
        if self._ended and cut_off:
            return ProfileError(
                f"is cut off: it ends after {self._done + len(self._text):,} characters, in the middle. Export it again"
            )
        return ProfileError(f"is not JSON at character {at:,}")
