"""An arm of a run as data: who does what in each step. Pure functions of configuration and step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compressors.registry import CodecSpec
from netsim.topology import Topology
from ray_pipe.config import CodecConfig, RunConfig
from ray_pipe.data import Order
from ray_pipe.replica_plans import fleet_spec, run_topology
from ray_pipe.row_memory import memory_need
from ray_pipe.workload import Workload
from stages.mishap import LinkFault, Mishap
from stages.optim import OptimSpec, lr_at
from stages.plan import StepPlan
from stages.spec import StageSpec
from stages.sync.fleet_spec import FleetSpec


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One codec's training run: same seed, order and batches as its siblings."""

    config: RunConfig
    codec: CodecConfig
    workload: Workload
    topology: Topology
    order: Order
    num_steps: int
    deadline_s: float = 60.0
    mishaps: tuple[tuple[int, Mishap], ...] = ()
    """Faults on purpose by stage, for tests."""

    link_faults: tuple[tuple[int, LinkFault], ...] = ()
    fleet: FleetSpec | None = None
    """The replicas, if there are several: mishaps and specs then count the stages of all."""

    @property
    def num_replicas(self) -> int:
        return 1 if self.fleet is None else len(self.fleet.members)

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def row_elements(self) -> int | None:
        """Values of a sample at the widest cut of a user's own model; None: as the settings say."""
        return self.workload.row_elements(self.config.pipeline.stages)

    def plan(self, step: int, replica: int = 0) -> StepPlan:
        """What every stage of a replica is told about a step."""
        optim = self.config.optim
        order = self.order if not replica else replace(self.order, shard=replica)
        coming = order.at(step + 1)
        return StepPlan(
            step=step,
            micro_batches=order.at(step),
            schedule=self.config.pipeline.schedule,
            lr=lr_at(
                step,
                lr=optim.lr,
                warmup_steps=optim.warmup_steps,
                num_steps=self.num_steps,
                decay=optim.decay,
                min_ratio=optim.min_lr_ratio,
            ),
            coming=tuple(sample for micro_batch in coming for sample in micro_batch),
            deadline_s=self.deadline_s,
        )

    def evaluation(self, step: int) -> StepPlan:
        """The held-out samples, after a step: forward only."""
        first, size = self.workload.num_train, self.config.pipeline.micro_batch_size
        ids = range(first, first + self.workload.num_held_out)
        return replace(
            self.plan(step),
            micro_batches=tuple(tuple(ids[i : i + size]) for i in range(0, len(ids), size)),
            schedule="forward",
            train=False,
            coming=(),
            part=1,
        )

    def specs(self, *, epoch_s: float = 0.0, generation: int = 0, run: str = "") -> list[StageSpec]:
        """What each actor needs to become its stage of this arm, replica by replica; `run` names
        its black boxes."""
        return [
            spec
            for replica in range(self.num_replicas)
            for spec in self.replica_specs(replica, epoch_s=epoch_s, generation=generation, run=run)
        ]

    def replica_specs(
        self, replica: int, *, epoch_s: float = 0.0, generation: int = 0, run: str = ""
    ) -> list[StageSpec]:
        """The stages of one replica."""
        config, codec = self.config, self.codec
        cuts = self.workload.cuts(config.pipeline.stages)
        builders = self.workload.stage_builders(config.pipeline.stages)
        first = replica * len(builders)
        keeps_box = bool(run) and config.faults.max_failures != 0 and self.fleet is None
        rows_nbytes = 0
        if codec.has_memory:
            num_samples = self.workload.num_train
            rows_nbytes = memory_need(config, num_samples, row_elements=self.row_elements)
        return [
            StageSpec(
                index=index,
                num_stages=len(builders),
                build=build,
                loss=self.workload.loss if index == len(builders) - 1 else None,
                optim=optim_spec(config),
                activation_codec=codec_spec(codec, codec.forward_name, codec.fw_bits, config.seed),
                gradient_codec=codec_spec(codec, codec.backward_name, codec.bw_bits, config.seed),
                topology=self.topology,
                dataset=self.workload.samples.digest,
                first_block=cuts[index].start,
                recompute=config.pipeline.recompute,
                precision=config.pipeline.precision,
                threads=config.pipeline.num_threads,
                seed=config.seed,
                epoch_s=epoch_s,
                generation=generation,
                black_box=config.faults.black_box if keeps_box else "off",
                run=run,
                rows_nbytes=rows_nbytes,
                mishaps=tuple(mishap for stage, mishap in self.mishaps if stage == first + index),
                link_faults=tuple(
                    fault for stage, fault in self.link_faults if stage == first + index
                ),
                replica=replica,
                fleet=self.fleet,
            )
            for index, build in enumerate(builders)
        ]


def arms_of(config: RunConfig, workload: Workload) -> list[Arm]:
    """The arms of a run, in the order they are trained."""
    pipeline, replicas = config.pipeline, config.sync.replicas
    order = Order(
        num_samples=workload.num_train // replicas,  # the same for all; a few may be left over
        micro_batches=pipeline.micro_batches,
        micro_batch_size=pipeline.micro_batch_size,
        seed=config.seed,
        num_shards=replicas,
    )
    topology = run_topology(config)
    num_steps = config.steps or (config.epochs or 1) * order.steps_per_epoch
    return [
        Arm(
            config=config,
            codec=codec,
            workload=workload,
            topology=topology,
            order=order,
            num_steps=num_steps,
            deadline_s=config.deadline_s,
            fleet=fleet_spec(config, codec.name, num_steps=num_steps),
        )
        for codec in config.arms
    ]


def optim_spec(config: RunConfig) -> OptimSpec:
    """The optimizer as the stages understand it."""
    optim = config.optim
    return OptimSpec(
        name=optim.name,
        weight_decay=optim.weight_decay,
        clip=optim.clip,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        momentum=optim.momentum,
    )


def codec_spec(codec: CodecConfig, name: str, bits: int, seed: int) -> CodecSpec:
    """One direction's codec as the registry understands it."""
    return CodecSpec(
        name=name,
        bits=bits,
        grid=codec.grid,
        group=codec.group,
        reference_group=codec.reference_group,
        rounding=codec.rounding,
        first_visit_bits=codec.first_visit_bits,
        rows=codec.rows,
        density=codec.density,
        cap_bytes=codec.memory_cap,
        spill_dir=codec.spill_dir,
        spill_ram_bytes=codec.spill_ram,
        checksum=codec.checksum,
        compressed_evaluation=codec.compressed_eval,
        seed=seed,
    )
