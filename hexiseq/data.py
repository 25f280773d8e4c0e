"""Token sequences: a deterministic map from a global index to a sequence, and its place in a Lightning job.

The position in the data is one number, the sequences trained so far by the whole job. It does not depend on how many
ranks or replicas read them, so a run resumed on other devices continues where the first one stopped.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import numpy as np
import torch
from typing_extensions import override

from hexiseq.documents import balanced_order

SOURCES = ("pystdlib", "text_dir", "synthetic")
IGNORED = -100
VOCAB_SIZE = 259  # of byte tokens: 256 bytes, bos, eos and pad
TEXT_SUFFIXES = frozenset({".txt", ".md", ".rst", ".py", ".tex", ".html", ".json", ".jsonl", ".csv", ".c", ".h"})


class Tokenizer(Protocol):
    vocab_size: int
    eos: int

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int64 ``[tokens]``, without special tokens."""


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, then ``bos``, ``eos`` and ``pad``."""

    bos, eos, pad = 256, 257, 258
    vocab_size = VOCAB_SIZE

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer saved in a local folder. Nothing is downloaded."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"data.tokenizer {folder!r}: not 'bytes' and not a saved tokenizer ({error})") from None
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"data.tokenizer {folder!r} has no eos token to part documents with")
        self.eos = int(self._tokenizer.eos_token_id)
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def make_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or the folder of a saved Hugging Face tokenizer."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def stdlib_files() -> list[Path]:
    """The ``.py`` sources of this Python's standard library, in a stable order. They change with the patch release."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    found = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def text_files(folder: str | Path | None) -> list[Path]:
    """All text files under `folder`, sorted. Raises ValueError where there are none."""
    if not folder:
        raise ValueError("data.path is empty; source text_dir needs the folder of your text files, data.path=FOLDER")
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"data.path {str(root)!r} is not a folder; set data.path to a folder of text files")
    found = sorted(path for path in root.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES and path.is_file())
    if not found:
        raise ValueError(
            f"data.path {str(root)!r} holds no text file; put files ending in {', '.join(sorted(TEXT_SUFFIXES))} "
            "there, or set data.path to another folder"
        )
    return found


def read_documents(files: Sequence[Path], tokenizer: Tokenizer) -> list[np.ndarray]:
    """One token array per file that is not empty."""
    encoded = (tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")) for path in files)
    return [tokens for tokens in encoded if len(tokens)]


def synthetic_documents(documents: int, length: int, vocab_size: int, noise: float, seed: int) -> list[np.ndarray]:
    """Documents a small model can learn: a noisy Markov chain whose second half repeats the first.

    The chain teaches a model its neighbours, the repeat needs attention over ``length / 2`` tokens.
    """
    rng = np.random.default_rng([seed, 1])
    half = -(-length // 2)
    successors = rng.integers(0, vocab_size, size=(vocab_size, 4))
    tokens = np.empty((documents, half), dtype=np.int64)
    tokens[:, 0] = rng.integers(0, vocab_size, size=documents)
    for position in range(1, half):
        tokens[:, position] = successors[tokens[:, position - 1], rng.integers(0, 4, size=documents)]
    whole = np.concatenate([tokens, tokens], axis=1)[:, :length]
    replaced = rng.random(whole.shape) < noise
    whole[replaced] = rng.integers(0, vocab_size, size=int(replaced.sum()))
    return list(whole)


def boundaries(parts: Sequence[np.ndarray]) -> list[int]:
    """Where documents packed end to end start, and where the last one ends."""
    return [0, *np.cumsum([len(part) for part in parts]).tolist()]


def restarted_positions(boundaries: Sequence[int]) -> np.ndarray:
    """Positions that start at 0 in each document, int64 ``[seq_len]``, of boundaries such as ``[0, 700, seq_len]``."""
    starts = np.asarray(boundaries[:-1], dtype=np.int64)
    return np.arange(boundaries[-1], dtype=np.int64) - np.repeat(starts, np.diff(boundaries))


class SequenceSource:
    """A deterministic map from an index to a sequence: documents, shuffled anew each epoch, packed end to end.

    Each document ends in `eos`. Documents longer than a sequence go on in the next one; an epoch's incomplete last
    sequence is dropped. Indices never end: index ``i`` belongs to epoch ``i // len(source)``.

    Raises:
        ValueError: fewer tokens than one sequence.
    """

    def __init__(self, documents: Sequence[np.ndarray], seq_len: int, eos: int, seed: int) -> None:
        self.seq_len, self.seed = seq_len, seed
        largest = max((int(document.max()) for document in documents if len(document)), default=0)
        dtype = np.uint16 if max(largest, eos) < 2**16 else np.int32
        self._documents = [np.append(document, eos).astype(dtype) for document in documents]
        self._lengths = np.array([len(document) for document in self._documents], dtype=np.int64)
        self.num_tokens = int(self._lengths.sum())
        if self.num_tokens < seq_len:
            raise ValueError(
                f"data.seq_len {seq_len:,} is longer than all {self.num_tokens:,} tokens of the training split; "
                "use a shorter data.seq_len or more text"
            )
        self._epoch = -1
        self._order = self._ends = np.empty(0, np.int64)

    def __len__(self) -> int:
        """Sequences of an epoch."""
        return self.num_tokens // self.seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        """Sequence `index`, int64 ``[seq_len]``."""
        return np.concatenate(self.parts(index)).astype(np.int64)

    def parts(self, index: int) -> list[np.ndarray]:
        """The documents of sequence `index`, each with its `eos`.

        The first may be the rest of one that began in an earlier sequence, the last the beginning of one.
        """
        epoch, chunk = divmod(index, len(self))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self._documents))
            self._ends = np.cumsum(self._lengths[self._order])
            self._epoch = epoch
        position, end = chunk * self.seq_len, (chunk + 1) * self.seq_len
        parts = []
        place = int(np.searchsorted(self._ends, position, side="right"))
        while position < end:
            document = self._documents[self._order[place]]
            offset = position - (int(self._ends[place]) - len(document))
            part = document[offset : offset + end - position]
            parts.append(part)
            position += len(part)
            place += 1
        return parts

    def fingerprint(self) -> str:
        """Hash of all tokens and the documents' lengths, to find ranks that read different files."""
        digest = hashlib.sha256(f"{self.seq_len} {self.seed}".encode())
        digest.update(self._lengths.tobytes())
        for document in self._documents:
            digest.update(document.tobytes())
        return digest.hexdigest()[:16]


class ValidationSource:
    """Every token of the validation split once, in order: the last sequence is filled up with unlabelled tokens."""

    def __init__(self, documents: Sequence[np.ndarray], seq_len: int, eos: int) -> None:
        self.seq_len = seq_len
        self._tokens = np.concatenate([np.append(document, eos) for document in documents])
        self._ends = np.cumsum([len(document) + 1 for document in documents])

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.seq_len)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels, int64 ``[seq_len]`` each; an index past the end is a sequence without labels."""
        start = index * self.seq_len
        owned = self._tokens[start : start + self.seq_len]
        filling = self.seq_len - len(owned)
        ids = np.concatenate([owned, np.resize(self._tokens, filling)])
        return ids, np.concatenate([owned, np.full(filling, IGNORED)])

    def boundaries(self, index: int) -> list[int]:
        """Where the documents of sequence `index` start, and `seq_len`; the filling counts as one document."""
        start = index * self.seq_len
        inside = self._ends[(self._ends > start) & (self._ends < start + self.seq_len)] - start
        return [0, *inside.tolist(), self.seq_len]


class HexiSeqDataModule(L.LightningDataModule):
    """Whole sequences for every rank: ranks of a replica read the same ones, replicas take consecutive ones.

    In each micro-step replica ``r`` of a plan takes ``plan.replicas[r].sequences`` sequences; under a strategy without
    a plan, one reader takes one. `sequences_consumed` counts the sequences the whole job has *trained* (not fetched);
    it is all of the module's state.

    Args:
        source: one of `SOURCES`.
        seq_len: tokens of a sequence.
        seed: of the order of documents, and of synthetic ones.
        validation_fraction: share of the documents held out, in [0, 0.5]: every n-th one.
        tokenizer: ``bytes``, or the folder of a saved Hugging Face tokenizer.
        path: folder of text files, for ``text_dir``.
        synthetic: ``documents``, ``length``, ``vocab_size`` (at most 256) and ``noise`` in [0, 1], for ``synthetic``.
        mask_documents: batches carry ``documents``, the boundaries of each sequence's documents; attention and labels
            then stay within a document.
        restart_positions: batches carry ``position_ids`` ``[count, seq_len]`` that start at 0 in each document. Needs
            `mask_documents`.
        arrange_documents: with `mask_documents`, a training sequence's documents lie in the order that gives each group
            of the plan its share of the attention (`hexiseq.documents.balanced_order`).

    Raises:
        ValueError: naming the parameter, its value and what would do.
    """

    def __init__(
        self,
        source: str,
        seq_len: int,
        seed: int,
        validation_fraction: float,
        tokenizer: str = "bytes",
        path: str | None = None,
        synthetic: Mapping[str, Any] | None = None,
        mask_documents: bool = False,
        restart_positions: bool = False,
        arrange_documents: bool = False,
    ) -> None:
        super().__init__()
        _check(source, seq_len, seed, validation_fraction)
        _check_documents(mask_documents, restart_positions, arrange_documents)
        if source == "text_dir":
            text_files(path)
        self.source, self.seq_len, self.seed, self.path = source, seq_len, seed, path
        self.validation_fraction = validation_fraction
        self.mask_documents, self.restart_positions = mask_documents, restart_positions
        self.arrange_documents = arrange_documents
        self.tokenizer = make_tokenizer(tokenizer)
        self.synthetic = _check_synthetic(synthetic, tokenizer) if source == "synthetic" else {}
        self.sequences_consumed = 0
        self.train_source: SequenceSource | None = None
        self.validation_source: ValidationSource | None = None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @override
    def setup(self, stage: str | None = None) -> None:
        if self.train_source is None:
            documents = self._documents()
            every = round(1 / self.validation_fraction) if self.validation_fraction else 0
            held = documents[every - 1 :: every] if every else []
            kept = [d for i, d in enumerate(documents) if not every or (i + 1) % every]
            if every and not (held and kept):
                raise ValueError(
                    f"data.validation_fraction {self.validation_fraction} leaves {len(kept)} training and {len(held)} "
                    f"validation documents of {len(documents)}; set it to 0 or give more documents"
                )
            self.train_source = SequenceSource(kept, self.seq_len, self.tokenizer.eos, self.seed)
            self.validation_source = ValidationSource(held, self.seq_len, self.tokenizer.eos) if held else None
        strategy = getattr(self.trainer, "strategy", None)
        if strategy is not None and hasattr(strategy, "check_equal"):
            strategy.check_equal("the training data", self.train_source.fingerprint())
            strategy.check_equal(
                "(data.mask_documents, data.restart_positions, data.arrange_documents)",
                str((self.mask_documents, self.restart_positions, self.arrange_documents)),
            )

    def _documents(self) -> list[np.ndarray]:
        if self.source == "synthetic":
            return synthetic_documents(seed=self.seed, **self.synthetic)
        files = stdlib_files() if self.source == "pystdlib" else text_files(self.path)
        return read_documents(files, self.tokenizer)

    def batch(self, indices: Sequence[int]) -> dict[str, Any]:
        """Training sequences as they are fed: ``input_ids`` int64 ``[count, seq_len]`` and `marks`."""
        assert self.train_source is not None
        sequences = [self._arranged(self.train_source.parts(index)) for index in indices]
        ids = np.stack([np.concatenate(parts) for parts in sequences]).astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), **self.marks([boundaries(parts) for parts in sequences])}

    def _arranged(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        strategy = getattr(self.trainer, "strategy", None)
        plan = getattr(strategy, "plan", None)
        if not (self.mask_documents and self.arrange_documents) or strategy is None or plan is None:
            return parts
        order = balanced_order([len(part) for part in parts], plan, plan.place(strategy.global_rank)[0])
        return [parts[i] for i in order]

    def marks(self, documents: list[list[int]]) -> dict[str, Any]:
        """What batches with these boundaries of documents carry about them: nothing unless asked for."""
        if not self.mask_documents:
            return {}
        if not self.restart_positions:
            return {"documents": documents}
        positions = np.stack([restarted_positions(boundaries) for boundaries in documents])
        return {"documents": documents, "position_ids": torch.from_numpy(positions)}

    def share(self) -> tuple[int, int, int]:
        """``(first, count, total)``: this rank reads sequences ``first`` to ``first + count`` of each ``total``."""
        strategy = getattr(self.trainer, "strategy", None)
        plan = getattr(strategy, "plan", None)
        if strategy is None or plan is None:
            return 0, 1, 1
        replica, _, _ = plan.place(strategy.global_rank)
        counts = [r.sequences for r in plan.replicas]
        return sum(counts[:replica]), counts[replica], sum(counts)

    @override
    def train_dataloader(self) -> _TrainLoader:
        return _TrainLoader(self)

    @override
    def val_dataloader(self) -> Any:
        return [] if self.validation_source is None else _ValidationLoader(self)

    def sequences_trained(self, count: int) -> None:
        """Advance the position by `count` sequences of the whole job; the strategy calls it once a micro-step."""
        self.sequences_consumed += count

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"sequences_consumed": self.sequences_consumed, "seq_len": self.seq_len, "seed": self.seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, name in (("data.seq_len", "seq_len"), ("seed", "seed")):
            here, there = getattr(self, name), state_dict[name]
            if here != there:
                raise ValueError(
                    f"{key} is {here}, the checkpoint was written with {there}: its position in the data has no "
                    f"meaning here; set {key}={there}"
                )
        self.sequences_consumed = int(state_dict["sequences_consumed"])


# Plain iterables, not DataLoaders: Lightning would put its own sampler into those, and batches come from memory.
class _TrainLoader:
    """Endless batches ``{"input_ids": int64 [count, seq_len]}``, and marks, from the position trained so far."""

    def __init__(self, module: HexiSeqDataModule) -> None:
        self._module = module

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, count, total = self._module.share()
        position = self._module.sequences_consumed
        while True:
            yield self._module.batch(range(position + first, position + first + count))
            position += total


class _ValidationLoader:
    """Batches ``{"input_ids", "labels"}`` int64 ``[count, seq_len]``, and marks, as many for every replica."""

    def __init__(self, module: HexiSeqDataModule) -> None:
        assert module.validation_source is not None
        self._module, self._source = module, module.validation_source
        self._share = module.share()

    def __len__(self) -> int:
        return -(-len(self._source) // self._share[2])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first, count, total = self._share
        for start in range(0, len(self) * total, total):
            indices = range(start + first, start + first + count)
            pairs = [self._source[i] for i in indices]
            ids, labels = (torch.from_numpy(np.stack(column)) for column in zip(*pairs, strict=True))
            ends = [self._source.boundaries(i) for i in indices]
            yield {"input_ids": ids, "labels": labels, **self._module.marks(ends)}


def _check(source: str, seq_len: int, seed: int, validation_fraction: float) -> None:
    if source not in SOURCES:
        raise ValueError(f"data.source {source!r} is not one of {', '.join(SOURCES)}")
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 2:
        raise ValueError(f"data.seq_len must be an integer of at least 2, got {seq_len!r}")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"the data's seed must be an integer of at least 0, got {seed!r}")
    if not isinstance(validation_fraction, (int, float)) or not 0 <= validation_fraction <= 0.5:
        raise ValueError(f"data.validation_fraction must be within [0, 0.5], got {validation_fraction!r}")


def _check_documents(mask_documents: bool, restart_positions: bool, arrange_documents: bool) -> None:
    for name, value in (
        ("mask_documents", mask_documents),
        ("restart_positions", restart_positions),
        ("arrange_documents", arrange_documents),
    ):
        if not isinstance(value, bool):
            raise ValueError(f"data.{name} must be true or false, got {value!r}")
    if restart_positions and not mask_documents:
        raise ValueError(
            "data.restart_positions=true needs data.mask_documents=true: tokens of two documents at the same position "
            "must not attend to each other"
        )


def _check_synthetic(settings: Mapping[str, Any] | None, tokenizer: str) -> dict[str, Any]:
    settings = dict(settings or {})
    required = ("documents", "length", "vocab_size", "noise")
    if set(settings) != set(required):
        raise ValueError(f"data.synthetic needs exactly {', '.join(required)}, got {', '.join(settings) or 'nothing'}")
    if tokenizer != "bytes":
        raise ValueError(f"data.source synthetic makes byte tokens; data.tokenizer must be 'bytes', got {tokenizer!r}")
    for name, least, most in (("documents", 1, None), ("length", 2, None), ("vocab_size", 2, 256)):
        value = settings[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least or (most and value > most):
            limit = f"from {least} to {most}" if most else f"of at least {least}"
            raise ValueError(f"data.synthetic.{name} must be an integer {limit}, got {value!r}")
    if not 0 <= settings["noise"] <= 1:
        raise ValueError(f"data.synthetic.noise must be within [0, 1], got {settings['noise']!r}")
    return settings
