"""Parts that OTEL_* variables name: looked up among the installed entry points, loaded only when they are used."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points


def component(group: str, name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=group, name=name)), None)


def names(group: str) -> list[str]:
    """What is allowed, for a message to the user."""
    return sorted({entry.name for entry in entry_points(group=group)})
