#!/bin/bash
# DeepSeek-V3 16B: 1,500 steps for the loss curve, on 32 nodes x 8 B200
#
#   sbatch train_16b.sh                                 # BF16, PyTorch's all-to-all
#   sbatch --nodes=16 train_16b.sh --training.steps=50  # fewer nodes, more steps
#
# PRECISION: bf16 | float8 | mxfp8 | mxfp8_linear | mxfp8_wgrad_hp;
#   or, as the published scripts have it, RECIPE: mxfp8_default | mxfp8_wgrad_hp
# EP_BACKEND: deepep | mxfp8_a2a | standard
# CELL_DIR: the run's folder, to resume it; by default runs/<recipe>/<cell>
# COOKBOOK_PREFLIGHT: full (default) | nodes | off: the check of the nodes before training
# COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns Weights & Biases on), WANDB_PROJECT
# Rendered by `make golden` from deepseek_v3_16b.yaml for soperator-b200; edit a copy.

#SBATCH --job-name=16b
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=128
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

fail() {
  echo "train_16b.sh: $*" >&2
  exit 2
}

# What sbatch hands on if its caller is inside another job; srun would take it for this job's resources.
unset SLURM_{CPU,GPU,MEM}_BIND SLURM_{MEM,CPUS}_PER_GPU SLURM_GPUS{,_PER_SOCKET,_PER_TASK} \
  SLURM_NTASKS_PER_{CORE,GPU,SOCKET} SLURM_TRES_PER_TASK SLURM_THREADS_PER_CORE SLURM_{HINT,DISTRIBUTION} \
  "${!SQUEUE_@}" SLURM_MEM_PER_CPU

# Under sbatch, this file is a copy in Slurm's spool. Slurm records the original's path, followed by the
# arguments, and the folder where sbatch was called. If the controller is busy, retry for ten minutes.
if [[ -z "${COOKBOOK_ROOT:-}" ]]; then
  [[ -n "${SLURM_JOB_ID:-}" ]] || fail "runs inside a Slurm job; start it with: sbatch train_16b.sh"
  # Of an array, only this element: its own number may be the array's.
  COOKBOOK_JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}"
  until SUBMITTED="$(squeue --noheader --jobs="${COOKBOOK_JOB:-${SLURM_JOB_ID}}" --format=%o)"; do
    [[ "${SECONDS}" -lt 600 ]] || fail "squeue gives no answer; export COOKBOOK_ROOT"
    sleep 10
  done
  COOKBOOK_ROOT="$(cd "${SLURM_SUBMIT_DIR}" && cd "$(dirname "${SUBMITTED%" $*"}")" && pwd)"
fi
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
# CELL_DIR=runs/<run>/<cell> sbatch train_16b.sh
exec "${VENV}/bin/python" -m cookbook.supervise --script="$(realpath "$0")" -- "$@" <<'CELL'
name: 16b
run: 16b
stack: '2026.02'
ranks_per_node: 8
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
  bf16:
    description: BF16 mixed precision
    expect:
      grouped_gemms: bf16
      linear_layers: bf16
    training:
      mixed_precision_param: bfloat16
      mixed_precision_reduce: float32
  float8:
    description: FP8 on linear layers and grouped GEMMs, for Hopper
    expect:
      grouped_gemms: fp8
      linear_layers: fp8
    needs:
      compute_capability: 9.0
      packages: [torchao]
    model:
      converters: [quantize.linear.float8, quantize.grouped_mm.float8]
    quantize:
      linear.float8:
        filter_fqns: [output, router.gate]
      grouped_mm.float8:
        fqns: [experts]
    cookbook:
      row_kernels: true
    emulated: {}
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
  mxfp8_linear:
    description: MXFP8 on grouped GEMMs and linear layers (TP 1)
    expect:
      grouped_gemms: mxfp8
      linear_layers: mx
    needs:
      compute_capability: 10.0
      packages: [torchao]
    model:
      converters: [quantize.grouped_mm.mx, quantize.linear.mx]
    quantize:
      grouped_mm.mx:
        recipe_name: mxfp8
        fqns: [experts]
      linear.mx:
        recipe_name: mxfp8_cublas_rceil
        filter_fqns: [output, router.gate, wq, wkv, wo, feed_forward.w2, shared_experts]
    emulated:
      quantize:
        grouped_mm.mx.emulate: true
        linear.mx.emulate: true
  mxfp8_wgrad_hp:
    description: MXFP8 grouped GEMMs, weight gradients in high precision
    expect:
      grouped_gemms: mxfp8_wgrad_with_hp
      linear_layers: bf16
    needs:
      compute_capability: 10.0
      packages: [torchao]
    model:
      converters: [quantize.grouped_mm.mx]
    quantize.grouped_mm.mx:
      recipe_name: mxfp8_wgrad_with_hp
      fqns: [experts]
    emulated:
      quantize.grouped_mm.mx:
        emulate: true
# What EP_BACKEND chooses.
ep_backend:
  standard:
    description: PyTorch all-to-all
    expect:
      dispatch: standard
    parallelism:
      expert_parallel_comm_backend: standard
  deepep:
    description: DeepEP (NVLink within a node, IBGDA between nodes)
    expect:
      dispatch: deepep
    needs:
      device: cuda
      packages: [deep_ep]
      expert_parallel: true
      options:
        parallelism.expert_tensor_parallel_degree: 1
    environment:
      NVSHMEM_REMOTE_TRANSPORT: ibrc
      NVSHMEM_IB_ENABLE_IBGDA: '1'
      NVSHMEM_IBGDA_NIC_HANDLER: gpu
    environment_from:
      NVSHMEM_HCA_LIST: NCCL_IB_HCA
    parallelism:
      expert_parallel_comm_backend: deepep
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
  soperator-b200:
    description: 'Soperator: 32 nodes x 8 B200, InfiniBand, shared root file system'
    scheduler: slurm
    nodes: 32
    gpus_per_node: 8
    gpu:
      name: B200
      compute_capability: 10.0
      memory_gib: 178
    cpus_per_task: 128
    exclusive: true
    requeue: true
    max_restarts: 3
    seconds_to_stop: 300
    node_failure_days: 237
    source_if_exists: [/etc/profile.d/90-nccl-network-vars.sh]
    environment:
      TORCH_NCCL_ASYNC_ERROR_HANDLING: '1'
      PYTORCH_ALLOC_CONF: expandable_segments:True
    bandwidth:
      all_reduce: 20
      all_to_all: 5
    rendezvous_port: 29500
CELL
