#!/usr/bin/env bash
# Runs the tests of SLURM on a real cluster of two nodes, both on this machine: tests/slurm.sh [argument of pytest ...]
# Needs root, and Debian's packages slurm-wlm and munge, which it installs. Takes some minutes; --keep leaves the cluster
# running and prints its SLURM_CONF. Set LIMIT_MINUTES=3 on a loaded machine, where jobs start slowly.
set -euo pipefail
unset CDPATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."
keep=false
[[ ${1-} != --keep ]] || { keep=true; shift; }
if ! command -v slurmctld munged >/dev/null; then
  apt-get install -y -q slurm-wlm munge
fi
dir=$(mktemp -d /tmp/slurm.XXXXXX)
host=$(hostname -s)
# three neighbouring free ports
port=$(python3 - <<'END'
import contextlib, random, socket
while True:
    first = random.randrange(16000, 32000)
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        for number in range(3):
            stack.enter_context(socket.socket()).bind(("127.0.0.1", first + number))
        print(first)
        break
END
)
cat >"$dir/slurm.conf" <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
StateSaveLocation=$dir
SlurmdSpoolDir=$dir/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/%n.log
SlurmctldPort=$port
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=60
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=4 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
export SLURM_CONF=$dir/slurm.conf
install -d -o munge -g munge /run/munge
pgrep -x munged >/dev/null || runuser -u munge -- munged
stop() {
  scancel --user="$(id -un)" || true
  mapfile -t daemons < <(cat "$dir"/*.pid)
  while kill "${daemons[@]}" 2>/dev/null; do sleep 0.2; done
  rm -rf "$dir"
}
$keep || trap stop EXIT
slurmctld
slurmd -N n1
slurmd -N n2
for _ in {1..60}; do
  state=$(sinfo --noheader --format=%T)
  [[ $state != idle ]] || break
  sleep 1
done
[[ $state == idle ]] || { echo "the nodes are $state: see $dir/*.log" >&2; trap - EXIT; exit 1; }
$keep && { echo "export SLURM_CONF=$SLURM_CONF"; exit; }
# shellcheck source=examples/common/env.sh
. examples/common/env.sh
ensure_env dev
OMP_NUM_THREADS=1 python -m pytest -q -p no:xdist "${@:-tests/recipes/test_slurm.py}"
