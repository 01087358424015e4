"""Overwrites blocks that were read: the positive control that shows that an exactness check can fail.

Only for tests. It writes to host memory that this process owns.
"""

import ctypes

from pd_transfer.core.layout import DescriptorRow, EngineLayout
from pd_transfer.core.plan import ReadPlan
from pd_transfer.core.receives import ReceiveRequest


def damage_block(
    request: ReceiveRequest, layout: EngineLayout, rows: list[DescriptorRow], group_index: int, position: int
) -> None:
    """Zero one block that was just read, in every layer of a group; ``position`` counts its read blocks as a list does.

    Requests that read fewer blocks of the group are left alone.
    """
    plan = request.plan
    if not isinstance(plan, ReadPlan):
        return
    num_blocks = plan.num_blocks_by_group[group_index]
    if not -num_blocks <= position < num_blocks:
        return
    start = sum(
        len(group.layers) * count
        for group, count in zip(layout.groups[:group_index], plan.num_blocks_by_group, strict=False)
    )
    for layer in range(len(layout.groups[group_index].layers)):
        row, block_id = divmod(int(plan.local[start + layer * num_blocks + position % num_blocks]), layout.num_blocks)
        place = rows[row]
        ctypes.memset(place.address + block_id * place.stride_bytes, 0, place.length_bytes)
