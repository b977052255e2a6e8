"""A Llama read from llama2.c files: its parts, its file, its tokenizer, and a real story."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from ray_pipe.errors import DataError
from ray_pipe.models.llama import BOS, Attention, Checkpoint, LlamaShape, RMSNorm, Tokenizer, rotary

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "stories260K"
needs_stories = pytest.mark.skipif(
    not STORIES.is_dir(), reason="stories260K does not lie in ../shared/data beside the project"
)
SHAPE = LlamaShape(layers=2, width=8, heads=4, kv_heads=2, hidden=12, vocab=10, context=6)


def a_file(path: Path, *, tied: bool = True) -> Path:
    """A llama2.c file of `SHAPE` whose n-th number is n / 1000."""
    vocab = SHAPE.vocab if tied else -SHAPE.vocab
    header = struct.pack("<7i", 8, 12, 2, 4, 2, vocab, 6)
    layer = 8 + 8 * 8 + 4 * 8 + 4 * 8 + 8 * 8 + 8 + 3 * 8 * 12
    count = 10 * 8 + 2 * layer + 8 + 2 * 6 * 1 + (0 if tied else 10 * 8)
    body = struct.pack(f"<{count}f", *(index / 1000 for index in range(count)))
    path.write_bytes(header + body)
    return path


# --- the parts ----------------------------------------------------------------------------------


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(2)

    assert torch.allclose(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[0.8485, 1.1314]]), 1e-4)


def test_the_first_pair_of_channels_turns_by_one_radian_a_position() -> None:
    cos, sin = rotary(SHAPE)

    assert cos.shape == (6, 1)
    assert torch.allclose(cos[:, 0], torch.arange(6).float().cos())
    assert torch.allclose(sin[:, 0], torch.arange(6).float().sin())


def test_rotation_makes_scores_depend_on_distance_only() -> None:
    attention = Attention(LlamaShape(**{**_fields(SHAPE), "width": 16, "context": 6}))
    q, k = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    turned_q = attention._rotate(q.expand(1, 1, 6, 4))[0, 0]
    turned_k = attention._rotate(k.expand(1, 1, 6, 4))[0, 0]

    scores = turned_q @ turned_k.T
    assert torch.allclose(scores[3, 1], scores[5, 3], atol=1e-5)
    assert not torch.allclose(scores[3, 1], scores[3, 2], atol=1e-2)


def test_each_key_head_serves_neighbouring_query_heads() -> None:
    """Against attention written out head by head."""
    torch.manual_seed(0)
    attention = Attention(SHAPE)
    x = torch.randn(1, 5, 8)
    q = attention._rotate(attention._heads(attention.query(x)))[0]
    k = attention._rotate(attention._heads(attention.key(x)))[0]
    v = attention._heads(attention.value(x))[0]
    mask = torch.full((5, 5), -torch.inf).triu(1)
    heads = [
        torch.softmax(q[head] @ k[head // 2].T / 2**0.5 + mask, dim=-1) @ v[head // 2]
        for head in range(4)
    ]

    assert torch.allclose(attention(x)[0], attention.out(torch.cat(heads, dim=-1)), atol=1e-6)


def test_no_position_sees_a_later_one() -> None:
    torch.manual_seed(0)
    attention = Attention(SHAPE)
    x = torch.randn(1, 5, 8)
    changed = x.clone()
    changed[0, 4] += 1.0

    assert torch.equal(attention(x)[0, :4], attention(changed)[0, :4])


# --- the file -----------------------------------------------------------------------------------


def test_a_file_is_read_in_the_order_of_llama2c(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(a_file(tmp_path / "model.bin"))

    assert checkpoint.shape == SHAPE
    assert checkpoint.tied
    assert checkpoint.embedding[0, 1] == pytest.approx(0.001)
    first, second = checkpoint.layers
    assert first["norm1.weight"][0] == pytest.approx(0.080)
    assert second["norm1.weight"][0] == pytest.approx(0.088)
    assert first["attention.query.weight"][0, 0] == pytest.approx(0.096)
    assert first["attention.key.weight"].shape == (4, 8)
    assert second["up.weight"][-1, -1] == pytest.approx(1.071)
    assert checkpoint.final_norm[0] == pytest.approx(1.072)


def test_embedding_and_head_ride_with_the_first_and_the_last_block(tmp_path: Path) -> None:
    blocks = Checkpoint.read(a_file(tmp_path / "model.bin")).blocks()

    assert [[type(part).__name__ for part in block.children()] for block in blocks] == [
        ["Embedding", "Block"],
        ["Block", "Head"],
    ]
    assert nn.Sequential(*blocks)(torch.tensor([[1, 2, 3]])).shape == (1, 3, 10)


def test_a_tied_head_is_a_copy_so_that_stages_share_nothing(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(a_file(tmp_path / "model.bin"))
    blocks = nn.ModuleList(checkpoint.blocks())
    pointers = [parameter.data_ptr() for parameter in blocks.parameters()]

    assert len(set(pointers)) == len(pointers) == 2 * 9 + 3
    assert torch.equal(blocks[1][1].project.weight, blocks[0][0].weight)


def test_an_untied_head_is_read_from_the_end(tmp_path: Path) -> None:
    checkpoint = Checkpoint.read(a_file(tmp_path / "model.bin", tied=False))

    assert not checkpoint.tied
    assert checkpoint.head[0, 0] == pytest.approx(1.072 + 0.008 + 0.012)


@pytest.mark.parametrize(
    ("keep", "extra", "message"),
    [
        (-4, b"", "cut short"),
        (None, b"1234", "its header accounts for"),
        (27, b"", "has 27 bytes, a llama2.c header needs 28"),
    ],
)
def test_a_file_of_the_wrong_length_is_refused(
    keep: int | None, extra: bytes, message: str, tmp_path: Path
) -> None:
    path = a_file(tmp_path / "model.bin")
    path.write_bytes(path.read_bytes()[:keep] + extra)

    with pytest.raises(DataError, match=message):
        Checkpoint.read(path)


def test_a_header_that_asks_for_a_terabyte_gets_none(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(struct.pack("<7i", 1 << 19, 1 << 19, 4, 4, 4, 512, 512) + bytes(64))

    with pytest.raises(DataError, match="cut short"):
        Checkpoint.read(path)


@given(raw=st.binary(min_size=28, max_size=200))
def test_no_bytes_make_the_reader_do_anything_but_refuse(
    raw: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.bin"
    path.write_bytes(raw)

    with pytest.raises(DataError):
        Checkpoint.read(path)


# --- the tokenizer ------------------------------------------------------------------------------


def a_tokenizer(*pieces: str) -> Tokenizer:
    """Bytes, then letters, then `pieces`, each scored below the one before."""
    table = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    letters = [letter.encode() for letter in " abcdé"]
    merged = [piece.encode() for piece in pieces]
    scores = [0.0] * len(table) + [-1e6] * len(letters) + [-float(i) for i in range(len(merged))]
    return Tokenizer(table + letters + merged, scores)


def spelled(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.pieces[index].decode() for index in tokenizer.encode(text)]


def test_the_best_scored_pair_merges_first() -> None:
    assert spelled(a_tokenizer("bc", "ab"), "abc") == [" ", "a", "bc"]
    assert spelled(a_tokenizer("ab", "bc"), "abc") == [" ", "ab", "c"]


def test_of_equal_pairs_the_left_one_merges_first() -> None:
    assert spelled(a_tokenizer("aa"), "aaa") == [" ", "aa", "a"]


def test_a_merged_piece_merges_on() -> None:
    assert spelled(a_tokenizer("ab", "cd", "abcd", " abcd"), "abcd") == [" abcd"]


def test_what_no_piece_spells_travels_as_bytes() -> None:
    tokenizer = a_tokenizer()

    assert spelled(tokenizer, "é\n") == [" ", "é", "<0x0A>"]
    assert spelled(tokenizer, "ü") == [" ", "<0xC3>", "<0xBC>"]


def test_no_text_has_no_tokens() -> None:
    assert a_tokenizer().encode("") == []


def _merged_naively(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The dull twin: look at all pairs, merge the best, begin again."""
    while True:
        best: tuple[float, int, int] | None = None
        for place in range(len(ids) - 1):
            piece = tokenizer.pieces[ids[place]] + tokenizer.pieces[ids[place + 1]]
            merged = tokenizer._id_of.get(piece)
            if merged is not None and (best is None or tokenizer.scores[merged] > best[0]):
                best = (tokenizer.scores[merged], place, merged)
        if best is None:
            return ids
        _, place, merged = best
        ids = [*ids[:place], merged, *ids[place + 2 :]]


@given(text=st.text(alphabet=" abcd", max_size=30))
def test_merging_by_heap_is_merging_by_looking_at_all_pairs(text: str) -> None:
    tokenizer = a_tokenizer("aa", "ab", "aab", " a", "cd", "bcd", "abab", "aaaa", "  ")
    letters = a_tokenizer().encode(text)

    assert tokenizer.encode(text) == _merged_naively(tokenizer, letters)


@given(text=st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    tokenizer = a_tokenizer("ab", "cd", " a")

    assert tokenizer.decode([BOS, *tokenizer.encode(text)]) == text


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tok.bin"
    path.write_bytes(struct.pack("<i", 1) + struct.pack("<fi", 0.0, 1) + b"a")

    assert Tokenizer.read(path, vocab=1).pieces == [b"a"]
    with pytest.raises(DataError, match="ends in piece 1, the model's vocabulary has 2"):
        Tokenizer.read(path, vocab=2)
    with pytest.raises(DataError, match="belongs to another model"):
        Tokenizer.read(path, vocab=0)


# --- the real one -------------------------------------------------------------------------------


@needs_stories
def test_stories260k_tells_its_story() -> None:
    checkpoint = Checkpoint.read(STORIES / "stories260K.bin")
    tokenizer = Tokenizer.read(STORIES / "tok512.bin", vocab=checkpoint.shape.vocab)
    model = nn.Sequential(*checkpoint.blocks())
    ids = [BOS]
    with torch.no_grad():
        while len(ids) < 80:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        logits = model(torch.tensor([ids[:-1]]))[0]

    assert tokenizer.decode(ids).startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the "
        "park. One day, she saw a big, red ball. She wanted to play with it, but it was too high."
    )
    assert float(functional.cross_entropy(logits, torch.tensor(ids[1:]))) < 0.5


@needs_stories
def test_a_cut_model_is_the_whole_model() -> None:
    checkpoint = Checkpoint.read(STORIES / "stories260K.bin")
    tokens = torch.arange(1, 33).view(1, 32)
    whole = nn.Sequential(*checkpoint.blocks())(tokens)
    first = nn.Sequential(*(checkpoint.block(index) for index in (0, 1)))
    second = nn.Sequential(*(checkpoint.block(index) for index in (2, 3, 4)))

    assert torch.equal(second(first(tokens)), whole)


def _fields(shape: LlamaShape) -> dict[str, int]:
    return {name: getattr(shape, name) for name in shape.__slots__}
