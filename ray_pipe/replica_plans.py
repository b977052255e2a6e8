"""From the settings to a fleet of replicas: strategy, shards, nodes. Refuses what cannot work.

Stage s of replica r is node `r * stages + s` of the topology. A few nodes more are kept for
replicas that join, and the last one is the Group Generator's.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from compressors.registry import CodecSpec
from netsim.topology import Topology
from ray_pipe.errors import ConfigError
from stages.sync.fleet_spec import FleetSpec
from stages.sync.mixing import GraphError
from stages.sync.slowness import SlownessError, parse_slow
from stages.sync.strategies import OPTIONS, SyncSpec, SyncSpecError, check_spec, options_of

if TYPE_CHECKING:
    from ray_pipe.config import RunConfig

MIN_WARMUP = 4
WITHOUT_BITS = ("fp32", "fp16", "bf16", "topk", "acsgd-topk")
WORK_SHARING = ("ad-psgd",)
"""Strategies in which nobody waits for a slow replica, beside Ripples with its generator."""


def sync_spec(config: RunConfig, codec: str, *, num_steps: int) -> SyncSpec:
    """The strategy of one arm; `codec` is the arm's own."""
    sync, optim = config.sync, config.optim
    name = sync.strategy
    payload = sync.codec
    if payload is None:
        payload = "directq" if name == "quantized-adam" and codec != "fp32" else "fp32"
    group_size = sync.group_size
    if group_size is None:
        # A group of all replicas would wait for the slowest, as all-reduce does.
        group_size = max(2, min(4, sync.replicas // 2))
    local_steps = sync.local_steps
    if local_steps is None:
        local_steps = 8 if name == "local" else 1
    return SyncSpec(
        name=name,
        codec=CodecSpec(
            name=payload,
            bits=sync.bits,
            grid=config.codec.grid,
            group=config.codec.group,
            rounding=config.codec.rounding,
            density=config.codec.density,
            seed=config.seed,
        ),
        route=sync.route,
        graph=sync.graph,
        max_gap=sync.max_gap,
        backup_workers=sync.backup_workers,
        staleness=sync.staleness,
        skip=sync.skip,
        group_size=group_size,
        slowdown_threshold=sync.slowdown_threshold,
        isolation_rounds=sync.isolation_rounds,
        groups=sync.groups,
        local_steps=local_steps,
        outer_lr=sync.outer_lr,
        outer_momentum=sync.outer_momentum,
        warmup=max(MIN_WARMUP, num_steps // 10) if sync.warmup is None else sync.warmup,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        deadline_s=config.deadline_s,
        deadline_k=sync.deadline_k,
        seed=config.seed,
    )


def fleet_spec(config: RunConfig, codec: str, *, num_steps: int) -> FleetSpec | None:
    """What every stage is told about the replicas; None where there is only one."""
    if config.sync.replicas == 1:
        return None
    spec = sync_spec(config, codec, num_steps=num_steps)
    refuse_what_never_happens(config, spec, num_steps=num_steps)
    return FleetSpec(
        sync=spec,
        members=tuple(range(config.sync.replicas)),
        num_steps=num_steps,
        slow=parse_slow(config.sync.slow, num_replicas=config.sync.replicas),
        slow_seed=config.seed,
    )


def shares_work(sync: SyncSpec) -> bool:
    """Whether a fast replica may do more steps than a slow one: then the run ends when all of them
    together have done the steps that were asked for."""
    return sync.name in WORK_SHARING or (sync.name == "ripples" and sync.groups == "smart")


def is_deterministic(sync: SyncSpec) -> bool:
    """Whether the same settings give the same bits, however fast each replica is."""
    if sync.name == "hop":  # the standard one waits for every neighbour's update of its step
        return not (sync.backup_workers or sync.staleness or sync.skip)
    return sync.name in ("allreduce", "quantized-adam", "local") or (
        sync.name == "ripples" and sync.groups != "smart"
    )


def num_nodes(config: RunConfig) -> int:
    """Nodes of the run's topology."""
    stages, replicas = config.pipeline.stages, config.sync.replicas
    return stages if replicas == 1 else 2 * replicas * stages + 1


def run_topology(config: RunConfig) -> Topology:
    """The links of the run."""
    network, nodes = config.network, num_nodes(config)
    if network.topology is not None:
        # Nodes beyond those of the replicas are not the file's to speak of.
        Topology.load(network.topology, config.sync.replicas * config.pipeline.stages)
        return Topology.load(network.topology, nodes)
    return Topology.uniform(
        nodes, network.bandwidth_bps, network.latency_s, network.jitter_s, network.loss_rate
    )


def check_sync(config: RunConfig) -> None:
    """Refuse a strategy, a graph or a slowness that cannot work, before anything is started."""
    sync = config.sync
    if sync.replicas == 1:
        for option, given in (("--sync", sync.name), ("--slow", sync.slow and sync.slow[0])):
            if given:
                raise ConfigError(
                    f"{option} {given}: there is one replica and nobody to agree with; give "
                    "--replicas 2 or more."
                )
        for field in fields(sync):
            value = getattr(sync, field.name)
            if value != field.default:
                raise ConfigError(
                    f"sync.{field.name}={value}: there is one replica and nobody to agree with, "
                    "so it would do nothing; leave it out, or give --replicas 2 or more."
                )
        return
    if config.task != "text":
        raise ConfigError(
            f"--task {config.task} trains one pipeline so far; leave out --replicas "
            f"{sync.replicas}."
        )
    if config.pipeline.transport != "push":
        raise ConfigError(
            f"--transport {config.pipeline.transport} runs one pipeline; with --replicas "
            f"{sync.replicas} use --transport push."
        )
    _refuse_what_is_not_read(config)
    try:
        for arm in config.arms:
            spec = sync_spec(config, arm.name, num_steps=config.steps or 1)
            check_spec(spec, sync.replicas)
            if config.steps is not None:  # else as many as the data has: see `fleet_spec`
                refuse_what_never_happens(config, spec, num_steps=config.steps)
    except (SyncSpecError, GraphError) as error:
        raise ConfigError(f"--sync {sync.strategy}: {error}.") from None
    try:
        parse_slow(sync.slow, num_replicas=sync.replicas)
    except SlownessError as error:
        raise ConfigError(f"--slow: {error}.") from None


def _refuse_what_is_not_read(config: RunConfig) -> None:
    """An option that the strategy ignores is a mistake: the user expects something of it."""
    sync = config.sync
    if sync.strategy not in OPTIONS:
        return  # refused with its nearest name
    known = {name for names in OPTIONS.values() for name in names}
    usual = {field.name: field.default for field in fields(sync) if field.name in known}
    usual_bits = type(sync)().bits
    for name in sorted(known - set(options_of(sync.strategy, sync.groups))):
        value = getattr(sync, name)
        if value != usual[name]:
            readers = [other for other, names in OPTIONS.items() if name in names]
            what = sync.strategy
            if what in readers:
                what += f" with sync.groups={sync.groups}"
                readers = ["ripples with sync.groups=smart"]
            raise ConfigError(
                f"sync.{name}={value}: {what} has no such option and would ignore it; leave it "
                f"out, or give --sync {' or '.join(readers)}."
            )
    payloads = [sync_spec(config, arm.name, num_steps=1).codec.name for arm in config.arms]
    if sync.bits != usual_bits and all(name.split("+")[0] in WITHOUT_BITS for name in payloads):
        raise ConfigError(
            f"sync.bits={sync.bits}: replicas send {' and '.join(sorted(set(payloads)))}, which "
            "has no bits to choose; give --sync-codec directq, or leave it out."
        )
    if sync.strategy == "quantized-adam" and config.optim.name != "adamw":
        raise ConfigError(
            f"optim.name={config.optim.name}: quantized-adam is an Adam of its own and would "
            "ignore it; leave it out, or give --sync allreduce."
        )


def refuse_what_never_happens(config: RunConfig, spec: SyncSpec, *, num_steps: int) -> None:
    """What would begin after the last step, whether it was given or is the default."""
    given = config.sync
    if spec.name == "quantized-adam" and spec.warmup >= num_steps:
        whose = "" if given.warmup is not None else " (the default)"
        raise ConfigError(
            f"sync.warmup={spec.warmup}{whose}: the run has {num_steps} steps, and all of them "
            "would be exact; give about a tenth of the run, or more --steps."
        )
    if "local_steps" in options_of(spec.name, spec.groups) and spec.local_steps > num_steps:
        whose = "" if given.local_steps is not None else " (the default)"
        raise ConfigError(
            f"sync.local_steps={spec.local_steps}{whose}: the run has {num_steps} steps, and "
            "replicas would never agree; give fewer local steps, or more --steps."
        )
