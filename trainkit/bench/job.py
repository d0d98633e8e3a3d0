"""One rank's part of a bench: it meets the others, and is asked or asks until all is measured."""

import socket
from collections.abc import Callable
from datetime import timedelta

import torch
from pydantic import TypeAdapter
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from trainkit.bench.base import BenchRequest, Place, Where
from trainkit.bench.catalogue import bench_of
from trainkit.bench.driver import Driver
from trainkit.bench.proof import Proof, Prover
from trainkit.bench.rank import Worker
from trainkit.bench.team import Team
from trainkit.cluster.ranks import RankEnv, Secret
from trainkit.cluster.signals import StopFlag
from trainkit.common.process import visible_cpus
from trainkit.config.schema import Config
from trainkit.distributed.device import device_name, device_of_rank, formats_of
from trainkit.distributed.rendezvous import meet
from trainkit.run.events import Attempt
from trainkit.run.folder import BenchDir
from trainkit.training.placement import wants_gpu

_MEET = timedelta(minutes=10)
_PLACE = TypeAdapter(Place)


def run(
    run_dir: BenchDir,
    config: Config,
    env: RankEnv,
    stop: StopFlag,
    *,
    open_run: Callable[[], Attempt],
    secret: Secret,
    beat: Callable[[], None],
) -> str:
    """Run one rank's part of a bench: ``finished``, or ``stopped`` where a signal told rank 0 to end early.

    Raises:
        RunFailedError: no arm could run; the samples hold each one's reason.
    """
    request = BenchRequest.read(run_dir.request)
    use_gpu = wants_gpu(config)
    store: Store = HashStore() if env.world_size == 1 else meet(env, secret, _MEET)
    store.set(f"place/{env.rank}", _PLACE.dump_json(_place(env, use_gpu)).decode())
    places = []
    for rank in range(env.world_size):
        places.append(_PLACE.validate_json(bytes(store.get(f"place/{rank}"))))
    bench = bench_of(request.bench)
    worker = Worker
    driver = Driver
    if bench.proves:
        worker = Prover
        driver = Proof
    team = Team(worker(run_dir.path, env, beat), store, places, use_gpu, config.launch.interface)
    if not env.is_main:
        team.serve()
        store.set(f"left/{env.rank}", "1")
        return "finished"
    try:
        outcome = driver(bench, request, config, Where(tuple(places)), team, open_run(), stop).drive()
    finally:
        team.end()
    store.wait([f"left/{rank}" for rank in range(1, env.world_size)] or ["place/0"])  # which rank 0's store serves
    return outcome


def _place(env: RankEnv, use_gpu: bool) -> Place:
    gpus = 0
    device = torch.device("cpu")
    if use_gpu:
        gpus = torch.accelerator.device_count()
        device = device_of_rank(env.local_rank)
    return Place(
        env.rank, env.node_rank, env.local_rank, socket.gethostname(), device_name(device), formats_of(device), gpus,
        visible_cpus(),
    )  # fmt: skip
