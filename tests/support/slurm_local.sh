#!/usr/bin/env bash
# A real Slurm on one machine, in the foreground, for as long as this script lives: slurmctld and NODES slurmd daemons
# ("dgx1", "dgx2", ...), all on loopback, with a munge of their own.
#
#   unshare --mount --pid --fork --kill-child --mount-proc bash slurm_local.sh FOLDER NODES CPUS_PER_NODE FIRST_PORT
#
# Needs root and Debian's slurmctld, slurmd, slurm-client and munge.  Under unshare the daemons and every job end with
# this script, whatever ends it, and the names of the nodes exist only inside its namespace, where /etc/hosts is another
# file.  Clients outside need FOLDER/slurm.conf, named by SLURM_CONF; FOLDER/up appears when all nodes are idle.
# The CPUs are declared, not real.  A requeued job starts again after cred_expire seconds.
set -euo pipefail
folder="$1" nodes="$2" cpus="$3" port="$4"
host="$(hostname)"

mkdir -p "$folder/ctld"
# The clients may be another user's; munged requires that no other user can write to its folder.
chmod 755 "$folder"
export SLURM_CONF="$folder/slurm.conf"

cp /etc/hosts "$folder/hosts"
for ((i = 1; i <= nodes; i++)); do printf '127.0.0.1 dgx%d\n' "$i"; done >>"$folder/hosts"
mount --bind "$folder/hosts" /etc/hosts

cat >"$SLURM_CONF" <<EOF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=5
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5
StateSaveLocation=$folder/ctld
SlurmdSpoolDir=$folder/spool-%n
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
NodeName=dgx[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
EOF
# cgroup/v1 is named because slurmd refuses to start where the unified hierarchy has no delegation.
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$folder/cgroup.conf"

head -c 1024 /dev/urandom >"$folder/munge.key"
chmod 600 "$folder/munge.key"
munged --foreground --force --socket="$folder/munge.socket" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
    --seed-file="$folder/munged.seed" --log-file="$folder/munged.log" >"$folder/munged.out" 2>&1 &
while [[ ! -S "$folder/munge.socket" ]]; do sleep 0.1; done
slurmctld -D >"$folder/slurmctld.out" 2>&1 &
for ((i = 1; i <= nodes; i++)); do
    mkdir -p "$folder/spool-dgx$i"
    slurmd -D -N "dgx$i" >"$folder/slurmd-dgx$i.out" 2>&1 &
done
until [[ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" == "$nodes" ]]; do sleep 0.2; done
touch "$folder/up"
# When any daemon ends, this script ends, and the cluster with it.
wait -n
