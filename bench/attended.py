"""How far back tokens may look: the mean attended length of a stream of tokens.

TorchTitan's mask lets a token attend to itself and to the tokens before it in its own document, as
far as they lie in its own sequence. A document ends with its end-of-document token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def pieces(tokens: Iterable[int], end: int, seq_len: int) -> Iterator[int]:
    """The lengths of the documents' parts that lie in one sequence, in order.

    Args:
        tokens: of all documents, one after another, as TorchTitan's loader reads them.
        end: the end-of-document token.
        seq_len: tokens of a sequence. The loader cuts off one more, the last one's label; what is
            left at the end is no whole sequence and not trained on.
    """
    position, length, found = 0, 0, list[int]()
    for token in tokens:
        if position < seq_len:
            length += 1
            if token == end or position == seq_len - 1:
                found.append(length)
                length = 0
        position += 1
        if position > seq_len:
            yield from found
            position, found = 0, []


def mean_attended_length(pieces: Iterable[int]) -> float:
    """The mean, over tokens, of how many tokens each may attend to, itself included.

    The tokens of a piece of n attend to 1, 2, ... n.
    """
    tokens = attended = 0
    for length in pieces:
        tokens += length
        attended += length * (length + 1) // 2
    if not tokens:
        raise ValueError("the stream holds no whole sequence")
    return attended / tokens
