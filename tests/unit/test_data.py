"""Sequences are a function of their index; replicas share them; the position survives another set of ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hexiseq.data import (
    ByteTokenizer,
    HexiSeqDataModule,
    SequenceSource,
    ValidationSource,
    boundaries,
    restarted_positions,
    stdlib_files,
    text_files,
)
from hexiseq.plan import Plan, RankDevice, make_replica

SYNTHETIC = {"documents": 20, "length": 100, "vocab_size": 32, "noise": 0.1}


def synthetic(**changes) -> HexiSeqDataModule:
    settings = {"source": "synthetic", "seq_len": 48, "seed": 3, "validation_fraction": 0.1, "synthetic": SYNTHETIC}
    return HexiSeqDataModule(**{**settings, **changes})


def plan(*sequences: int) -> Plan:
    replicas = tuple(make_replica(48, 48, [(1, [(r, 48, 4)])], count) for r, count in enumerate(sequences))
    devices = tuple(RankDevice("cpu", "n", "cpu") for _ in sequences)
    return Plan("manual", 48, 4, 2, 48, 1, "ring", "none", "float32", replicas, devices)


def attach(module: HexiSeqDataModule, job: Plan, rank: int) -> HexiSeqDataModule:
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(plan=job, global_rank=rank))
    module.setup()
    return module


def take(module: HexiSeqDataModule, count: int) -> list[torch.Tensor]:
    batches = iter(module.train_dataloader())
    return [next(batches)["input_ids"] for _ in range(count)]


def test_an_epoch_holds_every_token_once_and_is_reshuffled():
    documents = [np.full(length, length) for length in (3, 30, 7, 55, 11)]
    source = SequenceSource(documents, seq_len=10, eos=99, seed=0)
    assert len(source) == (3 + 30 + 7 + 55 + 11 + 5) // 10
    epochs = [np.concatenate([source[e * len(source) + i] for i in range(len(source))]) for e in range(2)]
    for epoch in epochs:
        assert epoch.dtype == np.int64
        values, counts = np.unique(epoch, return_counts=True)
        whole = dict(zip((3, 30, 7, 55, 11, 99), (3, 30, 7, 55, 11, 5), strict=True))
        assert sum(whole[v] - c for v, c in zip(values, counts, strict=True)) <= source.seq_len
    assert not np.array_equal(*epochs)
    assert np.array_equal(source[2], SequenceSource(documents, 10, 99, 0)[2])


def test_validation_labels_each_token_once():
    source = ValidationSource([np.arange(10), np.arange(5)], seq_len=8, eos=99)
    labels = np.concatenate([source[i][1] for i in range(len(source) + 2)])
    assert labels[labels != -100].tolist() == [*range(10), 99, *range(5), 99]
    assert all(len(source[i][0]) == 8 for i in range(len(source) + 2))


def test_boundaries_are_where_documents_start():
    documents = [np.full(length, length) for length in (3, 30, 7, 55, 11)]
    source = SequenceSource(documents, seq_len=10, eos=99, seed=0)
    for index in range(2 * len(source)):
        tokens, ends = source[index], boundaries(source.parts(index))
        # After an eos, and nowhere else; an eos belongs to the document before it.
        assert ends == sorted({0, 10, *(np.flatnonzero(tokens == 99) + 1).tolist()})
    whole = SequenceSource([np.arange(9), np.arange(9)], seq_len=10, eos=99, seed=0)
    assert boundaries(whole.parts(0)) == boundaries(whole.parts(1)) == [0, 10]
    assert restarted_positions([0, 1, 4, 10]).tolist() == [0, 0, 1, 2, 0, 1, 2, 3, 4, 5]


def test_boundaries_of_validation_part_the_filling_off():
    source = ValidationSource([np.arange(10), np.arange(5)], seq_len=8, eos=99)
    assert [source.boundaries(i) for i in range(4)] == [[0, 8], [0, 3, 8], [0, 1, 8], [0, 8]]
    assert ValidationSource([np.arange(7)], seq_len=8, eos=99).boundaries(0) == [0, 8]


def test_batches_carry_documents_when_asked():
    plain, marked, restarted = (
        attach(synthetic(mask_documents=mask, restart_positions=restart), plan(2, 1), 0)
        for mask, restart in ((False, False), (True, False), (True, True))
    )
    for loader in ("train_dataloader", "val_dataloader"):
        batches = [next(iter(getattr(module, loader)())) for module in (plain, marked, restarted)]
        ids = batches[0]["input_ids"]
        assert all(torch.equal(batch["input_ids"], ids) for batch in batches)
        assert "documents" not in batches[0]
        assert batches[1].keys() == {*batches[0], "documents"}
        assert batches[2].keys() == {*batches[1], "position_ids"}
        if loader == "train_dataloader":
            ends = [boundaries(marked.train_source.parts(i)) for i in range(2)]
        else:
            ends = [marked.validation_source.boundaries(i) for i in range(2)]
        assert batches[1]["documents"] == batches[2]["documents"] == ends
        positions = np.stack([restarted_positions(ends) for ends in batches[2]["documents"]])
        assert torch.equal(batches[2]["position_ids"], torch.from_numpy(positions))
    assert any(len(ends) > 2 for index in range(9) for ends in [boundaries(marked.train_source.parts(index))])


def test_ranks_that_read_other_documents_are_found():
    one, two = ([np.arange(5), np.arange(4)], [np.array([*range(5), 99, *range(4)])])
    prints = [SequenceSource(documents, 4, 99, 0).fingerprint() for documents in (one, two)]
    assert prints[0] != prints[1]


def test_replicas_take_consecutive_sequences_and_the_position_survives_another_plan():
    whole = torch.cat(take(attach(synthetic(), plan(1), 0), 9))
    shares = [torch.stack(take(attach(synthetic(), plan(2, 1), rank), 3)) for rank in range(2)]
    assert torch.equal(torch.cat([shares[0], shares[1]], dim=1).flatten(0, 1), whole)

    first = attach(synthetic(), plan(2, 1), 0)
    take(first, 3)  # fetched, one of them trained
    first.sequences_trained(3)
    second = synthetic()
    second.load_state_dict(first.state_dict())
    assert torch.equal(torch.cat(take(attach(second, plan(1), 0), 6)), whole[3:])
    with pytest.raises(ValueError, match=r"data\.seq_len is 50, the checkpoint was written with 48"):
        synthetic(seq_len=50).load_state_dict(first.state_dict())


def test_validation_batches_are_as_many_for_every_replica():
    modules = [attach(synthetic(), plan(2, 1), rank) for rank in range(2)]
    batches = [list(m.val_dataloader()) for m in modules]
    assert len(batches[0]) == len(batches[1]) == len(modules[0].val_dataloader())
    labelled = sum(int((b["labels"] != -100).sum()) for rank in batches for b in rank)
    assert labelled == 2 * 101


def test_the_standard_library_and_a_folder_are_sources(tmp_path):
    files = stdlib_files()
    assert len(files) > 100
    assert files == stdlib_files()
    assert not any("site-packages" in path.parts for path in files)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("second ü" * 40)
    (tmp_path / "a.md").write_text("first" * 40)
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert [path.name for path in text_files(tmp_path)] == ["a.md", "b.txt"]
    module = HexiSeqDataModule("text_dir", 16, 0, 0.0, path=str(tmp_path))
    module.setup()
    assert module.train_source is not None
    assert module.train_source.num_tokens == 5 * 40 + 9 * 40 + 2
    assert ByteTokenizer().decode(ByteTokenizer().encode("second ü").tolist()) == "second ü"


def test_synthetic_documents_repeat_their_first_half():
    module = synthetic(synthetic={**SYNTHETIC, "noise": 0.0}, seq_len=101, validation_fraction=0)
    module.setup()
    assert module.train_source is not None
    sequence = module.train_source[0]
    assert np.array_equal(sequence[:50], sequence[50:100])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 1}, "data.seq_len must be an integer of at least 2, got 1"),
        ({"seq_len": True}, "data.seq_len"),
        ({"source": "web"}, "data.source 'web' is not one of pystdlib"),
        ({"validation_fraction": 0.9}, r"within \[0, 0.5\]"),
        ({"seed": -1}, "seed must be"),
        ({"source": "text_dir"}, "data.path is empty"),
        ({"source": "text_dir", "path": "/nowhere/at/all"}, "'/nowhere/at/all' is not a folder"),
        ({"synthetic": {"documents": 3}}, "needs exactly documents, length"),
        ({"synthetic": {**SYNTHETIC, "vocab_size": 300}}, "from 2 to 256, got 300"),
        ({"mask_documents": 1}, "data.mask_documents must be true or false, got 1"),
        ({"restart_positions": True}, "data.restart_positions=true needs data.mask_documents=true"),
        ({"tokenizer": "/nowhere"}, "not 'bytes' and not a saved tokenizer"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        synthetic(**changes)


def test_too_little_text_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no text file"):
        text_files(tmp_path)
    with pytest.raises(ValueError, match="longer than all 1,818 tokens of the training split"):
        synthetic(seq_len=5000).setup()
