"""What is left to wait for of a layer's exchanges, where its experts compute beside them.

The order is that of `titan/tt_0_2_2/deepep.py`: DeepEP's exchanges run one after another on a
stream of their own, each when its rows are there, and the compute waits for what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoutedLayer:
    """One pass through a layer of routed experts; milliseconds.

    Attributes:
        exchange_ms: one exchange of one chunk.
        experts_ms: the routed experts, all chunks.
        first_ms: what can compute before the experts do, in the forward: half of the shared
            experts.
        second_ms: what can compute behind them, in the forward: the other half.
        chunks: into how many parts the tokens are cut.
    """

    exchange_ms: float
    experts_ms: float
    first_ms: float
    second_ms: float
    chunks: int

    def forward_wait_ms(self) -> float:
        """How long a forward waits."""
        computed_ms, sent_ms = self.first_ms, 0.0
        one_ms = self.experts_ms / self.chunks
        for chunk in range(self.chunks):
            sent_ms += self.exchange_ms
            arrived_ms = sent_ms
            if chunk:
                # The last chunk goes back behind this one's dispatch.
                sent_ms = max(sent_ms, computed_ms) + self.exchange_ms
            computed_ms = max(computed_ms, arrived_ms) + one_ms
        sent_ms = max(sent_ms, computed_ms) + self.exchange_ms
        end_ms = max(sent_ms, computed_ms + self.second_ms)
        return end_ms - self.first_ms - self.experts_ms - self.second_ms

    def backward_wait_ms(self, before_ms: float = 0.0) -> float:
        """How long a backward waits.

        Args:
            before_ms: what is computed while the first gradients are sent: the layer's forward
                again, where it is recomputed.
        """
        sent_ms = self.chunks * self.exchange_ms
        computed_ms = before_ms + self.second_ms
        for chunk in range(self.chunks):
            arrived_ms = (chunk + 1) * self.exchange_ms
            computed_ms = max(computed_ms, arrived_ms) + self.experts_ms / self.chunks
            sent_ms = max(sent_ms, computed_ms) + self.exchange_ms
        end_ms = max(sent_ms, computed_ms + self.first_ms)
        return end_ms - before_ms - self.first_ms - self.experts_ms - self.second_ms
