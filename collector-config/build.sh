#!/usr/bin/env bash
# Makes an OpenTelemetry Collector and a Jaeger v2 available as otelcol-dl and jaeger in $OTEL_DL_TOOLS (default
# ~/.cache/otel-dl/tools): those on PATH are linked there (otelcol-contrib or otelcol; jaeger), what is not on PATH is
# built from its Go modules, once. Two idle cores and empty Go caches take some 5 minutes, a warm cache one.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
tools=${OTEL_DL_TOOLS:-$HOME/.cache/otel-dl/tools}
collector_version=v0.158.0 # the one that ocb.yaml names
jaeger_version=v1.76.0     # of the Go module; the program calls itself Jaeger v2.13

# on_path NAME...: the first of these programs that is on PATH.
on_path() {
  for name in "$@"; do
    command -v "$name" && return
  done
  return 1
}

need_go() {
  command -v go >/dev/null && return
  echo "$0: go is missing: install Go 1.25 or later, or put otelcol-contrib and jaeger on PATH" >&2
  exit 1
}

build_collector() {
  GOBIN=$scratch go install "go.opentelemetry.io/collector/cmd/builder@$collector_version"
  cp "$here/ocb.yaml" "$scratch/"
  (cd "$scratch" && ./builder --config ocb.yaml)
  mv "$scratch/_build/otelcol-dl" "$tools/otelcol-dl"
}

build_jaeger() {
  # Jaeger's module has replace directives, with which `go install` refuses it; as a tool of a module of ours it builds.
  mkdir "$scratch/jaeger"
  cd "$scratch/jaeger"
  printf 'module jaeger-tool\n\ngo 1.25\n' >go.mod
  go get -tool "github.com/jaegertracing/jaeger/cmd/jaeger@$jaeger_version"
  go build -o "$scratch/jaeger-program" github.com/jaegertracing/jaeger/cmd/jaeger
  mv "$scratch/jaeger-program" "$tools/jaeger"
}

mkdir -p "$tools"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ ! -x "$tools/otelcol-dl" ]; then
  if found=$(on_path otelcol-contrib otelcol); then
    ln -sfn "$found" "$tools/otelcol-dl"
  else
    need_go
    echo "building the collector into $tools (some minutes) ..." >&2
    build_collector
  fi
fi

if [ ! -x "$tools/jaeger" ]; then
  if found=$(on_path jaeger); then
    ln -sfn "$found" "$tools/jaeger"
  else
    need_go
    echo "building Jaeger into $tools (some minutes) ..." >&2
    build_jaeger
  fi
fi
