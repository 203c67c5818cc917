"""Compiles everything of `TestCompiling` and prints what came of it; with the argument `instrument` under otel-dl."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import otel_dl

if "instrument" in sys.argv:
    otel_dl.instrument()

from test_unchanged import TestCompiling

compiling = TestCompiling()
found = {
    script.__name__: compiling.counted(script, compiling) for script in (*TestCompiling.ONCE, *TestCompiling.SCRIPTS)
}
otel_dl.uninstrument()
print(json.dumps(found))
