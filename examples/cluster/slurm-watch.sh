#!/usr/bin/env bash
#SBATCH --job-name=llama
#SBATCH --gres=gpu:1
#SBATCH --time=8:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600

# A program that saves by itself, on the node's own disk: it is asked to save ten minutes before the time limit.
out="${TMPDIR:-/tmp}/llama"
exec scripts/resume.sh --grace-s 580 --watch "$out" --store /shared/checkpoints --run llama -- \
    python train.py --output_dir "$out" --resume_from_checkpoint '{checkpoint}'
