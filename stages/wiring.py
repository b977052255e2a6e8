"""What joins a stage to its neighbours, and the places where its work runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netsim.link import LinkLike
from netsim.shaper import Uplink
from stages.ends import SendingEnd
from stages.lanes import Lane
from stages.plan import StepPlan
from stages.receiving import ReceivingEnd


@dataclass(slots=True, kw_only=True)
class Wiring:
    """Links and ends; None where there is no neighbour."""

    links: Mapping[int, LinkLike]
    """By target stage; control messages go to any stage, tensors to neighbours."""

    uplink: Uplink | None = None
    """What all links of this node share."""

    replica_links: dict[int, LinkLike] = field(default_factory=dict)
    """By replica: to its same stage, made when they are first needed."""

    activation_in: ReceivingEnd | None = None
    activation_out: SendingEnd | None = None
    gradient_in: ReceivingEnd | None = None
    gradient_out: SendingEnd | None = None

    def receiving(self) -> list[ReceivingEnd]:
        return [end for end in (self.activation_in, self.gradient_in) if end is not None]

    def sending(self) -> list[SendingEnd]:
        return [end for end in (self.activation_out, self.gradient_out) if end is not None]

    def ends(self) -> list[ReceivingEnd | SendingEnd]:
        return [*self.receiving(), *self.sending()]

    def begin(self, plan: StepPlan) -> None:
        """Frames of this turn may be decoded from now on; rows of coming steps are fetched."""
        for receiving in self.receiving():
            receiving.begin(plan.turn)
        for end in self.ends():
            if plan.coming:
                end.codec.prefetch(plan.coming)

    def forget_sent(self) -> None:
        """Let go of what was kept in case it had to be sent again."""
        for sending in self.sending():
            sending.forget()

    def retire(self) -> None:
        """Let go of tasks, links, rows and their files."""
        for receiving in self.receiving():
            receiving.retire()
        for link in (*self.links.values(), *self.replica_links.values()):
            link.close()
        for end in self.ends():
            end.codec.close()


@dataclass(slots=True, kw_only=True)
class Lanes:
    """The three places where a stage's work runs."""

    receive: Lane
    compute: Lane
    transmit: Lane
