#!/bin/bash
# 16b-mxfp8-mxfp8_a2a: DeepSeek-V3 16B, 1500 steps on 32 nodes x 8 B200
# precision mxfp8 (MXFP8 on the routed experts' grouped GEMMs)
# EP backend mxfp8_a2a (TorchAO's MXFP8 all-to-all)
#
#   sbatch train.sh                        # trains it
#   sbatch train.sh --training.steps=5     # TorchTitan's options at the end
#
# Reads: CELL_DIR (a run to resume), COOKBOOK_PREFLIGHT (off: no check of the nodes),
# COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns W&B on), WANDB_PROJECT.
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

set -euo pipefail

fail() {
  echo "train.sh: $*" >&2
  exit 2
}

COOKBOOK_ROOT=${COOKBOOK_ROOT:-/shared/moe-cookbook}
[[ -f "${COOKBOOK_ROOT}/submit.py" ]] ||
  fail "COOKBOOK_ROOT: found '${COOKBOOK_ROOT}', which is not the cookbook's folder; export COOKBOOK_ROOT"
# Paths in options (tokenizers, data) and in CELL_DIR are relative to the cookbook's folder.
cd "${COOKBOOK_ROOT}"
VENV="${VENV:-${COOKBOOK_ROOT}/.venv}"
[[ -x "${VENV}/bin/python" ]] || fail "VENV: no Python at ${VENV}; run: bash ${COOKBOOK_ROOT}/setup.sh, with VENV unset"
# A job that Slurm starts again runs the code that it began with, which its run's folder carries.
RUN="${COOKBOOK_RUNS:-runs}/16b"
[[ -z "${CELL_DIR:-}" ]] || RUN="$(dirname "$(realpath -m "${CELL_DIR}")")"
CODE="${RUN}/code/job-${SLURM_JOB_ID:-}"
[[ "${SLURM_RESTART_COUNT:-0}" != 0 && -d "${CODE}" ]] || CODE="${COOKBOOK_ROOT}"
CODE="$(realpath "${CODE}")"
# PYTHONSAFEPATH: else Python imports from the working folder first.
export COOKBOOK_ROOT VENV PYTHONSAFEPATH=1 PYTHONPATH="${CODE}${PYTHONPATH:+:${PYTHONPATH}}"

# What is exported here or above reaches the ranks. All else is below: the supervisor checks it, writes it
# to CELL_DIR/cell.yaml and trains by that, attempt after attempt: it restarts what fails or hangs, saves
# before the time limit, and requeues the job.
#
# A second start resumes in the same folder. To start another run, or to resume another one:
# CELL_DIR=runs/<run>/<cell> sbatch train.sh
exec "${VENV}/bin/python" -m cookbook.supervise --script="$(realpath "$0")" -- "$@" <<'CELL'
name: 16b-mxfp8-mxfp8_a2a
run: 16b
title: DeepSeek-V3 16B
recipe: deepseek_v3_16b
cluster: container
stack: '2026.02'
ranks_per_node: 8
max_restarts: 10
too_few_nodes: wait
files:
  cluster: /shared/moe-cookbook/tests/clusters/container.yaml
# Exported to the ranks.
environment:
  NCCL_DEBUG: WARN
  WITH_SPACES: a 'b' "c" $(touch executed) `touch executed`
# TorchTitan's options. Later ones win: those below, and at last those after the
# script's name.
options:
  model.name: deepseek_v3
  model.flavor: 16B
  model.hf_assets_path: assets/hf/deepseek-moe-16b-base
  model.print_after_conversion: true
  parallelism.data_parallel_replicate_degree: 1
  parallelism.data_parallel_shard_degree: -1
  parallelism.context_parallel_degree: 1
  parallelism.tensor_parallel_degree: 1
  parallelism.pipeline_parallel_degree: 1
  parallelism.expert_parallel_degree: 32
  parallelism.expert_tensor_parallel_degree: 1
  training.seq_len: 8192
  training.local_batch_size: 16
  training.dataset: c4
  training.steps: 1500
  training.max_norm: 1.0
  optimizer.name: AdamW
  optimizer.lr: 0.0001
  optimizer.eps: 1.0e-08
  lr_scheduler.warmup_steps: 2000
  lr_scheduler.decay_ratio: 0.8
  lr_scheduler.decay_type: cosine
  lr_scheduler.min_lr_factor: 0.1
  activation_checkpoint.mode: full
  compile.enable: true
  compile.components: [model, loss]
  debug.moe_force_load_balance: false
  debug.seed: 42
  checkpoint.enable: true
  checkpoint.interval_minutes: 10.0
  checkpoint.async_mode: async
  checkpoint.keep_latest_k: 3
  checkpoint.last_save_model_only: false
  metrics.log_freq: 1
  metrics.enable_tensorboard: true
  metrics.disable_color_printing: true
  parallelism.expert_parallel_comm_backend: standard
  parallelism.expert_parallel_a2a_dispatch_fwd_precision: mxfp8
  parallelism.expert_parallel_a2a_combine_bwd_precision: mxfp8
  model.converters: [quantize.grouped_mm.mx]
  quantize.grouped_mm.mx.recipe_name: mxfp8
  quantize.grouped_mm.mx.fqns: [experts]
  comm.train_timeout_seconds: 300
# The bash of each attempt. The supervisor sets its variables, and writes it with
# their values into the attempt's folder.
command: |
  # Without --cpus-per-task, which srun has not inherited since Slurm 22.05, all ranks share one core. One
  # failed node ends the step. The supervisor finds a step that hangs by its --job-name.
  # Training goes on if its log can't be written, as on a full disk.
  srun --nodes="${NUM_NODES}" --ntasks="${NUM_NODES}" --nodelist="${TRAIN_NODES}" \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE}}" \
    --kill-on-bad-exit=1 --wait=60 --job-name="${ATTEMPT}" \
    '--container-image=nvcr.io#nvidia/pytorch:26.02-py3' \
    --container-mounts="${COOKBOOK_ROOT}:${COOKBOOK_ROOT},${COOKBOOK_CODE}:${COOKBOOK_CODE},${CELL_DIR}:${CELL_DIR}"',/mnt/data:/mnt/data,/mnt/with space:/data' \
    --container-workdir="${COOKBOOK_ROOT}" \
    torchrun --nnodes="${NUM_NODES}" --nproc-per-node="${RANKS_PER_NODE}" --role=rank \
    --rdzv-backend=c10d --rdzv-endpoint="${RDZV_ENDPOINT}" --rdzv-id="${RDZV_ID}" \
    --log-dir="${COOKBOOK_ATTEMPT_DIR}/ranks" --redirects=3 --tee=3 --local-ranks-filter="${SHOWN_RANKS}" \
    -m torchtitan.train "${TRAIN_ARGS[@]}" 2>&1 |
    { tee -a "${COOKBOOK_ATTEMPT_DIR}/train.log" || cat >/dev/null; }
# What PRECISION chooses: what must be active in training, and what that needs.
precision:
  mxfp8:
    expect:
      grouped_gemms: mxfp8
      linear_layers: bf16
    needs:
      compute_capability: 10.0
      packages: [torchao]
    emulated: true
# What EP_BACKEND chooses.
ep_backend:
  mxfp8_a2a:
    expect:
      dispatch: mxfp8
    needs:
      compute_capability: 10.0
      packages: [torchao]
      expert_parallel: true
      options:
        parallelism.expert_tensor_parallel_degree: 1
    emulated: true
# The cluster, for the checks of nodes and for requeues.
profile:
  description: 'Slurm: 32 nodes x 8 B200 behind an account, tasks in a container'
  scheduler: slurm
  nodes: 32
  gpus_per_node: 8
  gpu:
    name: B200
    compute_capability: 10.0
    memory_gib: 178
  partition: training
  account: research
  time: 04:00:00
  exclude: [worker-7, worker-9]
  sbatch:
    comment: it's a "test" of $HOME
    reservation: moe
    spread-job: true
  cpus_per_task: 96
  exclusive: true
  requeue: false
  source: [/etc/profile.d/network cards.sh]
  environment:
    NCCL_DEBUG: WARN
    WITH_SPACES: a 'b' "c" $(touch executed) `touch executed`
  container:
    image: nvcr.io#nvidia/pytorch:26.02-py3
    mounts: ['/mnt/data:/mnt/data', '/mnt/with space:/data']
  comm:
    train_timeout_seconds: 300
CELL
