# shellcheck shell=bash disable=SC2154,SC2034  # options and settings are shared between the sourced files
# Several machines, which run the same command, each with its number: the first one does all stages, the others train with
# it, and write nothing but their logs. Several processes on a CPU are started in the same way.

resolve_nodes() {
  local steps=${SLURM_STEP_NUM_NODES:-1}
  master_host='' master_port=0
  [[ -z $sbatch ]] || check_sbatch
  [[ $nnodes != auto ]] || nnodes=$steps
  if ((nnodes == 1)); then
    [[ ${node_rank/auto/0} == 0 && -z $master ]] || die "--node-rank and --master are for several machines: add --nnodes"
    node_rank=0
    return
  fi
  [[ -z $seeds ]] || die "--seeds and --nnodes exclude each other: train each seed by itself, with --seed and --exp"
  ((steps == 1 || steps == ${SLURM_STEP_NUM_TASKS:-$steps})) ||
    die "srun has started $SLURM_STEP_NUM_TASKS tasks on $steps machines: give srun --ntasks-per-node 1"
  [[ $node_rank != auto || $steps != "$nnodes" ]] || node_rank=$SLURM_NODEID
  if [[ $node_rank == auto ]]; then
    $dry_run || [[ -n $sbatch ]] || die "--nnodes $nnodes needs --node-rank: 0 on the machine that prepares the data," \
      "up to $((nnodes - 1)) on the others"
    node_rank=0
  fi
  ((node_rank < nnodes)) || die "--node-rank $node_rank: with --nnodes $nnodes the numbers are 0 to $((nnodes - 1))"
  [[ -n $sbatch ]] || resolve_master "$steps"
}

# HOST, HOST:PORT, or in brackets as [::1]:29500; under SLURM the first machine of the step, and a port of the job's own.
resolve_master() {
  local hosts
  if [[ -z $master ]] && (($1 == nnodes)); then
    hosts=$(scontrol show hostnames "$SLURM_STEP_NODELIST" 2>/dev/null) || die "scontrol does not name the machines of" \
      "this step: give --master, the first of them"
    master=${hosts%%$'\n'*}:$((20000 + SLURM_JOB_ID % 20000))
  fi
  [[ -n $master ]] || die "--nnodes $nnodes needs --master: the name or address of the machine with --node-rank 0"
  [[ $master =~ ^(\[[0-9a-fA-F:.]+\]|[^]:/[:space:][]+)(:([0-9]+))?$ ]] || die "--master takes HOST or HOST:PORT, not '$master'"
  master_host=$(tr -d '[]' <<<"${BASH_REMATCH[1]}") master_port=${BASH_REMATCH[3]:-29500}
  ((10#$master_port > 0 && 10#$master_port < 65536)) || die "--master $master: ports are numbers from 1 to 65535"
}

uses_torchrun() { ((nnodes > 1 || processes > 1 && ngpu == 0)); }

# The words that start the processes of machine number $1.
launcher() {
  local place=(--nnodes "$nnodes" --node_rank "$1" --master_addr "$master_host" --master_port "$master_port")
  ((nnodes > 1)) || place=(--standalone)
  printf '%s\n' torchrun "${place[@]}" --nproc_per_node "$processes" --no_python
}

# start_training, with progress_flags set: the training's processes of this machine; in a dry run those of all.
start_training() {
  local n
  local -a words
  uses_torchrun || { run "${train_command[@]}"; return; }
  mapfile -t words < <(launcher "$node_rank")
  if $dry_run; then
    for ((n = 0; n < nnodes; n++)); do
      ((nnodes == 1)) || say "# on machine $n:"
      mapfile -t words < <(launcher "$n")
      quote "${words[@]}" "${train_command[@]}"
    done
    return
  fi
  # the time that torchrun gives the others to save, where one has ended; one that is stuck ends sooner
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
  progress_flags+=(--torchrun --peers "$peers")
  run "${words[@]}" "${train_command[@]}"
}

# What the other machines leave when they fail, as it is now: what they leave from here on ends this one, too.
watch_peers() {
  peers='{}'
  ((nnodes > 1)) || return 0
  rm -f "$exp/logs/node$node_rank.failed"
  peers=$(python3 "$common/nodes.py" look --logs "$exp/logs" --nnodes "$nnodes" --node-rank "$node_rank")
}

# tell_peers WORDS...: why this machine has failed, unless it is that another one has.
tell_peers() {
  ((nnodes == 1)) || [[ $* == machine\ [0-9]*:* || $* == *'lost another process'* ]] ||
    say "$@" >"$exp/logs/node$node_rank.failed"
}

check_port() {
  ((nnodes == 1)) || python3 "$common/nodes.py" port --port "$master_port" || exit 2
}

# The part of a machine other than the first: wait for the data, and train.
join_training() {
  if ((stage > 4 || stop_stage < 4)); then
    say "only the first machine has these stages: nothing to do here"
    return
  fi
  $dry_run && { stage_4; return; }
  mkdir -p "$exp/logs" || die "cannot write to $exp: choose another folder with --exp"
  take_lock "$exp/logs/node$node_rank.lock"
  watch_peers
  use_cores
  ensure_env
  if ((stage == 0)); then
    log=$exp/logs/0-set-up.node$node_rank.log
    say "stage 0 set-up"
    attempt 0 set_up "$exp/logs/node$node_rank.env.txt"
  fi
  log=$exp/logs/4-train.node$node_rank.log
  say "stage 4 train, when machine 0 ($master_host:$master_port) has prepared the data"
  attempt 4 train_with_first
  say "  done; machine 0 does the rest"
}

train_with_first() {
  local progress_flags=(--every 60)
  local -a words=(--hours "$wait_hours" --logs "$exp/logs" --marker "$exp/.done.3" --key "${stage_keys[3]}")
  ((stage > 0)) || words+=(--done "$exp/.done.4" --done-key "${stage_keys[4]}")
  run python3 "$common/nodes.py" wait --host "$master_host" --port "$master_port" --peers "$peers" "${words[@]}"
  ((stage > 0)) || ! is_done 4 || { say "  already done"; return 0; }
  progress_flags=(--every 600)
  start_training
}

check_sbatch() {
  local folder
  folder=$(dirname "$sbatch")
  [[ ! -e $sbatch ]] || die "--sbatch $sbatch is there already: remove it, or choose another name"
  [[ -d $folder && -w $folder ]] || die "--sbatch $sbatch: no file can be written there"
  [[ -n ${option_given[ngpu]-} ]] || die "--sbatch needs --ngpu: the GPUs on each machine of the job"
}

# --sbatch FILE: this command, one task on each machine, as a job that goes on after its time limit.
write_sbatch() {
  local -a kept others gpus=()
  ((ngpu == 0)) || gpus=("#SBATCH --gpus-per-node=$ngpu")
  without_options 'sbatch|nnodes|node.rank|master' "$@"
  {
    say '#!/usr/bin/env bash'
    say "# The recipe on $nnodes machine(s): $(quote sbatch "$sbatch"). Options there, such as --time, are stronger than these."
    say '# 300 seconds before the time is over (leave enough for one validation) the training saves, and the job is put in'
    say '# the queue again. A pre-empted one saves at SIGTERM, and SLURM itself puts it in the queue.'
    printf '#SBATCH --%s\n' "job-name=$task" "nodes=$nnodes" ntasks-per-node=1
    ((${#gpus[@]} == 0)) || say "${gpus[@]}"
    printf '#SBATCH --%s\n' time=24:00:00 requeue signal=B:USR1@300 open-mode=append output=train-%j.log
    say 'set -uo pipefail'
    say "$(quote cd "$PWD") || exit 2"
    [[ -z ${FAIRSEQ_DEEP_ENV-} ]] || quote export "FAIRSEQ_DEEP_ENV=$FAIRSEQ_DEEP_ENV"
    say "srun $(quote "$(this_script)" "${kept[@]}" "${others[@]}") &"
    cat <<'END'
child=$! over=false
trap 'over=true; kill -USR1 "$child"' USR1
# a signal ends a wait before the child has ended
until wait "$child"; status=$?; ! kill -0 "$child" 2>/dev/null; do :; done

if $over && ((status == 130)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
END
  } >"$sbatch.new" && mv "$sbatch.new" "$sbatch"
  say "wrote $sbatch: $(quote sbatch "$sbatch")"
}
