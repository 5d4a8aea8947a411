#!/bin/sh
# Stands in for a command that starts another command, and starts that one.
PATH=${0%/*}:$PATH
# A script that submits itself asks by this whether it runs in a job.
case "${0##*/}" in sbatch) export SLURM_JOB_ID="${SLURM_JOB_ID:-1}" SLURM_JOBID="${SLURM_JOB_ID:-1}" ;; esac
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
