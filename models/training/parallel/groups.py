"""The ranks of a reinforcement-learning run in two groups: the first ranks train, the last ranks sample answers.

The groups exchange weights and answers once per rollout. Received weights are copied in place, so that engines drop their caches."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from puna.models import progress
from puna.models.training.boxes import tensors_digest
from puna.models.training.parallel import mesh as meshes
from puna.models.training.parallel.base import Parallel
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.mesh import Mesh, broadcast_text, group_of, layout_of

ONE = Layout()
_numbers = itertools.count()


class Groups:
    """The two groups, from the point of view of one rank.

    generate: number of ranks that only sample; 0: all ranks train and sample. tensor: number of sampling ranks that hold one model.
    members: the processes, by their rank in the default group; None: all. `mesh`: the ranks of this rank's group; `sampling`: the ranks
    that share the prompts; `trains`: True if this rank trains. The constructor raises ValueError if no rank would train."""

    def __init__(self, layout: Layout = ONE, generate: int = 0, members: Sequence[int] | None = None, tensor: int = 1) -> None:
        self.apart, self.trains = generate > 0, True
        if not self.apart:
            self.mesh = Mesh(layout_of(layout), members)
            self.sampling = self.mesh if _in_pieces(self.mesh.layout) else Mesh(Layout(data=self.mesh.layout.processes), members)
            return
        members = list(range(dist.get_world_size()) if members is None and dist.is_initialized() else members or [0])
        if generate >= len(members):
            raise ValueError(f"generate = {generate} needs {generate + 1} processes at least, and {len(members)} run")
        self._training, self._sampling = members[:-generate], members[-generate:]
        self.trains = dist.get_rank() in self._training
        layout = layout if layout.processes > 1 else Layout(data=len(self._training))
        both = Mesh(layout, self._training), Mesh(Layout(data=generate // tensor, tensor=tensor), self._sampling)
        self.mesh, self.sampling, self._everyone, number = both[not self.trains], both[1], group_of(members), torch.tensor(next(_numbers))
        dist.broadcast(number, members[0], self._everyone)
        self._name, self._asked, self._taken = f"groups-{int(number)}", 0, 0

    def sampler(self, text: str) -> str:
        """Return, on all ranks, the text of the first rank that only samples; return `text` if all ranks both train and sample."""
        return broadcast_text(text, self._sampling[0], self._everyone) if self.apart else text

    def answering(self, held: Parallel) -> Parallel:
        """Return the model that this rank samples from: gathered if it also trains and ranks sample from whole models, else `held`."""
        if not self.trains or _in_pieces(held.mesh.layout):
            return held
        held.publish(held.dtype)
        return Parallel(held.whole, Mesh(ONE))

    def ask(self, held: Parallel, order: dict[str, Any]) -> None:
        """Send an order and the trained weights, each gathered in turn, from training to sampling ranks. Raise ValueError on GPUs."""
        if held.device.type == "cuda":
            raise ValueError("generate: ranks that only sample are proved only on CPUs; set generate to 0 on GPUs")
        digests, first = dict[str, str](), dist.get_rank() == self._training[0]
        if first:
            meshes.store().set(f"{self._name}-order-{self._asked}", json.dumps(order))
        names = sorted(name for name, p in held.whole.named_parameters() if p.requires_grad)
        for name, weight in held.gather({name: held.pieces[name] for name in names}, held.parameters):
            weight = weight.to(held.dtype, copy=True)
            digests |= {name: tensors_digest({name: weight})} if first else {}
            dist.broadcast(_bytes(weight), self._training[0], self._everyone)
            progress.advance()
        broadcast_text(json.dumps(digests), self._training[0], self._everyone)
        self._asked += 1

    def take(self, follow: Callable[[], object]) -> str:
        """Return the answers to the last order, as text. Call `follow` after each wave of answers, on all training ranks alike."""
        while self._wait(f"answers-{self._taken}", self._sampling) != "all":
            self._taken += 1
            follow()
        self._taken += 1
        return broadcast_text("", self._sampling[0], self._everyone)

    def end(self, text: str) -> None:
        """Tell the sampling ranks to end, and send `text` to them."""
        if self.apart and dist.get_rank() == self._training[0]:
            meshes.store().set(f"{self._name}-order-{self._asked}", json.dumps({"end": text}))

    @torch.no_grad()
    def orders(self, held: Parallel) -> Iterator[dict[str, Any]]:
        """Yield the training ranks' orders on a sampling rank, each after copying the weights sent with it; the last is {"end": text}.
        Raise ValueError for damaged weights."""
        while "end" not in (order := json.loads(self._wait(f"order-{self._asked}", self._training))):
            digests, arrived = dict[str, str](), True
            for name, weight in sorted(held.parameters.items()):
                buffer, piece = torch.empty(held.pieces[name].shape, dtype=weight.dtype), held.pieces[name].slices()
                dist.broadcast(_bytes(buffer), self._training[0], self._everyone)
                digests[name] = tensors_digest({name: buffer})
                weight.copy_(buffer[piece])
                progress.advance()
                arrived &= torch.equal(weight, buffer[piece])
            if digests != json.loads(broadcast_text("", self._training[0], self._everyone)) or not arrived:
                raise ValueError(f"rollout {order['rollout']}: this rank's weights are not those that the trainers sent")
            self._asked += 1
            yield order
        yield order

    def give(self, text: str = "") -> None:
        """Send the answers `text` from the sampling ranks to the training ranks; if empty, only report that a wave of answers is done."""
        if dist.get_rank() == self._sampling[0]:
            meshes.store().set(f"{self._name}-answers-{self._taken}", "all" if text else "wave")
        if text:
            broadcast_text(text, self._sampling[0], self._everyone)
        self._taken += 1

    def _wait(self, name: str, ranks: Sequence[int]) -> str:
        """Return the text that `ranks` set under a name, once set; see `mesh.wait_for`."""

        def named(rank: int) -> str:
            return f"rank {rank}, which {'trains' if rank in self._training else 'samples answers'},"

        return meshes.wait_for(f"{self._name}-{name}", ranks, named, meshes.TIMEOUT.total_seconds())


def _in_pieces(layout: Layout) -> bool:
    """True if ranks sample from their pieces of the model. This is tested only on CPUs, with log-probs bit-identical to one process."""
    return layout.axes <= {"data", "pipeline"} and layout.virtual_stages == 1 and not torch.cuda.is_available()


def _bytes(weight: Tensor) -> Tensor:
    return weight.detach().contiguous().flatten().view(torch.uint8)
