#!/bin/sh
# Slurm's variables of a job, by the header (#SBATCH) of a script among the words and, before it, those of sbatch. What is
# set already stays. Precedes another program, with its words.
options=$(
    words=
    for word in "$@"; do
        if [ -f "$word" ]; then head -c 65536 "$word" | sed -n 's/^#SBATCH[[:space:]]*//p'; break; fi
        words="$words $word"
    done
    case "${0##*/}$words" in sbatch*|"sh sbatch "*) echo "$words" ;; esac
)
# The number after an option, the last one given.
option() { echo "$options" | grep -oE -- "(^|[[:space:]])($1)[0-9]+" | grep -oE '[0-9]+$' | tail -n 1; }
give() { if [ -n "$2" ]; then eval "export $1=\${$1:-$2}"; fi; }
if [ -n "$options" ]; then
    nodes=$(option '--nodes[= ]|-N[= ]*') each=$(option '--ntasks-per-node[= ]') tasks=$(option '--ntasks[= ]|-n[= ]*')
    gpus=$(option '--gpus-per-node[= ]([[:alnum:]_.-]+:)?|--gres[= ]gpu:([[:alnum:]_.-]+:)?')
    nodes=${nodes:-1} tasks=${tasks:-${each:+$((${nodes:-1} * each))}}
    for name in NNODES JOB_NUM_NODES; do give "SLURM_$name" "$nodes"; done
    for name in NTASKS NPROCS; do give "SLURM_$name" "$tasks"; done
    for name in GPUS_PER_NODE GPUS_ON_NODE; do give "SLURM_$name" "$gpus"; done
    give SLURM_NTASKS_PER_NODE "$each"
    give SLURM_CPUS_PER_TASK "$(option '--cpus-per-task[= ]|-c[= ]*')"
fi
