#!/usr/bin/env bash
# slurmctld runs a job at once whose dependency is on a job that it does not know.
#
# Version:  SLURM 22.05.8 (Debian 12); its daemons and munge have to be on the PATH
# Expected: "afterok:job_id: This job can begin execution after the specified jobs have successfully executed" (sbatch(1)).
#           For an id that never was, and for a job that has failed and is forgotten (MinJobAge), sbatch refuses, or the
#           job waits: DependencyNeverSatisfied.
# Seen:     sbatch takes afterok, afterany, afternotok, after and aftercorr on an id that the controller does not know, and
#           the job runs. While the controller still knows the failed job, afterok waits for ever, as expected.
# Source:   sbatch(1), --dependency; src/slurmctld/job_scheduler.c, update_job_dependency
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
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MinJobAge=2
FirstJobId=1000
SchedulerParameters=sched_interval=2
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES OverSubscribe=YES
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
job() { sbatch --parsable --output=/dev/null "$@" 2>&1; }
state() { squeue -h -t all -o '%T %r' -j "$1" 2>/dev/null || true; }
is_up() { sinfo -h -o %T 2>/dev/null | grep -q idle; }
is_forgotten() { [ -z "$(state "$1")" ]; }
has_run() { [ -e "$folder/$1" ]; }
waits() { state "$1" | grep -q DependencyNeverSatisfied; }

until_true 60 is_up || { cat "$folder"/*.log; echo "SLURM did not start here."; exit 2; }
failed=$(job --wrap 'exit 3')
known=$(job --dependency="afterok:$failed" --wrap true)
until_true 30 waits "$known" || { echo "Changed: afterok of a failed job that is known does not wait."; exit 1; }
scancel "$known"
until_true 120 is_forgotten "$failed" || { echo "The failed job was not forgotten."; exit 2; }
for dependency in "afterok:$failed" afterok:7 afterany:7 afternotok:7 after:7 aftercorr:7; do
    job --dependency="$dependency" --wrap "touch '$folder/$dependency'" >/dev/null ||
        { echo "Changed: sbatch refuses $dependency."; exit 1; }
    until_true 30 has_run "$dependency" || { echo "Changed: $dependency does not start at once."; exit 1; }
    echo "$dependency ran, and the controller knows no such job"
done
