"""Switches otel-dl on at the start of a Python process; `otel-dl run` puts this folder at the head of PYTHONPATH.

Python imports one module of this name only, so the one that would have been imported without us is run here. This
file may be met by any Python that a job starts: it needs nothing newer than 3.6, and nothing in it ends the process.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _run_the_shadowed_one() -> None:
    here = os.path.realpath(os.path.dirname(__file__))
    # The script sees the path that it would have seen; its children find the folder through PYTHONPATH.
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _activate() -> None:
    try:
        from otel_dl.autoload import activate

        activate()
    except Exception as error:
        advice = "; install otel-dl for this Python" if isinstance(error, ImportError) else ""
        message = "otel-dl: this process (pid {}, {}) is not traced: {}: {}{}\n"
        if sys.stderr is not None:
            sys.stderr.write(message.format(os.getpid(), sys.executable, type(error).__name__, error, advice))


try:
    _run_the_shadowed_one()
finally:
    _activate()
