#!/usr/bin/env bash
# Four islands on a preemptible partition: each is a job of its own, which may end and start again without the others.
#
#   sbatch examples/cluster/islands-slurm.sh s3://bucket/run-7
#   sbatch examples/cluster/islands-slurm.sh /shared/run-7
#
#SBATCH --job-name=islands
#SBATCH --array=0-3
#SBATCH --partition=preempt
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=islands-%A-%a.log
# SIGTERM to this script two minutes before time is over; preemption sends it too, GraceTime before SIGKILL.
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
url=${1:?the folder or the bucket in which the islands meet}
name=island-${SLURM_ARRAY_TASK_ID:-0}

# On a signal the command finishes its step, sends its progress, saves, and leaves with 0.
asked='' running=''
trap 'asked=1; [ -z "$running" ] || kill -TERM "$running"' TERM USR1

# --begin-with: the first round waits for two islands; later ones take those that are there.
jaxdist train --sync diloco:H=100 --reducer ef:qsgd:4 --steps 20000 \
  --islands "$url" --name "$name" --begin-with 2 --round-timeout 300 --overlap \
  --save-every 200 --resume --out "runs/$name" &
running=$!
[ -z "$asked" ] || kill -TERM "$running" # the signal came before the command was known

wait "$running"
code=$?
while kill -0 "$running" 2>/dev/null; do # the signal ended the first wait
  wait "$running"
  code=$?
done

# Back to the queue: Slurm itself requeues what it preempts, and not what has left in time.
if [ -n "$asked" ] && [ "$code" -eq 0 ]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
