#!/bin/bash
# 16b-mxfp8-mxfp8_a2a: DeepSeek-V3 16B, 1500 steps on 32 nodes x 8 B200
# precision mxfp8 (MXFP8 on the routed experts' grouped GEMMs)
# EP backend mxfp8_a2a (TorchAO's MXFP8 all-to-all)
#
#   sbatch train.sh                        # trains it
#   sbatch train.sh --training.steps=5     # TorchTitan's options at the end
#
# Reads: CELL_DIR (a run to resume), COOKBOOK_PREFLIGHT (off: no check of the nodes),
# COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on).
# Rendered by `submit.py render` from deepseek_v3_16b.yaml for container.

#SBATCH --job-name=16b-mxfp8-mxfp8_a2a
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --partition=training
#SBATCH --account=research
#SBATCH --time=04:00:00
#SBATCH --exclude=worker-7,worker-9
#SBATCH --comment='it'"'"'s a "test" of $HOME'
#SBATCH --reservation=moe
#SBATCH --spread-job
#SBATCH --no-requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# Values are in single quotes on purpose: bash must not expand them.
# shellcheck disable=SC1003,SC2016
set -euo pipefail

fail() {
  echo "train.sh: $*" >&2
  exit 2
}

[[ -n "${SLURM_JOB_ID:-}" ]] || fail "runs inside a Slurm job; start it with: sbatch train.sh"
SCRIPT="$(realpath "$0")"

COOKBOOK_ROOT=${COOKBOOK_ROOT:-/shared/moe-cookbook}
[[ -f "${COOKBOOK_ROOT}/submit.py" ]] ||
  fail "COOKBOOK_ROOT: found '${COOKBOOK_ROOT}', which is not the cookbook's folder; export COOKBOOK_ROOT"
# Paths in recipes (tokenizers, data) and in CELL_DIR are relative to the cookbook's folder.
cd "${COOKBOOK_ROOT}"
CELL=16b-mxfp8-mxfp8_a2a
# A second start resumes in the same folder. To start another run, or to resume another one:
# CELL_DIR=runs/<run>/${CELL} sbatch train.sh
CELL_DIR="$(realpath -m "${CELL_DIR:-${COOKBOOK_RUNS:-runs}/16b/${CELL}}")"

VENV="${VENV:-${COOKBOOK_ROOT}/.venv}"
[[ -x "${VENV}/bin/python" ]] || fail "VENV: no Python at ${VENV}; run: bash ${COOKBOOK_ROOT}/setup.sh, with VENV unset"
# For `--experimental.custom_import=cookbook.titan.tt_0_2_2`.
export PYTHONPATH="${COOKBOOK_ROOT}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1
# Ranks get this environment also under `sbatch --export=NONE`.
export SLURM_EXPORT_ENV=ALL
# `check-line` may run on a machine that does not have the nodes' files.
[[ -r '/etc/profile.d/network cards.sh' || -n "${COOKBOOK_CHECK:-}" ]] ||
  fail "source: cannot read" '/etc/profile.d/network cards.sh' "on ${HOSTNAME}; correct the cluster's profile, or put the file there"
# The file is the cluster's own: it may read unset variables, and commands in it may fail.
set +euo pipefail
# shellcheck source=/dev/null
[[ ! -r '/etc/profile.d/network cards.sh' ]] || source '/etc/profile.d/network cards.sh'
set -euo pipefail
export NCCL_DEBUG=WARN
export WITH_SPACES='a '"'"'b'"'"' "c" $(touch executed) `touch executed`'
# Lines of the log begin with the global rank; torchrun fills it in.
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank${rank}]:'

TRAIN_ARGS=(
  --job.custom_config_module=cookbook.titan.tt_0_2_2.job_config
  --experimental.custom_import=cookbook.titan.tt_0_2_2
  '--job.description=16b-mxfp8-mxfp8_a2a: DeepSeek-V3 16B, 1500 steps on 32 nodes x 8 B200'
  --cookbook.precision=mxfp8
  --cookbook.grouped_gemms=mxfp8
  --cookbook.linear_layers=bf16
  --cookbook.ep_backend=mxfp8_a2a
  --cookbook.dispatch=mxfp8
  --model.name=deepseek_v3
  --model.flavor=16B
  --model.hf_assets_path=assets/hf/deepseek-moe-16b-base
  --model.print_after_conversion
  --parallelism.data_parallel_replicate_degree=1
  --parallelism.data_parallel_shard_degree=-1
  --parallelism.context_parallel_degree=1
  --parallelism.tensor_parallel_degree=1
  --parallelism.pipeline_parallel_degree=1
  --parallelism.expert_parallel_degree=32
  --parallelism.expert_tensor_parallel_degree=1
  --training.seq_len=8192
  --training.local_batch_size=16
  --training.dataset=c4
  --training.steps=1500
  --training.max_norm=1.0
  --optimizer.name=AdamW
  --optimizer.lr=0.0001
  --optimizer.eps=1e-08
  --lr_scheduler.warmup_steps=2000
  --lr_scheduler.decay_ratio=0.8
  --lr_scheduler.decay_type=cosine
  --lr_scheduler.min_lr_factor=0.1
  --activation_checkpoint.mode=full
  --compile.enable
  '--compile.components=model,loss'
  --debug.no_moe_force_load_balance
  --debug.seed=42
  --checkpoint.enable
  --checkpoint.interval_minutes=10.0
  --checkpoint.async_mode=async
  --checkpoint.keep_latest_k=3
  --checkpoint.no_last_save_model_only
  --metrics.log_freq=1
  --metrics.enable_tensorboard
  --metrics.disable_color_printing
  --parallelism.expert_parallel_comm_backend=standard
  --parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8
  --parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8
  --model.converters=quantize.grouped_mm.mx
  --quantize.grouped_mm.mx.recipe_name=mxfp8
  --quantize.grouped_mm.mx.fqns=experts
  --comm.train_timeout_seconds=300
)
# Log to Weights & Biases if there is a key in the environment or from `wandb login`; an option can turn it off.
if [[ -n "${WANDB_API_KEY:-}" ]] || grep -qs 'api\.wandb\.ai' "${NETRC:-${HOME:-}/.netrc}"; then
  export WANDB_PROJECT="${WANDB_PROJECT:-moe-cookbook}"
  export WANDB_RUN_NAME="${WANDB_RUN_NAME:-${CELL}}"
  TRAIN_ARGS=(--metrics.enable_wandb "${TRAIN_ARGS[@]}")
fi

if [[ -z "${COOKBOOK_ATTEMPT_DIR:-}" ]]; then
  # The supervisor checks the options and the nodes, then runs this script once for each attempt: it
  # restarts what fails or hangs, saves before the time limit, and requeues the job.
  export COOKBOOK_ROOT VENV
  exec "${VENV}/bin/python" -m cookbook.supervise "${CELL_DIR}" --script="${SCRIPT}" \
    --cell="${CELL}" --recipe=deepseek_v3_16b --precision=mxfp8 \
    --ep-backend=mxfp8_a2a --cluster=/shared/moe-cookbook/tests/clusters/container.yaml --nproc-per-node=8 \
    --nodes="${SLURM_JOB_NUM_NODES}" -- "${TRAIN_ARGS[@]}" -- "$@"
fi

# One attempt. The supervisor has exported CELL_DIR, COOKBOOK_ATTEMPT_DIR, LOG_RANK and
# SHOWN_RANKS (the ranks in the log, one of them with the loss), NUM_NODES, TRAIN_NODES, HEAD_ADDRESS.
ATTEMPT="${COOKBOOK_ATTEMPT_DIR##*/}"
# Below the ephemeral ports (32768 and up); one per job, so that jobs that share a node do not collide.
RDZV_ENDPOINT="${HEAD_ADDRESS}:$((29500 + SLURM_JOB_ID % 1000))"
echo "cookbook: cell ${CELL}, ${ATTEMPT}, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
echo "cookbook: ${NUM_NODES} nodes x 8 ranks, rendezvous ${RDZV_ENDPOINT}"

# Without --cpus-per-task, which srun has not inherited since Slurm 22.05, all ranks share one core. One
# failed node ends the step. The supervisor finds a step that hangs by its --job-name.
# A new --rdzv-id keeps out workers of the last attempt. Checkpoints go to the cell's folder, everything
# else to this attempt's. Training goes on if its log can't be written, as on a full disk.
srun --nodes="${NUM_NODES}" --ntasks="${NUM_NODES}" --nodelist="${TRAIN_NODES}" \
  --cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE}}" \
  --kill-on-bad-exit=1 --wait=60 --job-name="${ATTEMPT}" \
  '--container-image=nvcr.io#nvidia/pytorch:26.02-py3' \
  --container-mounts="${COOKBOOK_ROOT}:${COOKBOOK_ROOT},${CELL_DIR}:${CELL_DIR}"',/mnt/data:/mnt/data,/mnt/with space:/data' \
  --container-workdir="${COOKBOOK_ROOT}" \
  torchrun --nnodes="${NUM_NODES}" --nproc-per-node=8 --role=rank \
  --rdzv-backend=c10d --rdzv-endpoint="${RDZV_ENDPOINT}" \
  --rdzv-id="${SLURM_JOB_ID}_${ATTEMPT}_${CELL}" \
  --log-dir="${COOKBOOK_ATTEMPT_DIR}/ranks" --redirects=3 --tee=3 --local-ranks-filter="${SHOWN_RANKS}" \
  -m torchtitan.train "${TRAIN_ARGS[@]}" --job.dump_folder="${CELL_DIR}" \
  --metrics.save_tb_folder="${ATTEMPT}/tb" --comm.save_traces_folder="${ATTEMPT}/comm_traces" \
  --profiling.save_traces_folder="${ATTEMPT}/profile_traces" \
  --profiling.save_memory_snapshot_folder="${ATTEMPT}/memory_snapshot" "$@" 2>&1 |
  { tee -a "${COOKBOOK_ATTEMPT_DIR}/train.log" || cat >/dev/null; }
