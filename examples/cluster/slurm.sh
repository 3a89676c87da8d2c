#!/usr/bin/env bash
# A process for each GPU, on all nodes; nothing but `srun` is needed to join them: jd.initialize() reads what it sets.
#
#   sbatch examples/cluster/slurm.sh train.py --my-option 3
#
#SBATCH --job-name=jaxdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
# SIGTERM to this script two minutes before time is over; B:USR1@120 does as well.
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

# srun itself no longer reads it, since Slurm 22.05, and would give each process one core.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"

# srun passes the signal on to the processes, which jd.processes.preemption_requested() tells: they save and leave with 0.
asked='' step=''
trap 'asked=1; [ -z "$step" ] || kill -TERM "$step"' TERM USR1

# --kill-on-bad-exit: the first process that fails ends all. --label: lines behind the number of their process.
srun --kill-on-bad-exit=1 --label python "$@" &
step=$!
[ -z "$asked" ] || kill -TERM "$step" # the signal came before the step was known

wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # the signal ended the first wait
  wait "$step"
  code=$?
done

# Back to the queue, to go on from what was saved.
if [ -n "$asked" ] && [ "$code" -eq 0 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
