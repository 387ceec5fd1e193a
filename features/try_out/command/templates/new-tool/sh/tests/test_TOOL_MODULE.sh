#!/bin/sh
# The program by itself, without a jail: `sh tests/test_TOOL_MODULE.sh`.
set -eu
cd "$(dirname "$0")/.."

check() { # a request, and what the program writes for it
  written=$(printf '%s\n' "$1" | ./tools/TOOL_MODULE.sh)
  [ "$written" = "$2" ] && return
  printf 'for      %s\nexpected %s\nwritten  %s\n' "$1" "$2" "$written" >&2
  exit 1
}

check '{"export":"run","input":{"text":"three short words"},"ctx":{}}' '{"output":{"words":3}}'
check '{"export":"run","input":{"text":""},"ctx":{}}' '{"output":{"words":0}}'
echo passed
