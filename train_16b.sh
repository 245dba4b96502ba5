#!/bin/bash
# DeepSeek-V3 16B: 1,500 steps for the loss curve, on 32 nodes x 8 B200
#
#   sbatch train_16b.sh                                 # BF16, PyTorch's all-to-all
#   sbatch --nodes=16 train_16b.sh --training.steps=50  # fewer nodes, more steps
#
# Variables it reads:
#   PRECISION     bf16 | float8 | mxfp8 | mxfp8_linear | mxfp8_wgrad_hp
#   EP_BACKEND    deepep | mxfp8_a2a | standard
#   RECIPE        the published scripts' name for PRECISION (mxfp8_default, mxfp8_wgrad_hp)
#   CELL_DIR      where the run is, and goes on; by default runs/<recipe>/<cell>
#   COOKBOOK_PREFLIGHT  full (default) | nodes | off: the look at the nodes before training
#   COOKBOOK_ROOT, VENV, WANDB_API_KEY (turns Weights & Biases on), WANDB_PROJECT
#
# Rendered by `make golden` from recipes/deepseek_v3_16b.yaml and
# recipes/cluster/soperator-b200.yaml; to change it, edit a copy, or those.

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

# Values stand in quotes, so that none is expanded.
# shellcheck disable=SC1003,SC2016
set -euo pipefail

fail() {
  echo "train_16b.sh: $*" >&2
  exit 2
}

# Slurm's controller may be busy, and a node's name may come late to DNS: neither is worth a job.
# retry TRIES SECONDS COMMAND...
retry() {
  local tries="$1" pause="$2"
  shift 2
  until "$@"; do
    ((--tries > 0)) || return 1
    sleep "${pause}"
  done
}

# The address of node $1. Slurm's is asked for first: a node's own name may lead to loopback on that node.
address_of() {
  local shown address resolved
  shown="$(scontrol show node "$1" --oneliner)" || return 1
  address="$(sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p' <<<"${shown}")"
  resolved="$(getent ahostsv4 "${address:-$1}" | awk 'NR == 1 { print $1 }')"
  case "${resolved}" in
    "") return 1 ;;
    127.*) echo "${address:-$1}" ;;
    *) echo "${resolved}" ;;
  esac
}

[[ -n "${SLURM_JOB_ID:-}" ]] || fail "runs inside a Slurm job; start it with: sbatch train_16b.sh"
NUM_NODES="${SLURM_JOB_NUM_NODES}"

# PRECISION: number format of the GEMMs
PRECISION="${PRECISION:-${RECIPE:-bf16}}"
case "${PRECISION}" in
  bf16) PRECISION=bf16 ;;
  float8) PRECISION=float8 ;;
  mxfp8 | mxfp8_default) PRECISION=mxfp8 ;;
  mxfp8_linear) PRECISION=mxfp8_linear ;;
  mxfp8_wgrad_hp | mxfp8_wgrad_with_hp) PRECISION=mxfp8_wgrad_hp ;;
  *) fail "PRECISION: found '${PRECISION}', allowed: bf16, float8, mxfp8, mxfp8_linear, mxfp8_wgrad_hp" ;;
esac
# EP_BACKEND: how tokens travel to their experts
EP_BACKEND="${EP_BACKEND:-standard}"
case "${EP_BACKEND}" in
  deepep) EP_BACKEND=deepep ;;
  mxfp8_a2a) EP_BACKEND=mxfp8_a2a ;;
  standard) EP_BACKEND=standard ;;
  *) fail "EP_BACKEND: found '${EP_BACKEND}', allowed: deepep, mxfp8_a2a, standard" ;;
esac
CELL="16b-${PRECISION}-${EP_BACKEND}"

# Slurm runs a copy of this file from its spool folder, so the path of the copy says nothing. Slurm knows
# the path that sbatch was given, followed by the arguments, and the folder that it was given in.
if [[ -z "${COOKBOOK_ROOT:-}" ]]; then
  # `check-line` asks once.
  SUBMITTED="$(retry "${COOKBOOK_CHECK:-60}" 10 squeue --noheader --jobs="${SLURM_JOB_ID}" --format=%o)" ||
    fail "COOKBOOK_ROOT: squeue gives no answer to find the cookbook by; export COOKBOOK_ROOT"
  COOKBOOK_ROOT="$(cd "${SLURM_SUBMIT_DIR}" && cd "$(dirname "${SUBMITTED%" $*"}")" && pwd)"
fi
[[ -f "${COOKBOOK_ROOT}/submit.py" ]] ||
  fail "COOKBOOK_ROOT: found '${COOKBOOK_ROOT}', which is not the cookbook's folder; export COOKBOOK_ROOT"
# Relative paths, in recipes (tokenizers, data) and in CELL_DIR, start at the cookbook's folder.
cd "${COOKBOOK_ROOT}"
# The folder stays the same, so a job that is submitted again goes on with the same run. For a run of
# its own, or to go on with another one: CELL_DIR=runs/<run>/${CELL} sbatch train_16b.sh
CELL_DIR="$(realpath -m "${CELL_DIR:-${COOKBOOK_RUNS:-runs}/16b/${CELL}}")"

VENV="${VENV:-${COOKBOOK_ROOT}/.venv}"
[[ -x "${VENV}/bin/python" ]] || fail "VENV: no Python at ${VENV}; run: bash ${COOKBOOK_ROOT}/setup.sh"
export PATH="${VENV}/bin:${PATH}"
# For `--experimental.custom_import=cookbook.titan.tt_0_2_2`.
export PYTHONPATH="${COOKBOOK_ROOT}${PYTHONPATH:+:${PYTHONPATH}}"
export PYTHONUNBUFFERED=1
if [[ -r /etc/profile.d/90-nccl-network-vars.sh ]]; then
  # The file is the cluster's own: it may read unset variables, and commands in it may fail.
  set +euo pipefail
  # shellcheck source=/dev/null
  source /etc/profile.d/90-nccl-network-vars.sh
  set -euo pipefail
fi
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export PYTORCH_ALLOC_CONF=expandable_segments:True
# Lines of the log begin with the global rank; torchrun fills it in.
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank${rank}]:'

CHOSEN_ARGS=()
case "${EP_BACKEND}" in
  deepep)
    CHOSEN_ARGS+=(
      --cookbook.ep_backend=deepep
      --cookbook.dispatch=deepep
      --parallelism.expert_parallel_comm_backend=deepep
    )
    export NVSHMEM_REMOTE_TRANSPORT=ibrc
    export NVSHMEM_IB_ENABLE_IBGDA=1
    export NVSHMEM_IBGDA_NIC_HANDLER=gpu
    if [[ -n "${NCCL_IB_HCA:-}" ]]; then
      export NVSHMEM_HCA_LIST="${NVSHMEM_HCA_LIST:-${NCCL_IB_HCA}}"
    fi
    ;;
  mxfp8_a2a)
    CHOSEN_ARGS+=(
      --cookbook.ep_backend=mxfp8_a2a
      --cookbook.dispatch=mxfp8
      --parallelism.expert_parallel_comm_backend=standard
      --parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8
      --parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8
    )
    ;;
  standard)
    CHOSEN_ARGS+=(
      --cookbook.ep_backend=standard
      --cookbook.dispatch=standard
      --parallelism.expert_parallel_comm_backend=standard
    )
    ;;
esac
case "${PRECISION}" in
  bf16)
    CHOSEN_ARGS+=(
      --cookbook.precision=bf16
      --cookbook.grouped_gemms=bf16
      --cookbook.linear_layers=bf16
      --training.mixed_precision_param=bfloat16
      --training.mixed_precision_reduce=float32
    )
    ;;
  float8)
    CHOSEN_ARGS+=(
      --cookbook.precision=float8
      --cookbook.grouped_gemms=fp8_rowwise
      --cookbook.linear_layers=float8
      '--model.converters=quantize.linear.float8,quantize.grouped_mm.float8'
      --quantize.linear.float8.recipe_name=rowwise
      '--quantize.linear.float8.filter_fqns=output,router.gate'
      --quantize.grouped_mm.float8.fqns=experts
    )
    ;;
  mxfp8)
    CHOSEN_ARGS+=(
      --cookbook.precision=mxfp8
      --cookbook.grouped_gemms=mxfp8
      --cookbook.linear_layers=bf16
      --model.converters=quantize.grouped_mm.mx
      --quantize.grouped_mm.mx.recipe_name=mxfp8
      --quantize.grouped_mm.mx.fqns=experts
    )
    ;;
  mxfp8_linear)
    CHOSEN_ARGS+=(
      --cookbook.precision=mxfp8_linear
      --cookbook.grouped_gemms=mxfp8
      --cookbook.linear_layers=mx
      '--model.converters=quantize.grouped_mm.mx,quantize.linear.mx'
      --quantize.grouped_mm.mx.recipe_name=mxfp8
      --quantize.grouped_mm.mx.fqns=experts
      --quantize.linear.mx.recipe_name=mxfp8_cublas_rceil
      '--quantize.linear.mx.filter_fqns=output,router.gate,wq,wkv,wo,feed_forward.w2,shared_experts'
    )
    ;;
  mxfp8_wgrad_hp)
    CHOSEN_ARGS+=(
      --cookbook.precision=mxfp8_wgrad_hp
      --cookbook.grouped_gemms=mxfp8_wgrad_with_hp
      --cookbook.linear_layers=bf16
      --model.converters=quantize.grouped_mm.mx
      --quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp
      --quantize.grouped_mm.mx.fqns=experts
    )
    ;;
esac

TRAIN_ARGS=(
  --job.custom_config_module=cookbook.titan.tt_0_2_2.job_config
  --experimental.custom_import=cookbook.titan.tt_0_2_2
  '--job.description=DeepSeek-V3 16B: 1,500 steps for the loss curve, on 32 nodes x 8 B200'
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
)
# The later word wins: the choice stands after the recipe, and your own words after both.
TRAIN_ARGS+=("${CHOSEN_ARGS[@]}")
if [[ -n "${WANDB_API_KEY:-}" ]]; then
  export WANDB_PROJECT="${WANDB_PROJECT:-moe-cookbook}"
  export WANDB_RUN_NAME="${WANDB_RUN_NAME:-${CELL}}"
  TRAIN_ARGS+=("--metrics.enable_wandb")
fi

JOB=("${VENV}/bin/python" -m cookbook.supervise)

# Slurm sends USR1 300 s before the time limit, and before preemption where it is set up to. The ranks look
# for the file after each step: they save a checkpoint, and end. Where that takes too long, the newest
# checkpoint has to do.
stop_at_checkpoint() {
  INTERRUPTED=yes
  [[ -z "${COOKBOOK_ATTEMPT_DIR:-}" ]] || touch "${COOKBOOK_ATTEMPT_DIR}/stop"
  # Without a checkpoint, a job that started again would make the same steps again. One that is still
  # being written, in the background, has no .metadata.
  if ((RESTARTS < 10)); then
    (sleep 225 && kill -0 $$ && compgen -G "${CELL_DIR}/checkpoint/step-*/.metadata" >/dev/null &&
      scontrol requeue "${SLURM_JOB_ID}") &
  fi
}

note_end() {
  local status=$?
  [[ -z "${ATTEMPT:-}" ]] || "${JOB[@]}" end "${CELL_DIR}" --exit-status="${status}" --signal="${TOLD}"
}

# Training that fails starts again, here or where Slurm requeues the job, and continues at its newest
# whole checkpoint; what keeps failing needs a person. An attempt that ended at a checkpoint because
# it was asked to, and said so in `stopped`, is no failure.
ASKED="$({ grep -ls "^${SLURM_JOB_ID} " "${CELL_DIR}"/attempt-*/stopped || :; } | wc -l)"
RESTARTS=$((${SLURM_RESTART_COUNT:-0} - ASKED))
WITHOUT_STEP=0

# `submit.py run` has a supervisor, which does and counts all this by itself.
if [[ -z "${COOKBOOK_SUPERVISED:-}" ]]; then
  ((RESTARTS <= 10)) || fail "restarted ${RESTARTS} times, allowed: 10; see ${CELL_DIR}"
  # Told to stop, bash would end with the status of whatever came before, which is mostly 0.
  TOLD=""
  trap 'TOLD=SIGTERM; exit 143' TERM
  trap 'TOLD=SIGINT; exit 130' INT
  trap note_end EXIT
  trap stop_at_checkpoint USR1
fi

while true; do
  # A misspelt option, a layout that does not divide or a tokenizer that is not there ends the job here, in
  # a second, and not on every rank. The run is noted as well, for `submit.py status` and `report`. The
  # answer: the number of this attempt, and the ranks whose lines the log shows, the one with the loss
  # among them.
  ANSWER="$(
    "${JOB[@]}" begin "${CELL_DIR}" --cell="${CELL}" --recipe=deepseek_v3_16b \
      --precision="${PRECISION}" --ep-backend="${EP_BACKEND}" --cluster=soperator-b200 \
      --nodes="${NUM_NODES}" -- "${TRAIN_ARGS[@]}" -- "$@"
  )"
  read -r ATTEMPT LOG_RANK SHOWN_RANKS <<<"${ANSWER}"
  # TorchTitan warns where the rank that knows the loss is not among these.
  export LOG_RANK
  export COOKBOOK_ATTEMPT_DIR="${CELL_DIR}/attempt-${ATTEMPT}"
  mkdir -p "${COOKBOOK_ATTEMPT_DIR}"

  # Every node is looked at before any rank starts: GPUs, network, disks, packages. A bad one is left out and
  # named (docs/preflight.md). COOKBOOK_PREFLIGHT=off goes on without. The answer: the nodes that train.
  TRAIN_NODES="$("${JOB[@]}" preflight "${CELL_DIR}" --attempt="${ATTEMPT}")"

  # The first node hosts the rendezvous. Its address is resolved here, for a minute at most, so that all
  # nodes are told the same.
  HEAD_NODE="${TRAIN_NODES%%,*}"
  HEAD_ADDRESS="$(retry 30 2 address_of "${HEAD_NODE}")" ||
    fail "cannot resolve the head node ${HEAD_NODE}: neither Slurm nor DNS has its address"
  # Below the ephemeral ports (32768 and up); by job, so that jobs that share a node do not meet.
  RDZV_ENDPOINT="${HEAD_ADDRESS}:$((29500 + SLURM_JOB_ID % 1000))"

  ATTEMPT_ARGS=(
    # Checkpoints belong to the cell, everything else to this attempt.
    "--job.dump_folder=${CELL_DIR}"
    "--metrics.save_tb_folder=attempt-${ATTEMPT}/tb"
    "--comm.save_traces_folder=attempt-${ATTEMPT}/comm_traces"
    "--profiling.save_traces_folder=attempt-${ATTEMPT}/profile_traces"
    "--profiling.save_memory_snapshot_folder=attempt-${ATTEMPT}/memory_snapshot"
  )
  TORCHRUN=(
    torchrun
    --nnodes="${NUM_NODES}"
    --nproc-per-node=8
    --rdzv-backend=c10d
    --rdzv-endpoint="${RDZV_ENDPOINT}"
    # New for each attempt: a worker that is left over from the last one must not join this one.
    --rdzv-id="${SLURM_JOB_ID}_${ATTEMPT}_${CELL}"
    --role=rank
    # Every rank's log is kept.
    --log-dir="${COOKBOOK_ATTEMPT_DIR}/ranks"
    --redirects=3
    --tee=3
    --local-ranks-filter="${SHOWN_RANKS}"
  )
  SRUN=(
    srun
    --nodes="${NUM_NODES}"
    --ntasks="${NUM_NODES}"
    --nodelist="${TRAIN_NODES}"
    # srun has not inherited this from sbatch since Slurm 22.05; without it, all ranks share one core.
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE}}"
    # One failed node ends the step, instead of the others waiting for it.
    --kill-on-bad-exit=1
    --wait=60
    # By this name a supervisor ends a step that hangs, and no other step of the job.
    "--job-name=attempt-${ATTEMPT}"
  )

  echo "cookbook: cell ${CELL}, attempt ${ATTEMPT}, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  echo "cookbook: ${NUM_NODES} nodes x 8 ranks, rendezvous ${RDZV_ENDPOINT}"
  echo "cookbook: writing to ${COOKBOOK_ATTEMPT_DIR}"

  # A log that can't be written, as on a full disk, fails no training.
  "${SRUN[@]}" "${TORCHRUN[@]}" -m torchtitan.train "${TRAIN_ARGS[@]}" "${ATTEMPT_ARGS[@]}" "$@" 2>&1 |
    { tee -a "${COOKBOOK_ATTEMPT_DIR}/train.log" || cat >/dev/null; } &
  TRAINING=$!
  # USR1 ends `wait`, and not the training.
  until
    INTERRUPTED=""
    STATUS=0
    wait "${TRAINING}" || STATUS=$?
    [[ -z "${INTERRUPTED}" ]]
  do :; done

  [[ -z "${COOKBOOK_SUPERVISED:-}" ]] || exit "${STATUS}"
  if [[ -e "${COOKBOOK_ATTEMPT_DIR}/stopped" ]]; then
    # Slurm ends this script, and starts it again when it can.
    scontrol requeue "${SLURM_JOB_ID}" && sleep 60
    fail "ended at a checkpoint, and is not requeued; to go on: sbatch train_16b.sh"
  fi
  ((STATUS)) || exit 0
  # The first step of an attempt leaves this file.
  WITHOUT_STEP=$((WITHOUT_STEP + 1))
  [[ ! -e "${COOKBOOK_ATTEMPT_DIR}/environment.json" ]] || WITHOUT_STEP=0
  ((RESTARTS < 10 && WITHOUT_STEP < 2)) || exit "${STATUS}"
  RESTARTS=$((RESTARTS + 1))
  AGAIN="restarted (${RESTARTS} of 10)"
  echo "cookbook: attempt ${ATTEMPT} failed with status ${STATUS}; ${AGAIN}" >&2
  "${JOB[@]}" end "${CELL_DIR}" --exit-status="${STATUS}" --decision="${AGAIN}"
  # If the job is being cancelled, the signal comes now.
  sleep 5
done
