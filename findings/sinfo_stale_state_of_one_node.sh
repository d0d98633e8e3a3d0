#!/usr/bin/env bash
# sinfo of one node goes on to say "mixed" after the node's last job has ended, until somebody asks for all nodes.
#
# Version:  SLURM 22.05.8 (Debian 12), and the source of 2026 still says so; its daemons and munge have to be on the PATH
# Expected: `sinfo -n NODE` and `sinfo` give the same state.
# Seen:     A single node is answered from counts of CPUs that only a request for all nodes renews. After a job that was
#           seen running, `sinfo -n NODE` says "mixed" for ever; one plain `sinfo` makes it "idle". A script that polls
#           the one node never sees it idle, and whoever looks at it by hand repairs it by looking.
# Source:   src/slurmctld/proc_req.c, _slurm_rpc_dump_node_single: select_g_select_nodeinfo_set_all() is within #if 0,
#           "too slow for our use here"
#
# Exit: 0 while it is as seen, 1 if it has changed, 2 where there is no SLURM.
set -euo pipefail

PATH=$PATH:/usr/sbin
for program in slurmctld slurmd munged sbatch; do
    command -v "$program" >/dev/null || { echo "There is no $program here: this needs SLURM's daemons and munge."; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "This needs root, as slurmd does."; exit 2; }
folder=$(mktemp -d)
chmod 755 "$folder"
host=$(hostname -s) pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$folder"' EXIT
export SLURM_CONF=$folder/slurm.conf
head -c 1024 /dev/urandom >"$folder/key"
chmod 600 "$folder/key"
cat >"$SLURM_CONF" <<CONF
ClusterName=finding
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmctldPort=16827
SlurmdPort=16828
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES
CONF
mkdir "$folder/state" "$folder/spool"
munged --foreground --force --key-file="$folder/key" --socket="$folder/munge.sock" --pid-file="$folder/munge.pid" \
    --seed-file="$folder/seed" >"$folder/munge.log" 2>&1 &
pids+=($!)
slurmctld -D -i >"$folder/slurmctld.log" 2>&1 &
pids+=($!)
slurmd -D >"$folder/slurmd.log" 2>&1 &
pids+=($!)

until_true() {  # SECONDS COMMAND...
    local left=$(($1 * 5)); shift
    until "$@"; do left=$((left - 1)); [ "$left" -gt 0 ] || return 1; sleep 0.2; done
}
of_all() { sinfo -h -N -o %T 2>/dev/null; }
of_one() { sinfo -h -N -n "$host" -o %T; }
is_idle() { [ "$(of_all)" = idle ]; }
is_mixed() { [ "$(of_all)" = mixed ]; }
is_empty() { [ -z "$(squeue -h)" ]; }

until_true 60 is_idle || { cat "$folder"/*.log; echo "SLURM did not start here."; exit 2; }
sbatch --output=/dev/null --wrap 'sleep 5' >/dev/null
until_true 30 is_mixed || { echo "The job did not start."; exit 2; }
until_true 60 is_empty || { echo "The job did not end."; exit 2; }
sleep 10
said=$(of_one)
[ "$said" = mixed ] || { echo "Changed: without a request for all nodes, the one node is $said."; exit 1; }
of_all >/dev/null
said=$(of_one)
[ "$said" = idle ] || { echo "Changed: after a request for all nodes, the one node is $said."; exit 1; }
echo "sinfo -n $host said mixed, 10 s after the only job had ended, and idle once sinfo had listed all nodes"
