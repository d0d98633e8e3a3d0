"""What SLURM does to a job, and what a job's script meets before its ranks run. The first row that fits is the cause.

A job's own words are ``STATE REASON`` of squeue or sacct. The patterns hold over the versions of SLURM from 20 on;
tests/diagnosis/recorded.yaml keeps their texts.
"""

from __future__ import annotations

from trainkit.diagnosis.case import RESUME, Case, case

LIMITS = 'sinfo -o "%P %l %D %c %m %G"'

HARDWARE: tuple[Case, ...] = (
    case(
        "job batch", "node-failure",
        r"NODE_FAIL|NodeDown|^srun: error: Node failure on (?P<failed>\S+)|DUE TO NODE FAILURE",
        "{failed} went down or stopped answering while the job ran.",
        RESUME + " --exclude {failed_hosts}",
    ),
    case(
        "job batch", "boot-failure",
        r"BOOT_FAIL|PrologFailed|\bProlog$|launch_prolog_fail|[Pp]rolog (failure|failed|hung)"
        r"|container_[gp]_\w+[: ].*failed",
        "{nodes} could not be prepared for the job: its boot or the site's prolog failed.",
        RESUME + " --exclude {hosts}", "Tell the site's staff, and do without it:",
    ),
    case(
        "job batch rank", "host-out-of-memory",
        r"OUT_OF_MEMORY|OutOfMemory\b(?!Error)|oom[-_ ]?kill|OOM Killed|: Out Of Memory"
        r"|exceeded (step|job) memory limit|exceeded memory limit .* being killed"
        r"|DataLoader worker \(pid\S* [\d, ]+\) (is killed by signal: Killed|exited unexpectedly with exit code -9\b)"
        r"|DefaultCPUAllocator: can't allocate memory|std::bad_alloc|\b_?(Array)?MemoryError\b"
        r"|Unable to allocate [\d.]+ \wiB|Cannot allocate memory(?!.*</torch_)",
        "{who} used more memory than the job has on its node, or the node itself.",
        RESUME + "{more_memory}", "More memory for each node{all_of_it}, or fewer data.workers:",
    ),
)  # fmt: skip
"""Facts of the machine, which no word of a rank outranks."""

ENDINGS: tuple[Case, ...] = (
    case(
        "job", "requeue-refused", r"requeue refused: (?P<words>.*)|no further job: (?P<other>.*)",
        "The run saved, and SLURM did not take its job back into the queue: {words}.", RESUME,
    ),
    case(
        "job", "no-progress", r"not queued again: (?P<words>.*restarts.*)",
        "The run was ended each time before its next checkpoint: {words}.", RESUME + " --time {twice_the_time}",
        "More time for each attempt (checkpoint.every_steps saves more often, in a new run):",
    ),
    case(
        "job", "requeue-held",
        r"(launch failed requeued|job requeued in|launch_failed_requeued)[ _]?held|job_hold_max_requeue"
        r"|JobHoldMaxRequeue|RequeuedHeld|REQUEUE_HOLD|SPECIAL_EXIT|JobHeldAdmin",
        "SLURM holds the job back after a requeue, or an administrator does ({reason}).",
        "scontrol release {job}", "If its node is well again:",
    ),
    case("job", "held", r"JobHeldUser", "The job is held: it waits until it is released.", "scontrol release {job}"),
    case(
        "job", "dependency-never", r"DependencyNeverSatisfied",
        "The job waits for another to succeed, which has failed or is gone.",
        "scontrol update JobId={job} Dependency=", "To start it all the same:",
    ),
    case(
        "job", "waits-for-job", r"^PENDING Dependency\b", "It waits for another job, as its --dependency says.",
        "scontrol show job {job}",
    ),
    case(
        "batch", "step-refused",
        r"Unable to create step for job \d+: (?!Unable to contact|Socket timed out)(?P<words>.*)"
        r"|error: Only allocated \d+ nodes.*|srun: fatal: (?P<more>.*mutually exclusive.*)"
        r"|Unable to satisfy cpu bind request|Unable to layout tasks|failed to distribute tasks",
        "srun got no room for the ranks inside the job: it asks for more than the job has.",
        RESUME + " --dry-run", "Look which of --cpus-per-task, --mem and --srun options contradict each other:",
    ),
    case(
        "batch", "srun-option",
        r"^srun: (?P<words>(unrecognized|invalid) option.*|option \S+ (requires|is ambiguous).*)",
        "srun does not know an option that the job gives it: {words}.",
        RESUME + " --dry-run", "Correct launch.srun; options with container are those of pyxis:",
    ),
    case(
        "batch", "authentication",
        r"Task launch for \S+ failed on node (?P<failed>[^\s:]+): .*credential|[Mm]unge (en|de)code failed"
        r"|Protocol authentication error|has authentication error|Invalid job credential"
        r"|(Invalid|Expired|Rewound) (authentication )?credential|credential (has )?expired|Security violation",
        "The nodes did not trust one another's messages: {failed} has no munge, another key or a wrong clock.",
        RESUME + " --exclude {failed_hosts}", "Tell the site's staff; then:",
    ),
    case(
        "job batch", "launch-failure",
        r"task (?P<task>\d+) launch failed|no log of task \d+ on (?P<unseeing>\S+) is here|no log of the job is here|"
        r"JobLaunchFailure|launch[ _]failed|exit code 0:53|[Cc]ould not open std(out|err|in)|IO setup failed"
        r"|error: open \S+: No such file",
        "{unseeing} could not start its part of the job: it does not see {logs}, or may not write there.",
        "srun -N1 -n1 -w {unseeing} ls -ld {logs}",
        "Put the run where all nodes see it (TRAINKIT_RUNS=FOLDER) and submit it again; this shows what the node sees:",
    ),
    case(
        "job batch", "invalid-account",
        r"InvalidAccount|AccountNotAllowed|Invalid account(?!ing)|Invalid account or account/partition combination"
        r"|account not permitted to use this partition",
        "The account may not be charged: it is not known, not yours, or not allowed in this partition.",
        "sacctmgr -n show assoc user=$USER format=account,partition,qos",
        "Give one of these with --account:",
    ),
    case(
        "job batch", "invalid-qos", r"InvalidQOS|Invalid qos specification|QOSNotAllowed|QOS not permitted to use",
        "The QOS is not known, or not allowed for this account or partition.",
        "sacctmgr -n show assoc user=$USER format=account,partition,qos", "Give one of these with --qos:",
    ),
    case(
        "job batch", "invalid-partition", r"[Ii]nvalid partition|PartitionDown|PartitionInactive|PARTITION_DOWN",
        "The partition does not exist, or takes no jobs now.", "sinfo -s", "Give one of these with --partition:",
    ),
    case(
        "job batch", "policy-limit",
        r"Job violates accounting/QOS policy|AssocMaxWall|QOSMaxWall|AssocMax\w*(PerJob|PerNode)"
        r"|QOSMax\w*(PerJob|PerNode)|QOSMin\w+|(Assoc|QOS)MaxSubmitJob\w*|QOSJobLimit|(Association|QOS)TimeLimit"
        r"|AccountingPolicy|MaxMemPerLimit",
        "The job asks for more than its account or QOS allows one job ({reason}).",
        "sacctmgr show qos format=name,maxwall,maxtres,maxtrespu,maxsubmit",
        "Cancel it and submit it again with less:",
    ),
    case(
        "job", "budget-spent", r"(Assoc|QOS)Grp\w*Minutes",
        "The compute time that its account or QOS was given is used up ({reason}).",
        "sshare -U", "Ask for more, or queue it again with another --account; this shows what was used:",
    ),
    case(
        "job", "association-limit", r"\b(Assoc|QOS|Account|User)(Grp|Max)\w+|Max\w+Per(Account|User)|QOSUsageThreshold"
        r"|Association(Job|Resource)Limit|QOSResourceLimit",
        "It waits for other jobs of this account, QOS or user to end: together they are at their limit ({reason}).",
        "squeue --me",
    ),
    case(
        "job batch", "partition-limit",
        r"PartitionTimeLimit|PartitionNodeLimit|PartitionConfig|Requested time limit is invalid"
        r"|Node count specification invalid",
        "The job asks for more time or nodes than its partition gives ({reason}).",
        LIMITS, "Cancel it and submit it again within these limits:",
    ),
    case(
        "job batch", "bad-constraints",
        r"\b(Bad)?Constraints\b|Requested node configuration is not available|Invalid feature specification"
        r"|Invalid generic resource|GRES option unsupported"
        r"|Memory specification can not be satisfied|Invalid node name",
        "No node of the partition has what the job asks for: CPUs, memory, GPUs, features or names of nodes.",
        LIMITS + " ; sinfo -o '%n %f'", "Submit it again with what is there:",
    ),
    case(
        "job", "node-not-available", r"ReqNodeNotAvail|Reserved for maintenance|Nodes required for job are DOWN"
        r"|Reservation(Deleted|Invalid)|\(?Reservation\)?$",
        "The nodes that it asks for are down, drained or reserved ({reason}).", "sinfo -R",
    ),
    case(
        "job", "waits",
        r"^(PENDING|CONFIGURING)( (Resources|Priority|BeginTime|JobArrayTaskLimit|Licenses|BurstBuffer\w+"
        r"|Cleaning|SchedDefer|MpiPortsBusy|NvidiaImexChannels|FedJobLock|MaxPoweredUpNodes|None|waits.*))?$",
        "Nothing is wrong: it waits for its turn ({state} {reason}).", "squeue -j {job} --start",
    ),
    case(
        "job batch", "time-limit", r"^TIMEOUT|^(FAILED|COMPLETING) TimeLimit|DUE TO TIME LIMIT",
        "The job reached its time limit before it could save and hand back.",
        RESUME + " --time {twice_the_time}",
    ),
    case("job", "deadline", r"^DEADLINE|DeadLine", "The job reached its --deadline.", RESUME),
    case(
        "job batch", "preempted", r"^PREEMPTED|DUE TO PREEMPTION",
        "The job was preempted by one of higher priority, and was not queued again.", RESUME,
    ),
    case("job", "cancelled", r"^CANCELLED|^REVOKED", "Somebody cancelled the job.", RESUME),
    case(
        "job", "controller-gone", r"gone without a word",
        "The process that looked after the ranks on this machine is gone: killed, or the machine went down.", RESUME,
    ),
    case(
        "batch", "scheduler-silent",
        r"Unable to contact slurm controller|Socket timed out on send/recv|Zero Bytes were transmitted"
        r"|Connection refused.*slurm|slurm_load_jobs error|Unable to confirm allocation",
        "SLURM's controller did not answer the job.", RESUME, "When `scontrol ping` answers again:",
    ),
    case(
        "batch rank", "no-environment", r"execve\(\): (?P<program>[\w.-]+): No such file or directory",
        "The tasks found no {program}: they were started without an environment, so without a PATH (--export=NONE).",
        RESUME + " --sbatch export=ALL",
    ),
    case(
        "batch rank", "python-not-seen",
        r"(?P<program>/\S*/(bin/)?python[\d.]*): (No such file or directory|not found|bad interpreter)"
        r"|execve\(\): (?P<other>/\S+): No such file",
        "{on_node} does not see {program}: the virtual environment is not on a file system that all nodes share.",
        "{there}ls -l {program}",
        "Make the environment in a folder that all nodes see, and submit from it; this shows what the node sees:",
    ),
    case(
        "batch rank", "container",
        r"error: pyxis: +(?P<words>(?!printing|import|child|\[INFO)\S.*)|^FATAL: +(?P<other>.*)"
        r"|^(?P<third>.*(\.singularity\.d/.*not found|\benv: \W\S*python\S*\W: No such file or directory))"
        r"|docker: (?P<more>Error.*)|Unable to find image.*",
        "The container did not start on {on_node}: {words}.",
        RESUME + " --dry-run", "Correct the image or launch.container_mounts, as this shows them:",
    ),
    case(
        "batch", "module-load",
        r"Lmod has detected the following error|ModuleCmd_Load|Unable to locate a modulefile"
        r"|module\(s\) are unknown|(module|conda|mamba|micromamba|uv): command not found"
        r"|not been properly configured to use '(conda|mamba)|Run 'conda init' before|Could not find conda environment"
        r"|EnvironmentNameNotFound|/activate: No such file",
        "The set-up lines of the site's profile failed in the job: a module or conda is not there.",
        "module avail", "Correct `setup` in the cluster profile:",
    ),
    case("job", "waits", r"^PENDING \S", "It waits, and SLURM says why: {reason}.", "scontrol show job {job}"),
)  # fmt: skip
