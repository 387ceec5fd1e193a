#!/bin/sh
# The tool TOOL-NAME: a program that is started for each call. It reads one line of JSON,
#   {"export": "run", "input": {…}, "ctx": {"workdir": …, …}}
# and writes {"output": …}, or {"error": {"message": …, "code": …}} for an error that the model can read. What it writes
# to standard error is logged. A status other than 0 is an error of the call.
#
# It runs in a jail: it sees this folder (to read) and the agent's workspace, where it starts (to write), and reaches no
# network. It needs jq.
set -eu

request=$(cat)
case $(printf '%s' "$request" | jq -r .export) in
  run) # the arguments fit the schema in the manifest already
    printf '%s' "$request" | jq -c '{output: {words: (.input.text | [splits("\\s+") | select(. != "")] | length)}}'
    ;;
esac
