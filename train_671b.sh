#!/bin/bash
# DeepSeek-V3 671B: 20 steps for throughput, on 32 nodes x 8 B200
#
#   sbatch train_671b.sh                                    # BF16, PyTorch's all-to-all
#   PRECISION=bf16 EP_BACKEND=deepep sbatch train_671b.sh   # published: bf16+deepep
#   PRECISION=mxfp8 EP_BACKEND=deepep sbatch train_671b.sh  # published: mxfp8+deepep
#   sbatch --nodes=16 train_671b.sh --training.steps=50     # fewer nodes, more steps
#
# PRECISION: bf16 | float8 | mxfp8 | mxfp8_linear | mxfp8_wgrad_hp;
#   or, as the published scripts have it, RECIPE: mxfp8_default | mxfp8_wgrad_hp
# EP_BACKEND: deepep | mxfp8_a2a | standard
# CELL_DIR: the run's folder, to resume it; by default runs/<recipe>/<cell>
# COOKBOOK_PREFLIGHT: full (default) | nodes | off: the check of the nodes before training
# COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns Weights & Biases on), WANDB_PROJECT
# Rendered by `make golden` from deepseek_v3_671b.yaml for soperator-b200; edit a copy.

#SBATCH --job-name=671b
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

# Values are in single quotes on purpose: bash must not expand them.
# shellcheck disable=SC1003,SC2016
set -euo pipefail

fail() {
  echo "train_671b.sh: $*" >&2
  exit 2
}

[[ -n "${SLURM_JOB_ID:-}" ]] || fail "runs inside a Slurm job; start it with: sbatch train_671b.sh"
SCRIPT="$(realpath "$0")"

# PRECISION: number format of the GEMMs
PRECISION="${PRECISION:-${RECIPE:-bf16}}"
case "${PRECISION}" in
  bf16)
    PRECISION_ARGS=(--cookbook.grouped_gemms=bf16 --cookbook.linear_layers=bf16
      --training.mixed_precision_param=bfloat16 --training.mixed_precision_reduce=float32)
    ;;
  float8)
    PRECISION_ARGS=(--cookbook.grouped_gemms=fp8_rowwise --cookbook.linear_layers=float8
      '--model.converters=quantize.linear.float8,quantize.grouped_mm.float8'
      --quantize.linear.float8.recipe_name=rowwise
      '--quantize.linear.float8.filter_fqns=output,router.gate'
      --quantize.grouped_mm.float8.fqns=experts)
    ;;
  mxfp8 | mxfp8_default | fp8)
    PRECISION=mxfp8
    PRECISION_ARGS=(--cookbook.grouped_gemms=mxfp8 --cookbook.linear_layers=bf16
      --model.converters=quantize.grouped_mm.mx --quantize.grouped_mm.mx.recipe_name=mxfp8
      --quantize.grouped_mm.mx.fqns=experts)
    ;;
  mxfp8_linear)
    PRECISION_ARGS=(--cookbook.grouped_gemms=mxfp8 --cookbook.linear_layers=mx
      '--model.converters=quantize.grouped_mm.mx,quantize.linear.mx'
      --quantize.grouped_mm.mx.recipe_name=mxfp8 --quantize.grouped_mm.mx.fqns=experts
      --quantize.linear.mx.recipe_name=mxfp8_cublas_rceil
      '--quantize.linear.mx.filter_fqns=output,router.gate,wq,wkv,wo,feed_forward.w2,shared_experts')
    ;;
  mxfp8_wgrad_hp | mxfp8_wgrad_with_hp)
    PRECISION=mxfp8_wgrad_hp
    PRECISION_ARGS=(--cookbook.grouped_gemms=mxfp8_wgrad_with_hp --cookbook.linear_layers=bf16
      --model.converters=quantize.grouped_mm.mx
      --quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp --quantize.grouped_mm.mx.fqns=experts)
    ;;
  *) fail "PRECISION: found '${PRECISION}', allowed: bf16, float8, mxfp8, mxfp8_linear, mxfp8_wgrad_hp" ;;
esac
# EP_BACKEND: how tokens travel to their experts
EP_BACKEND="${EP_BACKEND:-standard}"
case "${EP_BACKEND}" in
  deepep)
    EP_BACKEND_ARGS=(--cookbook.dispatch=deepep --parallelism.expert_parallel_comm_backend=deepep)
    export NVSHMEM_REMOTE_TRANSPORT=ibrc
    export NVSHMEM_IB_ENABLE_IBGDA=1
    export NVSHMEM_IBGDA_NIC_HANDLER=gpu
    ;;
  mxfp8_a2a)
    EP_BACKEND_ARGS=(--cookbook.dispatch=mxfp8 --parallelism.expert_parallel_comm_backend=standard
      --parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8
      --parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8)
    ;;
  standard)
    EP_BACKEND_ARGS=(--cookbook.dispatch=standard --parallelism.expert_parallel_comm_backend=standard)
    ;;
  *) fail "EP_BACKEND: found '${EP_BACKEND}', allowed: deepep, mxfp8_a2a, standard" ;;
esac
CELL="671b-${PRECISION}-${EP_BACKEND}"

# Under sbatch, this file is a copy in Slurm's spool. Slurm records the original's path, followed by the
# arguments, and the folder where sbatch was called. If the controller is busy, retry for ten minutes.
if [[ -z "${COOKBOOK_ROOT:-}" ]]; then
  until SUBMITTED="$(squeue --noheader --jobs="${SLURM_JOB_ID}" --format=%o)"; do
    [[ "${SECONDS}" -lt 600 && -z "${COOKBOOK_CHECK:-}" ]] || fail "squeue gives no answer; export COOKBOOK_ROOT"
    sleep 10
  done
  COOKBOOK_ROOT="$(cd "${SLURM_SUBMIT_DIR}" && cd "$(dirname "${SUBMITTED%" $*"}")" && pwd)"
fi
[[ -f "${COOKBOOK_ROOT}/submit.py" ]] ||
  fail "COOKBOOK_ROOT: found '${COOKBOOK_ROOT}', which is not the cookbook's folder; export COOKBOOK_ROOT"
# Paths in recipes (tokenizers, data) and in CELL_DIR are relative to the cookbook's folder.
cd "${COOKBOOK_ROOT}"
# A second start resumes in the same folder. To start another run, or to resume another one:
# CELL_DIR=runs/<run>/${CELL} sbatch train_671b.sh
CELL_DIR="$(realpath -m "${CELL_DIR:-${COOKBOOK_RUNS:-runs}/671b/${CELL}}")"

VENV="${VENV:-${COOKBOOK_ROOT}/.venv}"
[[ -x "${VENV}/bin/python" ]] || fail "VENV: no Python at ${VENV}; run: bash ${COOKBOOK_ROOT}/setup.sh, with VENV unset"
export PATH="${VENV}/bin:${PATH}"
# For `--experimental.custom_import=cookbook.titan.tt_0_2_2`.
export PYTHONPATH="${COOKBOOK_ROOT}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1
# Ranks get this environment also under `sbatch --export=NONE`.
export SLURM_EXPORT_ENV=ALL
# The file is the cluster's own: it may read unset variables, and commands in it may fail.
set +euo pipefail
# shellcheck source=/dev/null
[[ ! -r /etc/profile.d/90-nccl-network-vars.sh ]] || source /etc/profile.d/90-nccl-network-vars.sh
set -euo pipefail
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export PYTORCH_ALLOC_CONF=expandable_segments:True
if [[ "${EP_BACKEND}" == deepep && -n "${NCCL_IB_HCA:-}" ]]; then
  export NVSHMEM_HCA_LIST="${NVSHMEM_HCA_LIST:-${NCCL_IB_HCA}}"
fi
# Lines of the log begin with the global rank; torchrun fills it in.
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank${rank}]:'

TRAIN_ARGS=(
  --job.custom_config_module=cookbook.titan.tt_0_2_2.job_config
  --experimental.custom_import=cookbook.titan.tt_0_2_2
  '--job.description=DeepSeek-V3 671B'
  --model.name=deepseek_v3
  --model.flavor=671B
  --model.hf_assets_path=assets/hf/DeepSeek-V3.1-Base
  --model.print_after_conversion
  --parallelism.data_parallel_replicate_degree=1
  --parallelism.data_parallel_shard_degree=-1
  --parallelism.context_parallel_degree=1
  --parallelism.tensor_parallel_degree=2
  --parallelism.pipeline_parallel_degree=2
  --parallelism.pipeline_parallel_schedule=Interleaved1F1B
  --parallelism.expert_parallel_degree=32
  --parallelism.expert_tensor_parallel_degree=1
  --training.seq_len=8192
  --training.local_batch_size=64
  --training.dataset=c4
  --training.steps=20
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
  --debug.moe_force_load_balance
  --metrics.log_freq=1
  --metrics.enable_tensorboard
  --metrics.disable_color_printing
  # The last value of an option wins: the choice overrides the recipe, and your options override both.
  --cookbook.precision="${PRECISION}"
  --cookbook.ep_backend="${EP_BACKEND}"
  "${EP_BACKEND_ARGS[@]}"
  "${PRECISION_ARGS[@]}"
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
    --cell="${CELL}" --recipe=deepseek_v3_671b --precision="${PRECISION}" \
    --ep-backend="${EP_BACKEND}" --cluster=soperator-b200 --nproc-per-node=8 \
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
  torchrun --nnodes="${NUM_NODES}" --nproc-per-node=8 --role=rank \
  --rdzv-backend=c10d --rdzv-endpoint="${RDZV_ENDPOINT}" \
  --rdzv-id="${SLURM_JOB_ID}_${ATTEMPT}_${CELL}" \
  --log-dir="${COOKBOOK_ATTEMPT_DIR}/ranks" --redirects=3 --tee=3 --local-ranks-filter="${SHOWN_RANKS}" \
  -m torchtitan.train "${TRAIN_ARGS[@]}" --job.dump_folder="${CELL_DIR}" \
  --metrics.save_tb_folder="${ATTEMPT}/tb" --comm.save_traces_folder="${ATTEMPT}/comm_traces" \
  --profiling.save_traces_folder="${ATTEMPT}/profile_traces" \
  --profiling.save_memory_snapshot_folder="${ATTEMPT}/memory_snapshot" "$@" 2>&1 |
  { tee -a "${COOKBOOK_ATTEMPT_DIR}/train.log" || cat >/dev/null; }
