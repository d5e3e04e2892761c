"""Experts cut over ranks: each rank computes some experts' rows of all ranks along the axis `expert`.

Two exchanges of all with all around the experts' products, as in GShard (Lepikhin et al. 2020), here without a capacity: no row is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from puna.models.training.parallel.collectives import exchange_rows
from puna.models.transformer import Experts


class CutExperts(Experts):
    """The matrices of E / p experts, and the way of rows to them and back."""

    def __init__(self, whole: Experts, group: Any) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj, self.group = whole.gate_up_proj, whole.down_proj, group

    def forward(self, x_ND: Tensor, offsets_E1: Tensor) -> Tensor:
        """Compute rows [N, D] sorted by expert, of all E experts; the rank's number among p is its place in the experts' order."""
        p = dist.get_world_size(self.group)
        counts_pe = offsets_E1.diff().view(p, -1)
        theirs_pe = torch.empty_like(counts_pe)
        dist.all_to_all_single(theirs_pe, counts_pe.contiguous(), group=self.group)
        send, receive = counts_pe.sum(1).tolist(), theirs_pe.sum(1).tolist()
        rows_MD = exchange_rows(x_ND, send, receive, self.group)
        # Rows come by rank, then by expert; the products take them by expert.
        experts_e = torch.arange(theirs_pe.shape[1], device=x_ND.device)
        order_M = experts_e.repeat(p).repeat_interleave(theirs_pe.flatten()).argsort(stable=True)
        offsets_e1 = torch.cat([theirs_pe.new_zeros(1), theirs_pe.sum(0).cumsum(0)])
        y_MD = super().forward(rows_MD[order_M], offsets_e1)
        return exchange_rows(y_MD[order_M.argsort()], receive, send, self.group)
