"""Who attends to whom, cut into kernel calls that waste nothing: full rectangles, causal and anticausal squares.

Queries and keys are *runs*: a few ascending intervals of positions, laid one after the other as rows. With causal
masking any two runs of a plan meet in at most one rectangle per document, since the only document that can span the gap
between two runs is the one around it; a run meets itself in one causal square per document. A sliding window cuts
rectangles at its far edge into full ones and anticausal squares. No mask is ever materialised.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hexiseq.attention.kernels import ANTICAUSAL, CAUSAL, FULL
from hexiseq.plan import Interval

Run = tuple[Interval, ...]
_END = 2**62  # beyond every position


@dataclass(frozen=True)
class Mask:
    """Who attends to whom in a batch of sequences.

    Attributes:
        causal: a token attends to tokens up to itself only.
        window: the latest tokens, itself included, that a token attends to; None for all. Only with `causal`.
        documents: boundaries of each sequence, ``(0, ..., seq_len)``, within which its tokens attend; None where no
            sequence has more than one document.
    """

    causal: bool = True
    window: int | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    @staticmethod
    def checked(
        seq_len: int, sequences: int, causal: bool, window: int | None, documents: Sequence[Sequence[int]] | None
    ) -> Mask:
        """The mask of a call, in its simplest form. Raises ValueError naming what is wrong."""
        if window is not None:
            if isinstance(window, bool) or not hasattr(window, "__index__") or operator.index(window) < 1:
                raise ValueError(f"window must be None or a whole number of tokens, at least 1, got {window!r}")
            window = operator.index(window)
            if not causal:
                raise ValueError(f"window={window} needs causal attention")
        if documents is not None:
            try:
                documents = tuple(tuple(operator.index(edge) for edge in edges) for edges in documents)
            except TypeError as error:
                raise ValueError(
                    f"documents must be a list of whole numbers for each sequence, such as [[0, {seq_len}]]: {error}"
                ) from None
            if len(documents) != sequences:
                raise ValueError(f"documents has boundaries of {len(documents)} sequences, the batch {sequences}")
            for index, edges in enumerate(documents):
                _check_boundaries(index, edges, seq_len)
            if all(len(edges) == 2 for edges in documents):
                documents = None
        return Mask(causal, window if window is None or window < seq_len else None, documents)

    def sequences(self) -> Iterator[tuple[slice, tuple[int, ...] | None]]:
        """Consecutive sequences with the same boundaries, as a slice of the batch, and these boundaries."""
        if self.documents is None:
            yield slice(None), None
            return
        start = 0
        for edges, same in itertools.groupby(self.documents):
            end = start + len(list(same))
            yield slice(start, end), edges
            start = end

    def first_attended(self, position: int) -> int:
        """The first position that the token at `position` attends to in any sequence, with causal masking."""
        windowed = 0 if self.window is None else max(0, position - self.window + 1)
        if self.documents is None:
            return windowed
        starts = (edges[bisect.bisect_right(edges, position) - 1] for edges in self.documents)
        return max(windowed, min(starts))


PLAIN = Mask()


def _check_boundaries(index: int, edges: tuple[int, ...], seq_len: int) -> None:
    where = f"documents[{index}]"
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != seq_len:
        ends = f"{edges[0]} to {edges[-1]}" if edges else "nothing"
        raise ValueError(f"{where} must run from 0 to the plan's {seq_len} tokens, it runs over {ends}")
    for a, b in itertools.pairwise(edges):
        if b <= a:
            raise ValueError(f"{where} must ascend strictly, it has {a} before {b}")


@dataclass(frozen=True)
class Tile:
    """A kernel call per GQA fragment: rows of the queries' run and of the keys', and how they meet."""

    queries: Interval
    keys: Interval
    mask: str


def tiles(queries: Run, keys: Run, mask: Mask, documents: Sequence[int] | None) -> list[Tile]:
    """The kernel calls by which `queries` attend to `keys`.

    Every pair of rows that attend is in exactly one tile, and no other pair is in any.

    Args:
        queries, keys: the same run, or runs of which no intervals overlap.
        documents: boundaries of the sequence; None for one document.
    """
    found = []
    for document in _documents(keys, documents):
        q, k = _pieces(queries, document), _pieces(keys, document)
        if q and k:
            found += _within_document(q, k, mask)
    return found


def rows_from(run: Run, position: int) -> int:
    """Rows of the run before `position`: the first row at or after it."""
    return sum(min(max(position - a, 0), b - a) for a, b in run)


@dataclass(frozen=True)
class _Piece:
    """Positions ``[start, end)`` from row ``row`` of a run."""

    start: int
    end: int
    row: int

    def rows(self, start: int, end: int) -> Interval:
        return self.row + start - self.start, self.row + end - self.start

    @property
    def all_rows(self) -> Interval:
        return self.row, self.row + self.end - self.start


def _documents(run: Run, edges: Sequence[int] | None) -> Iterator[Interval]:
    """The documents with tokens in the run."""
    if edges is None:
        yield 0, _END
        return
    done = 0
    for a, b in run:
        if b > a:
            first = max(done, bisect.bisect_right(edges, a) - 1)
            done = bisect.bisect_left(edges, b)
            yield from itertools.pairwise(edges[first : done + 1])


def _pieces(run: Run, document: Interval) -> list[_Piece]:
    """The part of a run in a document. A document is contiguous, so the pieces' rows follow one another."""
    found, row = [], 0
    for a, b in run:
        start, end = max(a, document[0]), min(b, document[1])
        if end > start:
            found.append(_Piece(start, end, row + start - a))
        row += b - a
    return found


def _within_document(queries: list[_Piece], keys: list[_Piece], mask: Mask) -> list[Tile]:
    own = queries[0].start == keys[0].start
    everything = (queries[0].row, queries[-1].all_rows[1]), (keys[0].row, keys[-1].all_rows[1])
    if not mask.causal:
        return [Tile(*everything, FULL)]
    whole = mask.window is None or queries[-1].end - keys[0].start <= mask.window
    if own and whole:
        return [Tile(*everything, CAUSAL)]
    found = []
    if whole:
        for earlier, group in itertools.groupby(queries, lambda q: sum(k.end <= q.start for k in keys)):
            if earlier:
                pieces = list(group)
                rows = pieces[0].row, pieces[-1].all_rows[1]
                found.append(Tile(rows, (keys[0].row, keys[earlier - 1].all_rows[1]), FULL))
        return found
    assert mask.window is not None
    for q in queries:
        for k in keys:
            if k.start == q.start:
                found += _band(q, mask.window)
            elif k.end <= q.start:
                found += _edge(q, k, mask.window)
    return found


def _band(piece: _Piece, window: int) -> list[Tile]:
    """A run's interval with itself: blocks of a window's length, each with itself and with the one before."""
    starts = range(piece.start, piece.end, window)
    blocks = [_Piece(a, min(a + window, piece.end), piece.row + a - piece.start) for a in starts]
    found = [Tile(block.all_rows, block.all_rows, CAUSAL) for block in blocks]
    for before, block in itertools.pairwise(blocks):
        found += _edge(block, before, window)
    return found


def _edge(q: _Piece, k: _Piece, window: int) -> list[Tile]:
    """Queries with earlier keys, as far as the window reaches: position p attends to positions above p - window."""
    found = []
    # Up to `sees_all` a query reaches all the keys, from `sees_none` on none.
    sees_all = min(max(k.start + window, q.start), q.end)
    sees_none = min(max(k.end + window - 1, sees_all), q.end)
    if sees_all > q.start:
        found.append(Tile(q.rows(q.start, sees_all), k.all_rows, FULL))
    if sees_none > sees_all:
        rows, first, last = q.rows(sees_all, sees_none), sees_all - window + 1, sees_none - window + 1
        found.append(Tile(rows, k.rows(first, last), ANTICAUSAL))
        if k.end > last:
            found.append(Tile(rows, k.rows(last, k.end), FULL))
    return found
