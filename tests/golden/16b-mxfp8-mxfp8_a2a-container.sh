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

# What sbatch hands on if its caller is inside another job; srun would take it for this job's resources.
unset SLURM_{CPU,GPU,MEM}_BIND SLURM_{MEM,CPUS}_PER_GPU SLURM_GPUS{,_PER_SOCKET,_PER_TASK} \
  SLURM_NTASKS_PER_{CORE,GPU,SOCKET} SLURM_TRES_PER_TASK SLURM_THREADS_PER_CORE SLURM_{HINT,DISTRIBUTION} \
  "${!SQUEUE_@}" SLURM_MEM_PER_CPU

COOKBOOK_ROOT=${COOKBOOK_ROOT:-/shared/moe-cookbook}
[[ -f "${COOKBOOK_ROOT}/submit.py" ]] ||
  fail "COOKBOOK_ROOT: found '${COOKBOOK_ROOT}', which is not the cookbook's folder; export COOKBOOK_ROOT"
# Paths in options (tokenizers, data) and in CELL_DIR are relative to the cookbook's folder.
cd "${COOKBOOK_ROOT}"
VENV="${VENV:-${COOKBOOK_ROOT}/.venv}"
[[ -x "${VENV}/bin/python" ]] || fail "VENV: no Python at ${VENV}; run: bash ${COOKBOOK_ROOT}/setup.sh, with VENV unset"
# A job that Slurm starts again runs the code that it began with, which its run's folder carries.
COOKBOOK_FOLDER="${COOKBOOK_RUNS:-runs}/16b"
[[ -z "${CELL_DIR:-}" ]] || COOKBOOK_FOLDER="$(dirname "$(realpath -m "${CELL_DIR}")")"
COOKBOOK_CODE="${COOKBOOK_FOLDER}/code/job-${SLURM_JOB_ID:-}"
[[ "${SLURM_RESTART_COUNT:-0}" != 0 && -d "${COOKBOOK_CODE}" ]] || COOKBOOK_CODE="${COOKBOOK_ROOT}"
COOKBOOK_CODE="$(realpath "${COOKBOOK_CODE}")"
# PYTHONSAFEPATH: else Python imports from the working folder first.
export COOKBOOK_ROOT VENV PYTHONSAFEPATH=1 PYTHONPATH="${COOKBOOK_CODE}${PYTHONPATH:+:${PYTHONPATH}}"

# What is exported here or above reaches the ranks. All else is below: the supervisor checks it, writes it
# to CELL_DIR/cell.yaml and trains by that, attempt after attempt: it restarts what fails or hangs, saves
# before the time limit, and requeues the job.
#
# A second start resumes in the same folder. To start another run, or to resume another one:
# CELL_DIR=runs/<run>/<cell> sbatch train.sh
exec "${VENV}/bin/python" -m cookbook.supervise --script="$(realpath "$0")" -- "$@" <<'CELL'
name: 16b-mxfp8-mxfp8_a2a
run: 16b
stack: '2026.02'
ranks_per_node: 8
files:
  cluster: /shared/moe-cookbook/tests/clusters/container.yaml
# The bash of each attempt. The supervisor sets its variables, and writes it with
# their values into the attempt's folder.
command: |
  # Without --cpus-per-task, which srun has not inherited since Slurm 22.05, all ranks share one core. One
  # failed node ends the step. The supervisor finds a step that hangs by its --job-name. The line before
  # torchrun keeps ranks alive when Slurm announces a preemption by SIGTERM, so that they can save.
  # Training goes on if its log can't be written, as on a full disk.
  srun --nodes="${NUM_NODES}" --ntasks="${NUM_NODES}" --nodelist="${TRAIN_NODES}" \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE}}" \
    --kill-on-bad-exit=1 --wait=60 --job-name="${ATTEMPT}" \
    '--container-image=nvcr.io#nvidia/pytorch:26.02-py3' \
    --container-mounts="${COOKBOOK_ROOT}:${COOKBOOK_ROOT},${COOKBOOK_CODE}:${COOKBOOK_CODE},${CELL_DIR}:${CELL_DIR}"',/mnt/data:/mnt/data,/mnt/with space:/data' \
    --container-workdir="${COOKBOOK_ROOT}" \
    python -m cookbook.titan.common.outlive \
    torchrun --nnodes="${NUM_NODES}" --nproc-per-node="${RANKS_PER_NODE}" --role=rank \
    --rdzv-backend=c10d --rdzv-endpoint="${RDZV_ENDPOINT}" --rdzv-id="${RDZV_ID}" \
    --log-dir="${COOKBOOK_ATTEMPT_DIR}/ranks" --redirects=3 --tee=3 --local-ranks-filter="${SHOWN_RANKS}" \
    -m torchtitan.train "${TRAIN_ARGS[@]}" 2>&1 |
    { tee -a "${COOKBOOK_ATTEMPT_DIR}/train.log" || cat >/dev/null; }
# The options. Those of EP backend, precision and cluster, below, win over them.
recipe:
  deepseek_v3_16b:
    name: 16b
    description: 'DeepSeek-V3 16B: 1,500 steps for the loss curve, on 32 nodes x 8 B200'
    nodes: 32
    max_restarts: 10
    model:
      name: deepseek_v3
      flavor: 16B
      hf_assets_path: assets/hf/deepseek-moe-16b-base
      print_after_conversion: true
    parallelism:
      data_parallel_replicate_degree: 1
      data_parallel_shard_degree: -1
      context_parallel_degree: 1
      tensor_parallel_degree: 1
      pipeline_parallel_degree: 1
      expert_parallel_degree: 32
      expert_tensor_parallel_degree: 1
    training:
      seq_len: 8192
      local_batch_size: 16
      dataset: c4
      steps: 1500
      max_norm: 1.0
    optimizer:
      name: AdamW
      lr: 0.0001
      eps: 1.0e-08
    lr_scheduler:
      warmup_steps: 2000
      decay_ratio: 0.8
      decay_type: cosine
      min_lr_factor: 0.1
    activation_checkpoint:
      mode: full
    compile:
      enable: true
      components: [model, loss]
    debug:
      moe_force_load_balance: false
      seed: 42
    checkpoint:
      enable: true
      interval_minutes: 10
      async_mode: async
      keep_latest_k: 3
      last_save_model_only: false
    metrics:
      log_freq: 1
      enable_tensorboard: true
      disable_color_printing: true
# What PRECISION chooses; `expect` must be active in training.
precision:
  mxfp8:
    description: MXFP8 on the routed experts' grouped GEMMs
    expect:
      grouped_gemms: mxfp8
      linear_layers: bf16
    needs:
      compute_capability: 10.0
      packages: [torchao]
    model:
      converters: [quantize.grouped_mm.mx]
    quantize.grouped_mm.mx:
      recipe_name: mxfp8
      fqns: [experts]
    emulated:
      quantize.grouped_mm.mx:
        emulate: true
# What EP_BACKEND chooses.
ep_backend:
  mxfp8_a2a:
    description: TorchAO's MXFP8 all-to-all
    expect:
      dispatch: mxfp8
    needs:
      compute_capability: 10.0
      packages: [torchao]
      expert_parallel: true
      options:
        parallelism.expert_tensor_parallel_degree: 1
    parallelism:
      expert_parallel_comm_backend: standard
      expert_parallel_a2a_dispatch_fwd_precision: mxfp8
      expert_parallel_a2a_combine_bwd_precision: mxfp8
    emulated: {}
cluster:
  container:
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
