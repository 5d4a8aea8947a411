#!/bin/sh
# Stands in for a launcher: writes the folder and its words to a record, and runs what is no training. {records}: the
# folder of records.
case "$1" in -c|-V|--version|-) if [ -x /usr/bin/python3 ]; then
    errors=$(mktemp)
    /usr/bin/python3 "$@" 2> "$errors"
    status=$?
    cat "$errors" >&2
    grep -q ModuleNotFoundError "$errors" && exit 0  # a module that training has, such as torch
    exit $status
fi ;; esac
out=$(mktemp "{records}/$(date +%s%N).XXXXXX")
{ printf '%s\0' "$PWD" "${0##*/}" "$@"; } > "$out"
