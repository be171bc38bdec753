"""The small transformer: padding takes no part, texts are distinguished, and rounds are as ever."""

import pytest
import torch
from torch import nn

import fedaccord
from fedaccord.task import TaskConfig, load_task
from fedaccord.task.models import build
from fedaccord.task.transformer import Transformer

WORDS = {"0": "bad awful poor", "1": "good fine lovely"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 rows of 3 words of their class, of two sites."""
    generator = torch.Generator().manual_seed(0)
    lines = ["text,label,client"]
    for i in range(40):
        words = WORDS[str(i % 2)].split()
        indices = torch.randint(3, (3,), generator=generator).tolist()
        lines.append(f"{' '.join(words[k] for k in indices)},{i % 2},{i % 3 == 0}")
    path = tmp_path_factory.mktemp("texts") / "all.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_padding_takes_no_part() -> None:
    model = build("transformer", (8,), 3, vocabulary=20).double()
    tokens = torch.tensor([[5, 6, 7, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]])
    scores = model(tokens)
    assert torch.allclose(model(tokens[:1, :3]), scores[:1], rtol=1e-12)
    assert torch.allclose(model(tokens[:1, :5]), scores[:1], rtol=1e-12)
    other = tokens.clone()
    other[0, 2] = 9
    assert not torch.allclose(model(other)[0], scores[0], rtol=1e-3)
    assert torch.equal(model(other)[1], scores[1])


def test_the_order_of_tokens_counts_and_an_empty_text_has_scores() -> None:
    model = build("transformer", (4,), 2, vocabulary=9).double()
    scores = model(torch.tensor([[1, 2, 3, 0], [3, 2, 1, 0], [0, 0, 0, 0]]))
    assert scores.isfinite().all()
    assert not torch.allclose(scores[0], scores[1], rtol=1e-3)
    scores.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_its_layers_are_pytorchs() -> None:
    """Of four heads, norms first, GELU; then the mean over the tokens of the normed outputs."""
    torch.manual_seed(0)
    model = build("transformer", (6,), 3, vocabulary=9).double()
    assert isinstance(model, Transformer)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]])
    x = model.embedding(tokens) + model.position_embedding.weight
    for own in model.layers:
        settings = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(64, 4, 128, **settings).double()  # type: ignore[arg-type]
        theirs = layer.state_dict()
        names = {
            **{"norm_attention": "norm1", "norm_dense": "norm2", "merge": "self_attn.out_proj"},
            **{"query_key_value": "self_attn.in_proj", "dense.0": "linear1", "dense.2": "linear2"},
        }
        for key, value in own.state_dict().items():
            part, _, kind = key.rpartition(".")
            theirs[f"{names[part]}{'_' if part[0] == 'q' else '.'}{kind}"].copy_(value)
        x = layer(x, src_key_padding_mask=tokens == 0)
    means = torch.stack([rows[:n].mean(0) for rows, n in zip(model.norm(x), (6, 2), strict=True)])
    torch.testing.assert_close(model(tokens), model.head(means), rtol=1e-10, atol=1e-10)


def test_its_parameters_are_counted() -> None:
    """257 + 16 rows of 64; two layers of 3 + 1 attention and 2 + 2 dense blocks of 64 x 64."""
    tables = (257 + 16) * 64
    layer = 8 * 64 * 64 + (3 + 1 + 2 + 1) * 64 + 2 * 2 * 64
    model = build("transformer", (16,), 4, vocabulary=257)
    assert isinstance(model, Transformer)
    assert sum(p.numel() for p in model.parameters()) == tables + 2 * layer + 2 * 64 + 4 * 65


@pytest.mark.parametrize(
    ("name", "vocabulary", "line"),
    [
        ("transformer", 0, "^model: expected one of linear, .*, for images or features, got 'tran"),
        ("mlp", 9, "^model: expected one of transformer, or .*, for tokens, .*; integers are to"),
    ],
)
def test_models_are_for_their_kind_of_samples(name: str, vocabulary: int, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        build(name, (4,), 2, vocabulary=vocabulary)


def test_tokens_stay_integers_up_to_the_model(texts: str) -> None:
    config = TaskConfig(
        dataset="text", data_dir=texts, model="transformer", partition="natural", max_length=16
    )
    task = load_task(config, num_clients=2)
    assert [task.num_examples(i) for i in range(2)] == [21, 11]
    for batch in (
        *task.train_batches(0, 0, 4, 0, torch.float64),
        *task.batches(task.test, torch.float64),
    ):
        assert [part.dtype for part in batch] == [torch.int64] * 2
    assert task.card["arguments"] == {"shape": [16], "classes": 2, "vocabulary": 257}


@pytest.mark.parametrize("vectorize", ["off", "on"])
def test_it_learns(texts: str, vectorize: str) -> None:
    history = fedaccord.simulate(
        "fedavg",
        dataset="text",
        data_dir=texts,
        model="transformer",
        partition="iid",
        max_length=20,
        num_clients=4,
        participation=1.0,
        rounds=4,
        local_epochs=4,
        batch_size=4,
        lr=0.003,
        optimizer="adamw",
        metrics="accuracy, f1, perplexity",
        vectorize=vectorize,
        threads=1,
    )
    last = history.metrics.iloc[-1]
    assert last["test-accuracy"] == last["test-f1"] == 1.0
    assert last["test-perplexity"] == pytest.approx(
        float(torch.tensor(last["test-loss"]).exp()), rel=1e-5
    )


def test_a_text_is_the_same_in_float64_and_vectorized(texts: str) -> None:
    """Clients in one call take the steps that they take one at a time."""
    settings = {
        "dataset": "text",
        "data_dir": texts,
        "model": "transformer",
        "partition": "iid",
        "max_length": 12,
        "num_clients": 3,
        "participation": 1.0,
        "rounds": 2,
        "local_steps": 3,
        "batch_size": 4,
        "dtype": torch.float64,
        "threads": 1,
    }
    one, many = (
        fedaccord.simulate("scaffold", vectorize=v, **settings).model for v in ("off", "on")
    )
    for name, tensor in one.items():
        assert torch.allclose(tensor, many[name], rtol=1e-9, atol=1e-12), name
