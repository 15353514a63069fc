#!/usr/bin/env bash
# A real Slurm cluster of two nodes on this machine, for the tests. It has its own configuration, munge key, ports and
# folder, so a Slurm that is already here is not touched. CPUs, memory and GPUs of its nodes are numbers only. Jobs in its
# partitions `spot` (told 20 s before, requeued) and `ending` (ended at once) give way to those in `debug`; an array has
# three tasks at most.
#
#   tools/slurm_test_cluster.sh install        Debian's packages, where missing (root, Debian or Ubuntu)
#   tools/slurm_test_cluster.sh start FOLDER   prints the SLURM_CONF to export; FOLDER must be new or stopped
#   tools/slurm_test_cluster.sh stop FOLDER    ends the daemons and every job, removes FOLDER
#
# Exit code 3: Slurm cannot run here, and the last line says why.
set -euo pipefail
export PATH="$PATH:/usr/sbin:/sbin"

cannot() { echo "no Slurm here: $*" >&2; exit 3; }

missing() { # the daemons and commands that are not there
    local name; for name in slurmctld slurmd sbatch munged; do command -v "$name" >/dev/null || printf '%s ' "$name"; done
}

need_root() { [ "$(id -u)" = 0 ] || cannot "its daemons need root, this is user $(id -un)"; }

install() {
    [ -n "$(missing)" ] || return 0
    ! command -v sbatch >/dev/null || cannot "a Slurm is here without $(missing); it is not touched"
    need_root
    command -v apt-get >/dev/null || cannot "it is installed from Debian's packages, and there is no apt-get"
    local policy=/usr/sbin/policy-rc.d added=
    if [ ! -e "$policy" ]; then # the packages must not start services of their own
        printf '#!/bin/sh\nexit 101\n' >"$policy"; chmod +x "$policy"; added=1
    fi
    local log; log="$(mktemp)"
    { apt-get install -y --no-install-recommends slurm-wlm munge \
        || { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge; }; } >"$log" 2>&1 || {
        tail -n 5 "$log" >&2; [ -z "$added" ] || rm -f "$policy"; cannot "apt-get could not install slurm-wlm and munge (above)"; }
    [ -z "$added" ] || rm -f "$policy"
    rm -f "$log"
}

free_ports() { # $1 of them
    python3 - "$1" <<'PY'
import socket, sys
sockets = [socket.socket() for _ in range(int(sys.argv[1]))]
for sock in sockets:
    sock.bind(("", 0))
print(*(sock.getsockname()[1] for sock in sockets))
PY
}

start() {
    local folder="$1" host ctld d1 d2
    [ -z "$(missing)" ] || cannot "$(missing)not installed; run $0 install"
    need_root
    mkdir -p "$folder"; chmod 755 "$folder"
    folder="$(cd "$folder" && pwd)"
    [ ! -e "$folder/slurm.conf" ] || cannot "$folder already holds a cluster; stop it first"
    mkdir -p "$folder"/{state,log,munge}; chmod 711 "$folder/munge"
    host="$(hostname -s)"
    read -r ctld d1 d2 <<<"$(free_ports 3)"
    dd if=/dev/urandom of="$folder/munge/key" bs=128 count=1 status=none; chmod 600 "$folder/munge/key"
    munged --force --socket="$folder/munge/socket" --key-file="$folder/munge/key" --pid-file="$folder/munge.pid" \
        --seed-file="$folder/munge/seed" --log-file="$folder/log/munged.log" || cannot "munged did not start: $(tail -n 2 "$folder/log/munged.log")"
    cat >"$folder/slurm.conf" <<CONF
ClusterName=tango-test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool.%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=200000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=60
MinJobAge=20
MaxArraySize=3
KillWait=15
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd.%n.log
JobRequeue=1
MpiDefault=none
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$d1 CPUs=8 RealMemory=400000 Gres=gpu:small:2 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$d2 CPUs=8 RealMemory=400000 Gres=gpu:small:2,gpu:large:2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=ending Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe=NO PriorityTier=1 PreemptMode=CANCEL GraceTime=0
CONF
    touch "$folder"/card{0,1,2,3}
    cat >"$folder/gres.conf" <<CONF
NodeName=n[1-2] Name=gpu Type=small File=$folder/card[0-1]
NodeName=n2 Name=gpu Type=large File=$folder/card[2-3]
CONF
    export SLURM_CONF="$folder/slurm.conf"
    slurmctld && slurmd -N n1 && slurmd -N n2 || { stop "$folder"; cannot "slurmctld or slurmd did not start"; }
    for _ in $(seq 100); do
        if [ "$(sinfo -h -p debug -o %t 2>/dev/null)" = idle ]; then
            echo "$folder/slurm.conf"; return
        fi
        sleep 0.2
    done
    local why; why="$(grep -h -i -E 'error|fatal' "$folder"/log/*.log | tail -n 3)"
    stop "$folder"
    cannot "the nodes did not become idle within 20 s: $why"
}

stop() {
    local folder="$1" pid file
    [ -e "$folder/slurm.conf" ] || { echo "no test cluster in $folder" >&2; exit 2; }
    export SLURM_CONF="$folder/slurm.conf"
    if [ -e "$folder/slurmctld.pid" ]; then
        timeout 10 scancel --user=root --full --signal=KILL 2>/dev/null || true
        timeout 10 scancel --user=root 2>/dev/null || true
        for _ in $(seq 25); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
    fi
    for file in "$folder"/slurmd.*.pid "$folder/slurmctld.pid"; do
        [ ! -e "$file" ] || kill "$(cat "$file")" 2>/dev/null || true
    done
    for file in "$folder"/slurmd.*.pid "$folder/slurmctld.pid" "$folder/munge.pid"; do
        [ -e "$file" ] || continue
        pid="$(cat "$file")"; kill "$pid" 2>/dev/null || true
        for _ in $(seq 50); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
    # What a busy machine did not manage to end in time: processes of this cluster's jobs, told by their environment.
    for file in /proc/[0-9]*/environ; do
        if tr '\0' '\n' 2>/dev/null <"$file" | grep -qxF "SLURM_CONF=$folder/slurm.conf" \
            && { tr '\0' '\n' 2>/dev/null <"$file" | grep -q '^SLURM_JOB_ID=' || grep -q slurmstepd "${file%environ}cmdline"; }; then
            pid="${file#/proc/}"; kill -9 "${pid%/environ}" 2>/dev/null || true
        fi
    done
    rm -rf "$folder"
}

case "${1:-}" in
    install) install ;;
    start | stop) "$1" "${2:?give a folder for the cluster}" ;;
    *) sed -n '2,12p' "$0"; exit 2 ;;
esac
