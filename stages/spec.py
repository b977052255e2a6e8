"""What a process needs to know to become one stage of one arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from compressors.registry import CodecSpec
from netsim.topology import Topology
from stages.embedding.embedding_spec import EmbeddingSpec
from stages.loss import LossFn
from stages.mishap import LinkFault, Mishap
from stages.optim import OptimSpec

if TYPE_CHECKING:
    from stages.sync.fleet_spec import FleetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage of one arm: the same record in an actor, in a test and in the simulator."""

    index: int
    num_stages: int
    build: Callable[[], nn.Module]
    loss: LossFn | None
    optim: OptimSpec
    activation_codec: CodecSpec
    gradient_codec: CodecSpec
    topology: Topology
    dataset: str
    """Digest of the data: rows of one set never serve another."""

    first_block: int = 0
    """Place in the whole model of this stage's first block: saved weights are named by it."""

    replica: int = 0
    generation: int = 0
    """Which use of the actor this is: frames of an earlier one are dropped."""

    recompute: bool = False
    precision: str = "fp32"
    threads: int = 1
    """That torch computes with on CPUs; 0: the node's cores over the stages on it."""

    sharing: int = 1
    """Stages on this stage's node, itself among them."""

    seed: int = 0
    epoch_s: float = 0.0
    """`time.time()` at the start of the run: spans of all stages are counted from it."""

    black_box: str = "off"
    """Folder for the stage's black box, `auto` or `off`; see `stages.box_places`."""

    run: str = ""
    """Unique name of this training: its black boxes are found by it."""

    gone: tuple[str, ...] = ()
    """Trainings that nobody goes on with: their black boxes may be removed."""

    rows_nbytes: int = 0
    """What the codecs of all stages are expected to remember: whether boxes fit in memory."""

    mishaps: tuple[Mishap, ...] = ()
    """Faults on purpose, for tests."""

    link_faults: tuple[LinkFault, ...] = ()
    embedding: EmbeddingSpec | None = None
    """Of stage 0, if its input is made of rows on shards."""

    loader: int | None = None
    """Node of the loader that sends this stage its batches, where they are not read here."""

    fleet: FleetSpec | None = None
    """The other replicas, if there are any."""

    @property
    def first_node(self) -> int:
        """The node of this replica's stage 0 in the topology."""
        return self.replica * self.num_stages if self.fleet is not None else 0

    @property
    def node(self) -> int:
        """This stage's node in the topology, and its place in the books."""
        return self.first_node + self.index
