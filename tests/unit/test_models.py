"""Hugging Face decoders on a plan in one process: loss and gradients of stock attention; the rest is refused."""

from __future__ import annotations

import copy
import tempfile
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from hexiseq.attention import close_all, runtime_for
from hexiseq.data import restarted_positions
from hexiseq.models import PlanHolder, apply_recompute, build_model, load_model, materialize, prepare, token_loss_sum
from hexiseq.offload import HostInputs
from hexiseq.plan import Plan, RankDevice, make_replica

SEQ_LEN = 64
SIZES = {
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 4096,
}
LLAMA = {"model_type": "llama", **SIZES}


def plan(seq_len: int = SEQ_LEN, dtype: str = "float32", recompute: str = "none", heads: int = 9) -> Plan:
    replica = make_replica(seq_len, seq_len, [(1, [(0, seq_len, heads)])])
    device = RankDevice("cpu", "here", "cpu")
    return Plan("manual", seq_len, heads, 3, seq_len, 1, "ring", recompute, dtype, (replica,), (device,))


@pytest.fixture(scope="module")
def job():
    """A job of one rank: attention needs process groups."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        close_all()
        dist.destroy_process_group()


def batch(seq_len: int = SEQ_LEN) -> dict:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 96, (2, seq_len), generator=generator)
    labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100).clone()
    labels[0, 10:30] = -100
    positions = torch.arange(seq_len).expand(2, -1)
    return {"input_ids": ids, "position_ids": positions, "shift_labels": labels, "num_items_in_batch": 2 * seq_len}


def stock_loss(model: nn.Module, data: dict) -> torch.Tensor:
    logits = model(input_ids=data["input_ids"], use_cache=False).logits
    total = nn.functional.cross_entropy(logits.flatten(0, 1), data["shift_labels"].flatten(), reduction="sum")
    return total / data["num_items_in_batch"]


@pytest.mark.parametrize(
    ("config", "recompute"),
    [
        (LLAMA, "none"),
        (LLAMA, "selective"),
        (LLAMA, "full"),
        (LLAMA, "selective, offload"),
        (LLAMA, "full, offload"),
        ({**LLAMA, "tie_word_embeddings": True}, "none"),
        ({**SIZES, "model_type": "qwen3"}, "selective"),
        ({**SIZES, "model_type": "qwen2", "head_dim": None}, "none"),
        ({**SIZES, "model_type": "mistral", "sliding_window": None}, "none"),
        # A window no shorter than the sequence does nothing.
        ({**SIZES, "model_type": "mistral", "sliding_window": SEQ_LEN}, "none"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value['model_type']}-{len(value)}",
)
def test_loss_and_gradients_are_those_of_stock_attention(job, config, recompute):
    config = {key: value for key, value in config.items() if key != "head_dim" or value is not None}
    stock, model = (build_model(config, torch.float32, seed=1) for _ in range(2))
    stock.set_attn_implementation("sdpa")
    recompute, _, offload = recompute.partition(", ")
    holder = PlanHolder(plan(recompute=recompute))
    prepare(model, holder)
    apply_recompute(model, recompute, offload=bool(offload))
    wanted, out = stock_loss(stock, batch()), model(**batch())
    wanted.backward()
    out.loss.backward()
    assert out.logits is None
    assert holder.loss_sum is not None
    assert out.loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert holder.loss_sum.item() == pytest.approx(wanted.item() * 2 * SEQ_LEN, rel=1e-6)
    compare_gradients(model, stock)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mistral", "sliding_window": 20},
        {"model_type": "mistral", "sliding_window": 1},
        {"model_type": "mistral", "sliding_window": 40},
        {"model_type": "qwen2", "sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "gemma3_text", "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
        {"model_type": "olmo3", "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ],
    ids=lambda config: f"{config['model_type']}-{config['sliding_window']}",
)
def test_windows_are_those_of_eager_attention(job, config):
    stock, model = (build_model({**SIZES, **config}, torch.float32, seed=1) for _ in range(2))
    stock.set_attn_implementation("eager")
    prepare(model, PlanHolder(plan(recompute="selective")))
    apply_recompute(model, "selective")
    wanted, out = stock_loss(stock, batch()), model(**batch())
    wanted.backward()
    out.loss.backward()
    assert out.loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    compare_gradients(model, stock)
    # The window matters here.
    windows = {"sliding_window": 10 * SEQ_LEN}
    wide = build_model({**SIZES, **config, **windows}, torch.float32, seed=1)
    assert stock_loss(wide, batch()).item() != pytest.approx(wanted.item(), rel=1e-5)


DOCUMENTS = ([[0, 1, 20, 45, SEQ_LEN], [0, 33, SEQ_LEN]], [[0, 40, SEQ_LEN], [0, SEQ_LEN]])


def packed(documents: list[list[int]]) -> dict:
    """A batch whose positions restart, and whose labels stay within documents."""
    data = batch()
    for row, ends in enumerate(documents):
        data["shift_labels"][row, [end - 1 for end in ends]] = -100
    data["position_ids"] = torch.from_numpy(np.stack([restarted_positions(ends) for ends in documents]))
    return data


def alone(model: nn.Module, documents: list[list[int]]) -> torch.Tensor:
    """The loss of a stock model that is given one document at a time."""
    data, total = packed(documents), torch.zeros(())
    for row, ends in enumerate(documents):
        for start, end in pairwise(ends):
            logits = model(input_ids=data["input_ids"][row : row + 1, start:end], use_cache=False).logits[0]
            total = total + nn.functional.cross_entropy(logits, data["shift_labels"][row, start:end], reduction="sum")
    return total / data["num_items_in_batch"]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("config", [LLAMA, {**SIZES, "model_type": "mistral", "sliding_window": 15}],
                         ids=lambda config: config["model_type"])  # fmt: skip
def test_packed_documents_are_those_run_alone(job, config, recompute):
    stock, model = (build_model(config, torch.float32, seed=1) for _ in range(2))
    stock.set_attn_implementation("eager")
    holder = PlanHolder(plan(recompute=recompute))
    prepare(model, holder)
    apply_recompute(model, recompute)
    # Both forwards before the first backward: what is recomputed keeps its own documents.
    losses = []
    for documents in DOCUMENTS:
        holder.documents = documents
        losses.append(model(**packed(documents)).loss)
    holder.documents = None
    for documents, loss in zip(DOCUMENTS, losses, strict=True):
        wanted = alone(stock, documents)
        wanted.backward()
        loss.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        compare_gradients(model, stock)
    assert holder.documents is None
    assert model(**packed(DOCUMENTS[0])).loss.item() != pytest.approx(losses[0].item(), rel=1e-4)


def compare_gradients(model: nn.Module, stock: nn.Module) -> None:
    grads = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    # Of a window of one token, the gradients of queries and keys are zero but for rounding.
    least = 1e-8 * max(parameter.grad.abs().max() for parameter in stock.parameters())
    for name, parameter in stock.named_parameters():
        assert (grads[name] - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max() + least, name


def test_selective_recompute_runs_attention_once_and_full_twice(job):
    counts = {}
    for mode in ("none", "selective", "full"):
        model, job_plan = build_model(LLAMA, torch.float32, seed=1), plan(recompute=mode)
        prepare(model, PlanHolder(job_plan))
        apply_recompute(model, mode)
        calls = runtime_for(job_plan).calls
        calls.clear()
        model(**batch()).loss.backward()
        counts[mode] = (calls["forward"], calls["backward"])
    assert counts == {"none": (2, 2), "selective": (2, 2), "full": (4, 2)}


def test_inputs_of_layers_are_in_host_memory_until_backward(job, monkeypatch):
    # Larger than a piece and no multiple of one.
    monkeypatch.setattr("hexiseq.offload.PIECE_BYTES", 1 << 14)
    model = build_model({**LLAMA, "num_hidden_layers": 5}, torch.float32, seed=1)
    prepare(model, PlanHolder(plan(recompute="full")))
    inputs = apply_recompute(model, "full", offload=True)
    own, computed, held = 2 * SEQ_LEN * 72 * 4, [], []
    for layer in model.model.layers:
        layer._checkpoint_wrapped_module.register_forward_pre_hook(
            lambda _, args: computed.append(StorageWeakRef(args[0].untyped_storage()))
        )
        layer.mlp.register_full_backward_hook(lambda *_: held.append(sum(alive()[5:])))

    def alive():
        return [not storage.expired() for storage in computed]

    def forward():
        computed.clear()
        return model(**batch()).loss

    loss = forward()
    assert alive() == [False] * 4 + [True]  # backward begins with the last layer's
    assert inputs.free_bytes == 0
    assert 4 * own <= inputs.host_bytes < 4 * (own + (1 << 14))
    taken = inputs.host_bytes
    loss.backward()
    del loss
    assert held == [1] * 5  # a layer computed again has its input, and those before it have left none
    assert inputs.host_bytes == inputs.free_bytes == taken

    # Two forwards before the first backward, a pass without gradients, and an error on the way back.
    first = forward()
    model.model.layers[2].mlp.register_full_backward_hook(lambda *_: 1 / 0)
    second = forward()
    assert inputs.host_bytes == 2 * taken
    with torch.no_grad():
        forward()
    first.backward()
    with pytest.raises(ZeroDivisionError):
        second.backward()
    del first, second
    assert inputs.host_bytes == inputs.free_bytes == 2 * taken


class Late:
    """Copies beside the kernels at their latest: each runs when somebody waits for it, those before it first."""

    def __init__(self) -> None:
        self.issued, self.done = [], 0

    def __call__(self, device, copy):
        self.issued.append(copy)
        number = len(self.issued)

        def wait():
            for index in range(self.done, number):
                self.issued[index]()
                self.issued[index] = None
            self.done = max(self.done, number)

        return wait


def test_inputs_that_come_and_go_at_the_latest_are_waited_for(monkeypatch):
    monkeypatch.setattr("hexiseq.offload.PIECE_BYTES", 1 << 10)
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(6))
    batches = [torch.randn(rows, 40) for rows in (30, 30, 7, 50, 30)]

    def output(inputs, x):
        hidden = x * 1.0
        for index, layer in enumerate(layers):
            with inputs.saving(index, hidden) if inputs else nullcontext():
                hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden.square().sum()

    def steps(inputs):
        found = []
        for x, y in pairwise(batches):  # two passes under way, the first to begin the first to end
            first, second = output(inputs, x), output(inputs, y)
            for total in (first, second):
                total.backward()
            found.append([p.grad.clone() for p in layers.parameters()])
            layers.zero_grad()
        return found

    late = HostInputs(len(layers), Late())
    for moved, stayed in zip(steps(late), steps(None), strict=True):
        assert all(map(torch.equal, moved, stayed))
    assert len(late.beside.issued) == 4 * 2 * 2 * 5  # to hosts and back, all but the last layer's
    assert late.beside.done == len(late.beside.issued)
    assert late.free_bytes == late.host_bytes
    # What is on its way back when all is given up is waited for.
    total = output(late, batches[0])
    issued = len(late.beside.issued)
    packed = late._latest()
    packed.take()
    assert len(late.beside.issued) == issued + 1
    del total, packed
    assert late.beside.done == issued + 1


@pytest.mark.parametrize("seq_len", [64, 200])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [3.0, 4.0, 5.0, 6.0],
            "original_max_position_embeddings": 100,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_length_dependent_rope_takes_the_length_of_the_plan(job, rope, seq_len):
    config = {**LLAMA, "rope_parameters": rope, "max_position_embeddings": 100}
    stock, model = (build_model(config, torch.float32, seed=1) for _ in range(2))
    prepare(model, PlanHolder(plan(seq_len)))
    stock.set_attn_implementation("sdpa")
    assert model(**batch(seq_len)).loss.item() == pytest.approx(stock_loss(stock, batch(seq_len)).item(), rel=1e-6)
    # What a rank with other positions computes.
    rotary, other = model.model.rotary_emb, stock.model.rotary_emb
    frequencies = rotary.inv_freq.clone()
    for positions in (torch.arange(4), torch.tensor([0, 1, 0, 1]), torch.tensor([500, 501])):
        rotary(torch.zeros(1, len(positions), 72), positions[None])
    assert torch.equal(rotary.inv_freq, frequencies)
    assert torch.allclose(frequencies, other.inv_freq)


def test_two_models_with_two_plans_and_a_plan_replaced(job):
    holders = [PlanHolder(plan(n)) for n in (48, 64)]
    models = [build_model(LLAMA, torch.float32, seed=1) for _ in holders]
    for model, holder in zip(models, holders, strict=True):
        prepare(model, holder)
    for model, n in zip(models, (48, 64), strict=True):
        model(**batch(n))
    with pytest.raises(ValueError, match="64 tokens, the plan"):
        models[0](**batch(64))
    holders[0].plan = plan(64)
    assert models[0](**batch(64)).loss == models[1](**batch(64)).loss


def test_weights_depend_on_the_seed_alone():
    whole, again, other = (build_model(LLAMA, torch.float32, seed=s) for s in (1, 1, 2))
    parts = build_model(LLAMA, torch.float32, seed=None)
    apply_recompute(parts, "full")
    for part in [*parts.model.layers, parts]:
        materialize(parts, part, 1, torch.device("cpu"))
    values = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in parts.named_parameters()}
    for (name, a), b, c in zip(whole.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, values[name])
        assert a.ndim == 1 or not torch.equal(a, c)
    assert torch.equal(parts.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)
    assert whole.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-4)])
def test_token_loss_sum(dtype, limit):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 700, 32, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(300, 32, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 300, (3, 700), generator=generator)
    labels[:, :100] = -100
    exact = nn.functional.cross_entropy(
        (hidden.double() @ weight.double().T).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    wanted = torch.autograd.grad(exact, (hidden, weight))
    got = token_loss_sum(hidden, weight, None, labels)
    assert abs(got.item() - exact.item()) <= limit * exact.item()
    for a, b in zip(torch.autograd.grad(got, (hidden, weight)), wanted, strict=True):
        assert (a - b).abs().max() <= 100 * limit * b.abs().max()
    nothing = token_loss_sum(hidden, weight, None, torch.full_like(labels, -100))
    assert nothing.item() == 0
    assert not torch.autograd.grad(nothing, hidden)[0].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window must be an integer of at least 1, or null; got 0",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention are not supported"),
        ({"attention_chunk_size": 32}, "attention_chunk_size=32 is not supported"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0.1 is not supported"),
        ({"model_type": "gemma2"}, "attn_logit_softcapping"),
        ({"model_type": "gpt_oss", "num_local_experts": 2}, "has attention sinks"),
        ({"model_type": "cohere"}, "logit_scale"),
        ({"num_attention_heads": 6}, "has 6 query and 3 KV heads, the plan 9 and 3"),
    ],
)
def test_what_attention_cannot_do_is_refused_by_name(changes, message):
    model = build_model({**LLAMA, **changes}, torch.float32, seed=None)
    with pytest.raises(ValueError, match=message):
        prepare(model, PlanHolder(plan()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "lacks model_type"),
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"model_type": "t5"}, "model_type 't5'"),
    ],
)
def test_models_that_cannot_be_built_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        build_model(config, torch.float32, seed=None)


@pytest.mark.parametrize("refused", ["softcap", "s_aux", "dropout", "a mask"])
def test_what_a_layer_asks_for_is_refused_by_name(refused):
    module, x = nn.Linear(1, 1), torch.zeros(1, 9, SEQ_LEN, 8)
    module._hexiseq = PlanHolder(plan())
    attention = AttentionInterface()["hexiseq"]
    mask = torch.ones(1, 1, SEQ_LEN, SEQ_LEN) if refused == "a mask" else None
    asked = {} if refused == "a mask" else {refused: 0.5}
    with pytest.raises(ValueError, match=f"Linear: attention over a plan takes no {refused}"):
        attention(module, x, x[:, :3], x[:, :3], mask, **asked)
    with pytest.raises(ValueError, match="the window of its mask is 20, that of its attention None"):
        attention(module, x, x[:, :3], x[:, :3], 20)


def test_masks_are_refused(job):
    config = {**SIZES, "model_type": "mistral", "sliding_window": 20}
    model = build_model(config, torch.float32, seed=1)
    prepare(model, PlanHolder(plan()))
    with pytest.raises(ValueError, match="attention over a plan takes no attention_mask"):
        model(**batch(), attention_mask=torch.ones(2, SEQ_LEN))
    # A model that puts its window into the mask alone.
    attention = model.model.layers[1].self_attn
    attention.config = copy.copy(attention.config)
    attention.config.sliding_window = None
    with pytest.raises(ValueError, match="MistralAttention: the window of its mask is 20, that of its attention None"):
        model(**batch())


def test_labels_of_a_shard_are_refused(job):
    model = build_model(LLAMA, torch.float32, seed=1)
    prepare(model, PlanHolder(plan()))
    with pytest.raises(ValueError, match="pass shift_labels"):
        model(input_ids=batch()["input_ids"], labels=batch()["input_ids"])
    with pytest.raises(ValueError, match="needs num_items_in_batch"):
        model(input_ids=batch()["input_ids"], shift_labels=batch()["shift_labels"])
    with pytest.raises(ValueError, match="recompute 'some'"):
        apply_recompute(model, "some")
    with pytest.raises(ValueError, match="with recompute none a layer keeps much else"):
        apply_recompute(model, "none", offload=True)


def test_weights_export_to_a_stock_model(job, tmp_path: Path):
    model = build_model(LLAMA, torch.float32, seed=1)
    prepare(model, PlanHolder(plan()))
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True, attn_implementation="sdpa")
    assert model(**batch()).loss.item() == pytest.approx(stock_loss(stock, batch()).item(), rel=1e-6)

    loaded = load_model(str(tmp_path), LLAMA, torch.float32)
    prepare(loaded, PlanHolder(plan()))
    assert loaded(**batch()).loss == model(**batch()).loss
    with pytest.raises(ValueError, match="lack 9 of the model's parameters, such as model"):
        load_model(str(tmp_path), {**LLAMA, "num_hidden_layers": 3}, torch.float32)
    with pytest.raises(ValueError, match="do not load"):
        load_model(str(tmp_path), {**LLAMA, "intermediate_size": 64}, torch.float32)
    with pytest.raises(ValueError, match="is not a folder"):
        load_model(str(tmp_path / "none"), LLAMA, torch.float32)
