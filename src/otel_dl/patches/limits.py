"""Which time limit a process group gets: the user's, ours or torch's, and what is said of it."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_dl.log import logger, say
from otel_dl.patches.groups import ask
from otel_dl.semconv import TimeoutSource

if TYPE_CHECKING:
    from otel_dl.settings import Settings


class Limit(NamedTuple):
    """What torch is given as `timeout`, and who set it (`TimeoutSource`)."""

    timeout: Any
    source: str

    @property
    def seconds(self) -> float | None:
        """None where torch chooses, or will refuse it."""
        if isinstance(self.timeout, datetime.timedelta):
            return datetime.timedelta.total_seconds(self.timeout)  # a subclass may have another
        return None


def standard(c10d: Any, backend: Any) -> float:
    """torch's own limit for a group of this backend, in seconds.

    As `_get_default_timeout` has it (2.4 to 2.15), which warns where torch was built without NCCL.
    """
    special = c10d.default_pg_nccl_timeout if str(backend).lower().startswith("nccl") else None
    return float((special or c10d.default_pg_timeout).total_seconds())


class Limits:
    """Which time limit a group gets.

    The user's stands, unless it exceeds OTEL_DL_PG_TIMEOUT_MAX; where there is none, OTEL_DL_PG_TIMEOUT. What is no
    time limit is torch's to refuse.
    """

    def __init__(self, settings: Settings, c10d: Any) -> None:
        self._c10d = c10d
        self.most = settings.pg_timeout_max or float("inf")
        self.ours: datetime.timedelta | None = None
        """What groups get whose creator gave none."""
        self.variable = "OTEL_DL_PG_TIMEOUT"
        if settings.pg_timeout:
            self.ours = datetime.timedelta(seconds=min(settings.pg_timeout, self.most))
            if settings.pg_timeout > self.most:
                self.variable = "OTEL_DL_PG_TIMEOUT_MAX"
        self._said: set[str] = set()

    def decide(self, given: Any, options: Any, backend: Any) -> Limit:
        """For a group that `given` is the argument `timeout` of, and `options` its `pg_options`."""
        if given is None:
            if self.ours is not None and not self.set_by_user(options):
                return Limit(self.ours, TimeoutSource.OTEL_DL)
            # A limit in options loses against torch's default (with a warning of nccl's): that is left as it is.
            return self._cap(Limit(None, TimeoutSource.TORCH), standard(self._c10d, backend))
        limit = Limit(given, TimeoutSource.USER)
        return self._cap(limit, limit.seconds or 0.0)

    def _cap(self, limit: Limit, seconds: float) -> Limit:
        if seconds <= self.most:
            return limit
        return Limit(datetime.timedelta(seconds=self.most), TimeoutSource.OTEL_DL)

    def set_by_user(self, options: Any) -> bool:
        """Whether a backend's options hold a limit that somebody chose: neither a fresh one's nor ours, which torch
        writes into the options it is given."""

        def set_by_user() -> bool:
            timeout = getattr(options, "_timeout", None)
            return timeout is not None and timeout not in (self.ours, type(options)()._timeout)

        return ask(set_by_user, True)

    def prepare(self, limit: Limit, options: Any) -> None:
        """torch warns where options and argument differ. Theirs would be a fresh one's, of which the user knows
        nothing; torch is about to write the argument there."""
        fits = limit.source == TimeoutSource.OTEL_DL and type(options).__module__ == "torch._C._distributed_c10d"
        if fits and not self.set_by_user(options) and getattr(options, "_timeout", None) is not None:
            options._timeout = limit.timeout

    def say(self, given: Any, limit: Limit, rank: int, ranks: tuple[int, ...]) -> None:
        """That training is not as it would be without us: once, by the first rank of the group."""
        if limit.source != TimeoutSource.OTEL_DL or (ranks and rank != ranks[0]):
            return
        if given is not None:
            if "cap" not in self._said:
                self._said.add("cap")
                logger.warning(
                    "otel-dl: a process group asked for a time limit of %g s; it gets %g s (OTEL_DL_PG_TIMEOUT_MAX;"
                    " 0 or unset: no cap). Said once.",
                    Limit(given, "").seconds,
                    limit.seconds,
                )
        elif rank == 0 and "limit" not in self._said:
            self._said.add("limit")
            say(
                f"otel-dl: process groups without a timeout wait {limit.seconds:g} s at most"
                f" ({self.variable if self.ours is not None else 'OTEL_DL_PG_TIMEOUT_MAX'}; 0 leaves torch's)"
            )
