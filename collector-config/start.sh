#!/usr/bin/env bash
# Starts the collector of local.yaml and the Jaeger of jaeger.yaml in the foreground; Ctrl-C stops both. Their programs
# are those that build.sh has put into $OTEL_DL_TOOLS (default ~/.cache/otel-dl/tools). When one ends, so does the other.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
tools=${OTEL_DL_TOOLS:-$HOME/.cache/otel-dl/tools}

for program in otelcol-dl jaeger; do
  [ -x "$tools/$program" ] || { echo "$0: $tools/$program is missing: run $here/build.sh" >&2; exit 1; }
done

running=()
stop() {
  trap '' INT TERM
  kill "${running[@]}" 2>/dev/null || true
  wait || true
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# listening PORT: waits until something on loopback listens there, or until one of the two programs has ended.
listening() {
  until (: >"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do
    kill -0 "${running[@]}" 2>/dev/null || { echo "$0: a program ended; its message is above" >&2; exit 1; }
    sleep 0.2
  done
}

"$tools/jaeger" --config "$here/jaeger.yaml" &
running+=($!)
"$tools/otelcol-dl" --config "$here/local.yaml" &
running+=($!)
listening "${JAEGER_UI_PORT:-16686}"
listening "${COLLECTOR_HEALTH_PORT:-13133}"

echo
echo "OTLP:   127.0.0.1:${COLLECTOR_GRPC_PORT:-4317} (gRPC), http://127.0.0.1:${COLLECTOR_HTTP_PORT:-4318} (HTTP)"
echo "Jaeger: http://127.0.0.1:${JAEGER_UI_PORT:-16686}"
if [ ! -L "$tools/jaeger" ]; then
  echo "        built from its Go module: the HTTP API is whole, the page a placeholder. For the page put a released"
  echo "        jaeger (v2) on PATH, remove $tools/jaeger and start again."
fi
echo "Ctrl-C stops both."
wait -n
