"""The subcommands of `otel-dl` and their options."""

from __future__ import annotations

import contextlib
import glob
import os
import shlex
import signal
import sys
from pathlib import Path

import click

from otel_dl.cli import job, run_directory
from otel_dl.cli.progress import Progress
from otel_dl.forensics.folder import KEPT, temporary
from otel_dl.forensics.reader import SUFFIX, Page, read_all
from otel_dl.forensics.report import began, lines, when
from otel_dl.settings import URL, Settings
from otel_dl.viewing.comparing import causes, kineto, nsys, steps
from otel_dl.viewing.comparing.pairing import pair
from otel_dl.viewing.comparing.profile import Profile, ProfileError
from otel_dl.viewing.comparing.text import render
from otel_dl.viewing.ended_text import ends
from otel_dl.viewing.reading import Reading, file_name_of, read_spans
from otel_dl.viewing.summary import summarize
from otel_dl.viewing.text import render_heading, render_reading, render_summary
from otel_dl.viewing.words import plural

_RUNS_SHOWN = 3
"""Of several runs in a folder, so many are told whole, the latest."""
_OTHERS_SHOWN = 8
"""Of several folders of runs, so many are named beside the newest, the latest."""


def _address(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else URL.parse(value)
    except ValueError:
        raise click.BadParameter(f"{value!r}; allowed: {URL.allowed}.") from None


_jaeger_option = click.option(
    "--jaeger",
    metavar="URL",
    callback=_address,
    help="Address of a Jaeger; trace ids become links to it.  [default: OTEL_DL_JAEGER_URL]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="otel-dl", message="otel-dl %(version)s")
def command() -> None:
    """OpenTelemetry tracing of PyTorch training: one trace a step, its workers linked to it."""


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the files of traces.  [default: otel-dl-traces/<date>-<time>-<pid>]",
)
@click.option(
    "--to",
    type=click.Choice(["file", "otlp"]),
    default="file",
    show_default=True,
    help="Write files, or send to the endpoint that the standard OTEL_EXPORTER_OTLP_* variables name.",
)
@_jaeger_option
@click.option(
    "--progress/--no-progress", default=None, help="A line about the traces so far.  [default: on a terminal]"
)
@click.argument("arguments", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def run(out: Path | None, to: str, jaeger: str | None, progress: bool | None, arguments: tuple[str, ...]) -> None:
    """Run COMMAND with tracing switched on, and print a summary when it has ended.

    COMMAND is what starts the training now: `python train.py --lr 0.1`, `torchrun …`, `accelerate launch …`. Nothing
    in the script changes, its output is left alone, and the exit status is COMMAND's.
    """
    if jaeger is not None:
        os.environ["OTEL_DL_JAEGER_URL"] = jaeger  # for the job: it prints the link to its run
    if to == "otlp":
        if out is not None:
            raise click.UsageError("--out names a folder for files; with --to otlp none are written.")
        job.end_like(job.run(arguments, job.environment_for_otlp()))

    directory = (out or run_directory.default()).absolute()
    obstacle = run_directory.prepare(directory)
    if obstacle:
        _say(
            f"otel-dl: traces cannot be written to {directory}: {obstacle}. The job runs without them; to have them,"
            " name another folder with --out."
        )
        job.end_like(job.run(arguments, job.environment_without_traces()))

    earlier = frozenset(path.name for path in directory.iterdir())
    with Progress(directory, earlier) as line:
        # On something that is no terminal it would be escape codes in a log, so --progress cannot ask for it there.
        shown = progress is not False and sys.stderr.isatty()
        ended = job.run(arguments, job.environment_for_files(directory), line.draw if shown else None)
    if ended.started:
        _say_killed(-ended.status)
        again = f"otel-dl report {shlex.quote(str(directory))}"
        _say("")
        try:
            if _summarize(directory, earlier, jaeger, err=True):
                _say(f"Again          {again}")
        except job.Interrupted:
            _say(f"otel-dl: the summary was interrupted. To have it: {again}")
    elif not earlier:
        with contextlib.suppress(OSError):
            directory.rmdir()
    job.end_like(ended)


@command.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@_jaeger_option
@click.option(
    "--steps", is_flag=True, help="Also a line for each kept step: which rank arrived last at its collectives."
)
@click.option("--run", "run_id", metavar="ID", help="Only the run whose id begins so.  [default: the latest ones]")
def report(directory: Path, jaeger: str | None, steps: bool, run_id: str | None) -> None:
    """Print the summary of the traces in DIR: the files of all ranks together, each run apart, the latest last.

    The exit status is 0 when there were some and 1 when there were none.
    """
    found = _summarize(directory, frozenset(), jaeger, err=False, each_step=steps, run_id=run_id or "")
    sys.exit(0 if found else 1)


@command.command()
@click.argument("trace", metavar="TRACE", type=click.Path(path_type=Path))
@click.argument("profile", metavar="PROFILE", type=click.Path(path_type=Path))
def compare(trace: Path, profile: Path) -> None:
    """Say why a profiler shows other times than the traces in TRACE, phase by phase.

    TRACE is the folder of `otel-dl run`, or one file of it. PROFILE is of the same run: what torch.profiler's
    export_chrome_trace wrote (.json, .json.gz), or an SQLite file of `nsys export --type sqlite`. The exit status is 0
    when they could be compared and 1 when not.
    """
    reading = Reading(trace)
    try:
        processes = steps.processes(job.until_interrupted(read_spans(reading)))
    except OSError as error:
        _say(f"otel-dl: {trace} cannot be read: {error.strerror}. Name a folder that `otel-dl run` wrote.")
        sys.exit(1)
    if not processes:
        below = _below(trace, "compare", f" {shlex.quote(str(profile))}") if trace.is_dir() else ""
        advice = below or f"`otel-dl report {shlex.quote(str(trace))}`"
        _say(f"otel-dl: there are no steps in {trace} to compare with. {advice}")
        sys.exit(1)
    try:
        paired = pair(_read_profile(profile, processes), processes)
    except OSError as error:
        _say(f"otel-dl: {profile} cannot be read: {error.strerror}.")
        sys.exit(1)
    except ProfileError as error:
        _say(f"otel-dl: {profile} {error}.")
        sys.exit(1)
    click.echo(render(causes.compare(paired), profile.name))


def _read_profile(path: Path, processes: list[steps.Process]) -> Profile:
    with path.open("rb") as file:
        beginning = file.read(len(nsys.MAGIC))
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise ProfileError(f"is Nsight Systems' own format; make an SQLite file: nsys export --type sqlite {path}")
    if beginning == nsys.MAGIC:
        return nsys.read(path, [process.pid for process in processes])
    return kineto.read(path)


@command.command()
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Without DIR: also the older runs that have ended.")
def status(directory: Path | None, every: bool) -> None:
    """Print what each process of a run does, or had in hand when it died, from the status pages in DIR.

    DIR is OTEL_DL_DIR of the job, the folder of `otel-dl run`; without it, of the runs that were given none those that
    run and the latest that has ended, the newest first. A process that ends by itself leaves no page: how it ended is
    told by the traces in DIR. The exit status is 0 when there was something to tell and 1 when there was nothing.
    """
    found: list[tuple[Path, list[Page]]] = []
    for folder in [directory] if directory is not None else temporary().glob("*/"):
        try:
            pages = read_all(folder)
        except OSError as error:
            _say(f"otel-dl: {folder} cannot be read: {error.strerror}.")
            continue
        if pages:
            found.append((folder, pages))
    is_over = directory is not None and not any(page.alive() for _, pages in found for page in pages)
    if directory is not None and is_over and _ended(directory, found[0][1] if found else []):
        sys.exit(0)
    found.sort(key=lambda each: began(each[1]), reverse=True)
    shown = found if directory is not None or every else _running_and_newest(found)
    for folder, pages in shown:
        if directory is None:
            click.echo(f"{folder}: began {when(began(pages))}" if began(pages) else f"{folder}: has not begun")
        for line in _those_with_a_page_or_a_trace(folder, pages):
            click.echo(line)
    if len(shown) < len(found):
        older = len(_runs(found) - _runs(shown))
        _say(
            f"otel-dl: {older:,} older run{plural(older)} that ended without taking {'its' if older == 1 else 'their'}"
            f" pages away {'is' if older == 1 else 'are'} not shown: otel-dl status --all"
        )
    if directory is None and any(page.alive() is False for _, pages in found for page in pages):
        _say(
            "otel-dl: what dead processes left is removed as later runs begin, all but the latest"
            f" {KEPT} folders. To remove one now in which nothing runs: rm -r DIR"
        )
    if not found:
        where = directory or temporary()
        below = _below(directory, "status") if directory is not None else ""
        advice = f". {below}" if below else ": what was started there has not begun, or ended in order."
        _say(f"otel-dl: there are no status pages in {where}{advice}")
    sys.exit(0 if found else 1)


def _runs(found: list[tuple[Path, list[Page]]]) -> set[str]:
    return {page.run for _, pages in found for page in pages}


def _running_and_newest(found: list[tuple[Path, list[Page]]]) -> list[tuple[Path, list[Page]]]:
    """Of folders, the newest first: those in which something runs, or may do so, and those of the newest run of the
    others; each rank has a folder of its own."""
    over = [all(page.alive() is False for page in pages) for _, pages in found]
    latest = next((pages for (_, pages), ended in zip(found, over, strict=True) if ended), None)
    runs = {page.run for page in latest or ()}
    return [
        each for each, ended in zip(found, over, strict=True) if not ended or runs.intersection(p.run for p in each[1])
    ]


def _those_with_a_page_or_a_trace(directory: Path, pages: list[Page]) -> list[str]:
    """A line for each process of the runs of `pages`. One that has ended in order, or by SIGTERM, has taken its page
    away: only files of such are read, so of a run that is whole none."""
    try:
        with_page = {
            path.name
            for page in pages
            for path in directory.glob(f"{glob.escape(file_name_of(page.host, page.pid))}-*.jsonl")
        }
        summaries = summarize(read_spans(Reading(directory), without=with_page), pages)
    except OSError:
        return lines(pages)
    runs = {page.run for page in pages}
    found: list[str] = []
    for summary in summaries:
        if summary.run in runs:
            runs.discard(summary.run)
            found += ends(summary, [page for page in pages if page.run == summary.run])
    return [*found, *lines([page for page in pages if page.run in runs])]


def _ended(directory: Path, pages: list[Page]) -> bool:
    """Prints how the processes of a job ended of which none runs; False where there are no traces of them."""
    reading = Reading(directory)
    try:
        summaries = [each for each in summarize(read_spans(reading), pages) if each.processes]
    except OSError:
        return False  # said already
    latest = summaries[-_RUNS_SHOWN:]
    told: set[str] = set()
    for summary in latest:
        mine = [page for page in pages if page.run == summary.run]
        told |= {page.path for page in mine}
        if len(summaries) > 1:
            click.echo(f"run {summary.run or 'not known'}:")
        for line in ends(summary, mine):
            click.echo(line)
    if not latest:
        return False
    rest = [page for page in pages if page.path not in told]
    if rest and len(summaries) > 1:
        click.echo("of other runs:")
    for line in lines(rest):
        click.echo(line)
    _say(f"otel-dl: none of these runs any more. More of them: otel-dl report {shlex.quote(str(directory))}")
    return True


_DEADLY = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}


def _say_killed(number: int) -> None:
    """By a signal that leaves a process no time for its traces."""
    if number in _DEADLY:
        hint = " The kernel does that when memory runs out: `dmesg` says." if number == signal.SIGKILL else ""
        _say(f"otel-dl: the job was killed by {signal.Signals(number).name}; what it had not exported is lost.{hint}")


def _summarize(
    directory: Path, earlier: frozenset[str], jaeger: str | None, *, err: bool, each_step: bool = False,
    run_id: str = "",
) -> bool:  # fmt: skip
    """Prints summaries and reading; False when not one span was read, or there is no such run."""
    reading = Reading(directory)
    try:
        pages = read_all(directory)
        summaries = summarize(job.until_interrupted(read_spans(reading, without=earlier)), pages)
    except OSError as error:
        _say(f"otel-dl: {directory} cannot be read: {error.strerror}. Name a folder that `otel-dl run` wrote.")
        return False
    chosen = [summary for summary in summaries if summary.run.startswith(run_id)]
    if reading.spans:
        former, latest = chosen[:-_RUNS_SHOWN], chosen[-_RUNS_SHOWN:]
        for summary in former:
            click.echo(render_heading(summary), err=err)
        if former:
            click.echo(f"{'':<15}of each of these more: --run ID\n", err=err)
        for summary in latest:
            click.echo(render_summary(summary, jaeger or Settings.read().jaeger_url, each_step), err=err)
            if len(latest) > 1:
                click.echo(err=err)
    click.echo(render_reading(reading), err=err)
    runs = {summary.run: summary for summary in summaries}
    for line in lines([page for page in pages if page.run not in runs or not runs[page.run].incidents.tells_of(page)]):
        click.echo(f"{'Status':<15}{line}", err=err)
    if not reading.spans:
        _say(f"otel-dl: there are no traces in {directory}. {_advice(directory)}")
    elif not chosen:
        _say(f"otel-dl: of the runs in {directory} none has an id that begins with {run_id!r}; without --run: all.")
    return reading.spans > 0 and bool(chosen)


def _below(directory: Path, command: str, after: str = "") -> str:
    """Where the folder is one of runs' folders: what to call for the newest of them, and which others there are."""
    changed: dict[Path, float] = {}
    for pattern in ("*/*.jsonl", f"*/*{SUFFIX}"):
        for path in directory.glob(pattern):
            with contextlib.suppress(OSError):  # a page that its process takes away meanwhile
                changed[path.parent] = max(changed.get(path.parent, 0), path.stat().st_mtime)
    if not changed:
        return ""
    newest, *others = sorted(changed, key=lambda folder: changed[folder], reverse=True)
    said = f"The newest in its folders: otel-dl {command} {shlex.quote(str(newest))}{after}"
    if others:
        more = f" and {len(others) - _OTHERS_SHOWN:,} more" if len(others) > _OTHERS_SHOWN else ""
        said += f" (others: {', '.join(folder.name for folder in others[:_OTHERS_SHOWN])}{more})"
    return said


def _advice(directory: Path) -> str:
    below = _below(directory, "report")
    if below:
        return below
    off = [name for name in ("OTEL_DL_ENABLED", "OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER") if os.environ.get(name)]
    switched = f" {', '.join(f'{name}={os.environ[name]}' for name in off)} may have switched it off." if off else ""
    return (
        "A job writes them once it has trained a step with PyTorch; if it has, see what it said on stderr, and whether"
        f" it sets up a TracerProvider of its own.{switched}"
    )


def _say(message: str) -> None:
    click.echo(message, err=True)
