"""Writes the tables that come from the code: the settings into README.md, the vocabulary into docs/names.md.

`python docs/generate.py --check` only says whether they are up to date (exit status 1 where they are not).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from otel_dl import semconv
from otel_dl.settings import described

ROOT = Path(__file__).resolve().parent.parent


def settings() -> str:
    rows = ["| variable | keyword | default | allowed | what it does |", "|---|---|---|---|---|"]
    for row in described():
        default = str(row.default).lower() if isinstance(row.default, bool) else row.default
        shown = f"`{default}`" if default != "" else ""
        rows.append(f"| `{row.variable}` | `{row.keyword}` | {shown} | {row.allowed} | {row.doc} |")
    return "\n".join(rows)


def names() -> str:
    rows = [
        "# Names",
        "",
        "Made from `src/otel_dl/semconv.py` by `docs/generate.py`.",
        "",
        "## Spans",
        "",
        *(f"- `{value}`" for name, value in vars(semconv.SpanName).items() if name.isupper()),
        "- `cudnn::<op>`, `cudnn::<op>_backward_input`, `cudnn::<op>_backward_weight` of `conv1d` … `conv_transpose3d`",
        "",
        "## Attributes",
        "",
        "*first* stands for the first span of each rank in a trace. *Always* means on every such span.",
        "",
        "| attribute | type | on | always | meaning |",
        "|---|---|---|---|---|",
    ]
    for attribute in semconv.ATTRIBUTES:
        kind = attribute.kind if isinstance(attribute.kind, str) else attribute.kind.__name__
        on = ", ".join(sorted({_place(name) for name in attribute.on}))
        rows.append(
            f"| `{attribute.name}` | {kind} | {on} | {'yes' if attribute.built else ''} | {attribute.meaning} |"
        )
    rows += ["", "## Resource of every span that otel-dl builds", ""]
    rows += [f"- `{name}` ({kind.__name__})" for name, kind in semconv.RESOURCE.items()]
    rows += ["- `dl.worker.id` (int), in a DataLoader worker", ""]
    return "\n".join(rows)


def _place(name: str) -> str:
    if name in semconv.CONVOLUTIONS:
        return "`cudnn::*`"
    return "*first*" if name == "first" else f"`{name}`"


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    wanted = {
        readme: re.sub(
            r"(<!-- settings: .*? -->\n).*?(<!-- /settings -->)",
            lambda match: f"{match[1]}{settings()}\n{match[2]}",
            text,
            flags=re.DOTALL,
        ),
        ROOT / "docs" / "names.md": names(),
    }
    stale = [path for path, content in wanted.items() if not path.exists() or path.read_text() != content]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is older than the code: run python docs/generate.py", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
