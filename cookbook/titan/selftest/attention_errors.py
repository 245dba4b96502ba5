"""How far attention in BF16 is from a float32 reference, for each document and head."""

from __future__ import annotations

import torch

Tensors = list[torch.Tensor]
Relative = dict[str, dict[str, float]]

TENSORS = ("out", "dq", "dk", "dv")

# Of the norm of the reference, for a whole tensor and for one document and head.
WHOLE_BOUND, PART_BOUND = 0.01, 0.05


class Errors:
    """Squared differences from the reference, for each document and head."""

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        lengths = cu_seqlens.diff()
        self.lengths = lengths[lengths > 0]
        self.document = torch.arange(len(self.lengths), device=lengths.device).repeat_interleave(
            self.lengths
        )
        self.parts: dict[str, list[tuple[torch.Tensor, torch.Tensor, int]]] = {}

    def add(self, found: Tensors, expected: Tensors) -> None:
        for name, one, other in zip(TENSORS, found, expected, strict=True):
            sums = []
            for squares in ((one.float() - other).square().sum(-1), other.square().sum(-1)):
                by_document = squares.new_zeros(len(self.lengths), squares.shape[1])
                sums.append(by_document.index_add_(0, self.document, squares))
            self.parts.setdefault(name, []).append((*sums, other.shape[-1]))

    def relative(self) -> Relative:
        """Of each whole tensor, and the worst of its documents and heads.

        The gradient of q and k in a document of one token is zero; such a part is measured by the
        root mean square of the whole tensor.
        """
        found: Relative = {}
        for name, parts in self.parts.items():
            wrong, right = (torch.cat([part[i] for part in parts], dim=1) for i in (0, 1))
            mean = right.sum() / (self.lengths.sum() * right.shape[1])
            part = wrong / torch.maximum(right, self.lengths[:, None] * mean)
            found[name] = {
                "whole": float((wrong.sum() / right.sum()).sqrt()),
                "part": float(part.max().sqrt()),
            }
        return found


def within_bounds(found: Relative, other: Relative | None) -> bool:
    """Whether errors are within the bounds, or within twice those of another kernel in BF16."""
    return all(
        found[name][kind] <= max(bound, 2 * other[name][kind] if other else 0)
        for name in TENSORS
        for kind, bound in (("whole", WHOLE_BOUND), ("part", PART_BOUND))
    )
