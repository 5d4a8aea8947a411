#!/bin/sh
# Stands in for a command that starts another command, and starts that one.
PATH=${0%/*}:$PATH
while [ $# -gt 0 ]; do
    case "$1" in
        -*) shift; continue ;;
        *.sh|*.sbatch|*.slurm) [ -f "$1" ] && exec bash "$@" ;;
    esac
    case "${1##*/}" in
        bash|sh|env|python|python3|torchrun|deepspeed|ds|accelerate|numactl|nohup|nsys|uv) exec "$@" ;;
    esac
    shift
done
case "${0##*/}" in sbatch|srun) exec bash -s ;; esac
