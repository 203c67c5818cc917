"""What each cause of a difference means for the person who reads it."""

from __future__ import annotations

from typing import Final

from otel_dl.viewing.comparing import causes

MEANINGS: Final[dict[str, str]] = {
    causes.WARM_UP: "compilation, autotuning and the first step, which are there once: in longer runs they weigh less",
    causes.OVERHEAD: "the profiler makes the steps that it sees slower (minus: the profile has more): otel-dl's time is"
    " nearer to the job's own",
    causes.OTHER_STEPS: "steps outside the profile took more (plus) or less (minus) than those in it, as far as steps"
    " differ anyway: profile more of them to know",
    causes.START_STOP: "the job waited for it, so otel-dl's mean has it; no step of the profile has",
    causes.EDGES: "between the ends of otel-dl's span and those of the profiler's range: entering and leaving it",
    causes.LATE: "something held the thread up between the two (another thread that had the GIL, the scheduler)",
    causes.NO_OPERATION: "no operation of torch ran: Python code, files, logging, sleep; the function is named where"
    " the profile was made with with_stack=True",
    causes.HOST: "the profile shows only calls of the device's driver: what else the host did is not in it",
    causes.QUEUED_BEFORE: "the device still worked off what earlier phases had queued",
    causes.QUEUED_AFTER: "the device did this phase's work after the host had gone on, so the host's time lacks it",
    causes.GAPS: "the device idled between this phase's kernels: the host launched them too slowly",
    causes.SYNCHRONISATION: "the host waited for the device",
    causes.BEFORE_KERNELS: "the host's own work before its first kernel ran",
    causes.AFTER_KERNELS: "the host's own work after its last kernel",
    causes.NO_KERNEL: "the host launched nothing in this phase: its time is all its own",
}
