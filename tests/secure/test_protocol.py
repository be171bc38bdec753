"""Masks and the four stages: what a sum is, whom it may lose, and what the server can see."""

import base64
import contextlib
import hmac
import random
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedaccord.compat.crypto import combine_shares, create_shares, encrypt
from fedaccord.core.privacy import Masking
from fedaccord.secure import client, masks
from fedaccord.secure.server import SecureRound, SumFailedError, regular_graph

SIZE = 300
LATE, PLAIN_STAGES = "late", (client.SETUP, client.SHARE, client.UNMASK)


def test_the_primitives_give_known_answers() -> None:
    """HKDF: RFC 5869, A.1. AES-256-CTR: NIST SP 800-38A, F.5.5. ECDH on P-256: RFC 5903, 8.1."""
    hkdf = HKDF(hashes.SHA256(), 42, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert hkdf.derive(b"\x0b" * 22).hex().startswith("3cb25f25faacd57a90434f64d0362f2a2d2d0a90")
    key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
    counter = bytes(range(0xF0, 0x100))
    cipher = Cipher(algorithms.AES(bytes.fromhex(key)), modes.CTR(counter)).encryptor()
    block = cipher.update(bytes.fromhex("6bc1bee22e409f96e93d7e117393172a"))
    assert block.hex() == "601ec313775789a5b7a7f504bbf3d228"
    i = bytes.fromhex("c88f01f510d9ac3f70a292daa2316de544e9aab8afe84049c62a9c57862d1433")
    r = bytes.fromhex("c6ef9c5d78ae012a011164acb397ce2088685d8f06bf9be0b283ab46476bee53")
    secret = "d6840f6b42f6edafd13116e0e12565202fef8e9ece7dce03812464d04b9442de"
    agreement = masks._private(i).exchange(ec.ECDH(), masks._private(r).public_key())
    assert agreement.hex() == secret
    derived = HKDF(hashes.SHA256(), 32, None, None).derive(bytes.fromhex(secret))
    assert masks.shared_key(i, masks.public_key(r)) == base64.urlsafe_b64encode(derived)
    assert masks.shared_key(r, masks.public_key(i)) == masks.shared_key(i, masks.public_key(r))


def test_shares_give_a_known_secret() -> None:
    """A secret that the program ssss split among five, of whom three are enough; then padding, a
    constant, whose shares are itself. The polynomials of ssss have a term x^3 more."""
    parts = {
        1: 0xD6515A3905CD755119B86E311C801E31 ^ 0b1,
        4: 0x3FE8878DC4A5D35811CF3CBCD33DBE52 ^ 0b1000000,
        5: 0xAD76F92FA9D0A9C4CA0C1533AF7F6132 ^ 0b1010101,
    }
    padding = bytes([16] * 16)
    shares = [i.to_bytes(4, "little") + y.to_bytes(16, "big") + padding for i, y in parts.items()]
    assert combine_shares(shares).hex() == "44cf249b68b80fcdc27b47be60c2c145"


def test_shares_are_sealed_as_fernet_specifies() -> None:
    """0x80, time, iv, AES-128-CBC under the key's second half, HMAC-SHA256 under its first."""
    key, text = bytes(range(32)), b"shares of a secret"
    token = base64.urlsafe_b64decode(encrypt(base64.urlsafe_b64encode(key), text))
    assert token[0] == 0x80
    mac = hmac.new(key[:16], token[:-32], "sha256").digest()
    assert token[-32:] == mac
    cipher = Cipher(algorithms.AES(key[16:]), modes.CBC(token[9:25])).decryptor()
    assert cipher.update(token[25:-32]) == text + bytes([14] * 14)


def test_a_mask_is_the_key_stream_of_its_seed() -> None:
    seed = bytes(range(32))
    key = HKDF(hashes.SHA256(), 48, None, b"fedaccord secure sum mask").derive(seed)
    cipher = Cipher(algorithms.AES(key[:32]), modes.CTR(key[32:])).encryptor()
    stream = cipher.update(bytes(40))
    assert masks.expand(seed, 10, 32).tobytes() == stream
    assert masks.expand(seed, 5, 64).tobytes() == stream
    with pytest.raises(ValueError, match="a seed of 32 bytes, got 4"):
        masks.expand(seed[:4], 10, 32)


def test_every_bit_of_a_seed_changes_the_mask() -> None:
    seed = int.from_bytes(bytes(range(32)), "big")
    flipped = [seed] + [seed ^ (1 << bit) for bit in range(256)]
    streams = {masks.expand(s.to_bytes(32, "big"), 4, 32).tobytes() for s in flipped}
    assert len(streams) == 257


def test_masks_are_uniform() -> None:
    """Each of 16 ranges has its share of 2^18 numbers, to 5 deviations."""
    n = 2**18
    for word in (32, 64):
        top = masks.expand(b"s" * 32, n, word) >> masks.WORDS[word].type(word - 4)
        counts = np.bincount(top.astype(int), minlength=16)
        assert np.abs(counts - n / 16).max() < 5 * np.sqrt(n / 16 * 15 / 16)


def test_shares_below_the_threshold_do_not_make_the_secret() -> None:
    shares = create_shares(b"x" * 32, 3, 5)
    assert all(len(share) == client.SHARE_SIZE for share in shares)
    assert combine_shares([shares[4], shares[0], shares[2]]) == b"x" * 32
    with contextlib.suppress(ValueError):
        assert combine_shares(shares[:2]) != b"x" * 32


def test_the_graph_is_regular_symmetric_and_random() -> None:
    graph = regular_graph(range(30), 6)
    assert all(len({*near}) == 6 and i not in near for i, near in graph.items())
    assert all(i in graph[j] for i, near in graph.items() for j in near)
    assert regular_graph(range(30), 6) != graph
    assert regular_graph([1, 4, 9], 20) == {1: [4, 9], 4: [1, 9], 9: [1, 4]}


def numbers(n: int, bits: int = 24) -> dict[int, Any]:
    """Uploads in plain, of n clients."""
    values = np.random.default_rng(0)
    return {i: values.integers(0, 2**bits, SIZE) for i in range(n)}


def protocol(
    n: int = 6,
    lost: dict[int, str] | None = None,
    degree: int = 20,
    bits: int = 24,
    transcript: dict[str, dict[int, Any]] | None = None,
    spoil: Callable[[str, int, dict[str, Any]], None] = lambda stage, i, answer: None,
) -> tuple[dict[int, Any], Any]:
    """(uploads in plain of those in the sum, the sum); lost: client -> stage to which it does not
    answer; transcript: stage -> every answer that the server gets, too late ones under LATE."""
    lost, plain = lost or {}, numbers(n, bits)
    transcript = {} if transcript is None else transcript
    secure = SecureRound(range(n), *Masking(bits, degree, 0.6))
    memories: dict[int, Any] = {i: {} for i in range(n)}

    def ask(payloads: Any) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for i, payload in payloads.items():
            if lost.get(i) != payload["stage"]:
                answers[i], memories[i] = client.answer(payload, memories[i])
                spoil(payload["stage"], i, answers[i])
                transcript.setdefault(payload["stage"], {})[i] = answers[i]
        return answers

    shares = secure.shares(ask(secure.setup()))
    uploads: dict[int, Any] = {}
    for i, payload in secure.masked(ask(shares)).items():
        memories[i] = client.open_shares(payload, memories[i])
        is_late = lost.get(i) == client.MASKED
        target = transcript.setdefault(LATE, {}) if is_late else uploads
        target[i] = client.add_masks(plain[i], memories[i])
    transcript[client.MASKED] = uploads
    payloads = secure.unmask({i: memories[i]["senders"] for i in uploads})
    uploads = {i: uploads[i] for i in payloads}
    total = secure.total(uploads, ask(payloads))
    return {i: plain[i] for i in uploads}, total


STAGES = (client.SETUP, client.SHARE, client.MASKED, client.UNMASK)
PATTERNS = [*combinations_with_replacement((None, *STAGES), 5)]  # the fates of five clients


@pytest.mark.parametrize("lost", [{}, *({3: stage} for stage in STAGES), dict(enumerate(STAGES))])
def test_the_sum_is_that_of_the_uploads_whoever_is_lost(lost: dict[int, str]) -> None:
    """Twelve clients with eight neighbours each: of nine holders six are left."""
    plain, total = protocol(12, lost, degree=8)
    assert {*plain} == {i for i in range(12) if lost.get(i) in (None, client.UNMASK)}
    assert np.array_equal(total, sum(plain.values()))


def test_many_bits_are_summed_in_64() -> None:
    plain, total = protocol(4, bits=48)
    assert np.array_equal(total, sum(plain.values()))


@pytest.mark.parametrize(
    ("n", "bits", "word"), [(3, 30, 32), (4, 30, 32), (5, 30, 64), (3, 31, 64), (2, 31, 32)]
)
def test_a_word_holds_the_largest_sum(n: int, bits: int, word: int) -> None:
    secure = SecureRound(range(n), *Masking(bits, 20, 0.6))
    assert secure.word == word
    assert n * (2**bits - 1) < 2**word


def test_all_patterns_of_lost_clients() -> None:
    """A sum if enough remain at each stage, of those whose uploads came; else one line."""
    for k, fates in enumerate(PATTERNS):
        lost = dict(zip(random.Random(k).sample(range(5), 5), fates, strict=True))
        counts = [sum(fate in STAGES[: at + 1] for fate in fates) for at in range(4)]
        least = (3, 3, 3, 2 if counts[0] == 2 else 3)  # shares of 3 holders: 2 are enough
        few = [stage for stage, n, m in zip(STAGES, counts, least, strict=True) if 5 - n < m]
        if few:
            with pytest.raises(SumFailedError, match=f"the stage {few[0]}, got") as error:
                protocol(5, lost)
            assert "\n" not in str(error.value)
            continue
        plain, total = protocol(5, lost)
        assert {*plain} == {i for i, fate in lost.items() if fate in (None, client.UNMASK)}
        assert np.array_equal(total, sum(plain.values()))


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (client.SETUP, "at least 3 clients after the stage setup, got 2"),
        (client.SHARE, "at least 3 clients after the stage share, got 2"),
        (client.MASKED, "at least 3 clients after the stage masked, got 2"),
        (client.UNMASK, "expected 3 of the 5 shares of client 0 at the stage unmask, got 2"),
    ],
)
def test_too_many_lost_clients_are_one_line(stage: str, line: str) -> None:
    with pytest.raises(SumFailedError, match=line):
        protocol(5, dict.fromkeys((1, 2, 3), stage))
    plain, total = protocol(5, dict.fromkeys((1, 2), stage))
    assert np.array_equal(total, sum(plain.values()))


@pytest.mark.parametrize("stage", [client.SHARE, client.MASKED])
def test_too_small_neighbourhoods_are_one_line_before_clients_refuse(stage: str) -> None:
    line = f"at least 4 of the 6 clients of a neighbourhood after the stage {stage}, got 3"
    with pytest.raises(SumFailedError, match=line):
        protocol(6, dict.fromkeys((1, 2, 4), stage))


def assert_hidden(y: Any, plain: Any) -> None:
    """Uniform over 32 bits, and nowhere the plain number, which is below 2^24."""
    assert not (y == plain).any()
    assert abs(y.astype(np.float64).mean() / 2**32 - 0.5) < 5 * np.sqrt(1 / 12 / SIZE)
    assert (y < 2**24).sum() < 10


def test_what_the_server_sees() -> None:
    """In no answer is an upload, and one secret of each client, at most: what it takes off is not
    all that hides the upload."""
    plain, answers = numbers(6), dict[str, dict[int, Any]]()
    protocol(6, {5: client.MASKED}, transcript=answers)
    kinds = {stage: {frozenset(it) for it in answers[stage].values()} for stage in PLAIN_STAGES}
    assert kinds == {
        client.SETUP: {frozenset({"cipher-key", "mask-key"})},
        client.SHARE: {frozenset({"receivers", "sealed", "digest"})},
        client.UNMASK: {frozenset({"seeds", "keys"})},
    }
    active, seeds = range(5), set[bytes]()
    for i in active:  # of the five active clients a share of the seed, of the lost one of its key
        answer = answers[client.UNMASK][i]
        assert [len(answer["seeds"]), len(answer["keys"])] == [5, 1]
        assert_hidden(answers[client.MASKED][i], plain[i])
        order = {j: [j, *(k for k in active if k != j)] for j in active}
        shares = [answers[client.UNMASK][j]["seeds"][order[j].index(i)] for j in active]
        seeds.add(seed := combine_shares(shares[:4]))
        assert_hidden(answers[client.MASKED][i] - masks.expand(seed, SIZE, 32), plain[i])
    assert len(seeds) == 5
    key = combine_shares([answers[client.UNMASK][j]["keys"][0] for j in active][:4])
    late = answers[LATE][5]  # an upload that comes after its masks were taken off
    assert_hidden(late, plain[5])
    for i in active:
        late -= masks.pair_mask(key, answers[client.SETUP][i]["mask-key"], 5, i, SIZE, 32)
    assert_hidden(late, plain[5])


def test_a_client_refuses_what_would_reveal_its_upload() -> None:
    secure = SecureRound(range(3), *Masking(24, 20, 0.6))
    memories: dict[int, Any] = {}
    keys: dict[int, Any] = {}
    for i, payload in secure.setup().items():
        keys[i], memories[i] = client.answer(payload, {})
    shares: dict[int, Any] = {}
    payloads = secure.shares(keys)
    for threshold in (1, 4):
        line = f"more than half of 3 and at most all, got {threshold}"
        with pytest.raises(ValueError, match=line):
            client.answer({**payloads[0], "threshold": threshold}, memories[0])
    for near in ([1, 1], [0, 1]):
        with pytest.raises(ValueError, match="other clients as neighbours"):
            client.answer({**payloads[0], "neighbours": near}, memories[0])
    for near in ([], [1]):
        alone = {name: payloads[0][name][: len(near)] for name in ("cipher-keys", "mask-keys")}
        few = {**payloads[0], **alone, "neighbours": near, "threshold": len(near) + 1}
        with pytest.raises(ValueError, match=f"at least 2 neighbours, got {len(near)}"):
            client.answer(few, memories[0])
    same = {"mask-keys": payloads[0]["cipher-keys"]}
    with pytest.raises(ValueError, match="two distinct keys from each"):
        client.answer({**payloads[0], **same}, memories[0])
    for name in ("cipher-keys", "mask-keys"):  # no point of the curve, and no bytes
        for other, line in ((bytes(33), "point"), ("x", "a public key, got a str")):
            keys_of = [other, *payloads[0][name][1:]]
            with pytest.raises(ValueError, match=line):
                client.answer({**payloads[0], name: keys_of}, memories[0])
    for i, payload in payloads.items():
        shares[i], memories[i] = client.answer(payload, memories[i])
    forward = secure.masked(shares)
    wrong = {**forward[0], "sealed": forward[0]["sealed"][::-1]}
    with pytest.raises(ValueError, match="shares of at least 1 neighbours, got 0"):
        client.open_shares(wrong, memories[0])
    own = {**forward[0], "sealed": shares[0]["sealed"]}  # a pair has one key
    with pytest.raises(ValueError, match="shares of at least 1 neighbours, got 0"):
        client.open_shares(own, memories[0])
    for strange in ({"senders": [1, 1]}, {"senders": [1, 7]}, {"word": 8}):
        with pytest.raises(ValueError, match="shares of neighbours, each once"):
            client.open_shares({**forward[0], **strange}, memories[0])
    memory = client.open_shares(forward[0], memories[0])
    with pytest.raises(ValueError, match="a message arrived twice"):
        client.open_shares(forward[0], memory)  # a second upload under the same masks
    unmask = secure.unmask({i: secure.senders[i] for i in range(3)})[0]
    with pytest.raises(ValueError, match="either active or lost"):
        client.answer({**unmask, "lost": [1]}, memory)
    with pytest.raises(ValueError, match="either active or lost"):
        client.answer({**unmask, "active": [1, 2], "lost": [0]}, memory)
    with pytest.raises(ValueError, match="at least 2 active"):
        client.answer({**unmask, "active": [0], "lost": [1, 2]}, memory)
    with pytest.raises(ValueError, match="at least 3 active"):
        client.answer({**unmask, "active": [0, 1], "lost": [2]}, {**memory, "threshold": 3})
    with pytest.raises(ValueError, match="current round"):
        client.answer({**unmask, "nonce": b"0" * 16}, memory)
    _, after = client.answer(unmask, memory)
    with pytest.raises(ValueError, match="current round"):
        client.answer(unmask, after)


@pytest.mark.parametrize(
    ("holders", "share", "needed"),
    [(4, 0.5, 3), (5, 0.5, 3), (5, 0.6, 3), (25, 0.56, 14), (10, 0.61, 7), (10, 1.0, 10)],
)
def test_more_than_half_of_the_holders_are_needed(holders: int, share: float, needed: int) -> None:
    secure = SecureRound(range(holders), *Masking(24, 24, share))
    secure.graph = regular_graph(range(holders), 24)
    assert secure.threshold(0) == needed


def test_clients_that_share_no_masks_are_not_summed() -> None:
    """Each triangle's sum would be known."""
    secure = SecureRound(range(6), *Masking(24, 2, 0.6))
    pairs = {i: [j for j in range(6) if j % 2 == i % 2 and j != i] for i in range(6)}
    secure.graph = secure.senders = pairs
    with pytest.raises(SumFailedError, match="no longer connected"):
        secure.unmask(pairs)
    secure.unmask({i: pairs[i] for i in (0, 2, 4)})


@pytest.mark.parametrize(("wrong", "lost"), [({1}, 7), ({2}, None), ({4, 5, 6}, None)])
def test_wrong_shares_of_some_are_left_out(wrong: set[int], lost: int | None) -> None:
    """Of eight holders five are needed; such a share is one of another polynomial."""

    def spoil(stage: str, i: int, answer: dict[str, Any]) -> None:
        if stage == client.UNMASK and i in wrong:
            for shares in answer.values():
                shares[:] = [s[:20] + bytes(16) + s[36:] for s in shares]

    stages = {} if lost is None else {lost: client.MASKED}
    plain, total = protocol(8, stages, spoil=spoil)
    assert {*plain} == {*range(8)} - {*stages}
    assert np.array_equal(total, sum(plain.values()))


@pytest.mark.parametrize("stage", [client.MASKED, client.UNMASK])
def test_wrong_shares_fail_the_sum_if_no_others_are_left(stage: str) -> None:
    """Of the seed of a client, and of the mask key of one that was lost before."""

    def spoil(at: str, i: int, answer: dict[str, Any]) -> None:
        if at == client.UNMASK and i == 0:
            for shares in answer.values():
                shares[:] = [bytes(client.SHARE_SIZE)] * len(shares)

    with pytest.raises(SumFailedError, match=r"the shares of client \d do not give its secret"):
        protocol(5, dict.fromkeys((3, 4), stage), spoil=spoil)


@pytest.mark.parametrize("receivers", [1, 2, 7])
def test_a_client_whose_shares_are_unreadable_for_others_is_not_summed(receivers: int) -> None:
    """For one of its seven neighbours, two, or all: masks with those that read them are removed."""

    def spoil(stage: str, i: int, answer: dict[str, Any]) -> None:
        if stage == client.SHARE and i == 3:
            answer["sealed"][:receivers] = [b"garbage"] * receivers

    plain, total = protocol(8, spoil=spoil)
    assert {*plain} == {*range(8)} - {3}
    assert np.array_equal(total, sum(plain.values()))


@pytest.mark.parametrize(
    ("stage", "field", "value"),
    [
        *((client.SETUP, name, b"no point") for name in ("cipher-key", "mask-key")),
        *((client.SETUP, name, 7) for name in ("cipher-key", "mask-key")),
        (client.SHARE, "receivers", [*range(7)]),
        (client.SHARE, "sealed", [b"garbage"]),
        (client.UNMASK, "seeds", [b""] * 8),
        (client.UNMASK, "keys", 7),
    ],
)
def test_an_answer_that_cannot_be_used_is_none(stage: str, field: str, value: Any) -> None:
    def spoil(at: str, i: int, answer: dict[str, Any]) -> None:
        if at == stage and i == 3:
            answer[field] = value

    plain, total = protocol(8, spoil=spoil)
    assert {*plain} == {*range(8)} - ({3} if stage != client.UNMASK else set())
    assert np.array_equal(total, sum(plain.values()))


@pytest.mark.parametrize("stage", PLAIN_STAGES)
def test_an_incomplete_message_is_one_line(stage: str) -> None:
    nonce: dict[str, Any] = {} if stage == client.SETUP else {"nonce": b"n" * client.NONCE}
    memory = {"next": stage, "client": 0, "senders": [], **nonce}
    line = r"^secure-sum: expected a complete message, got none: '[a-z]+'$"
    with pytest.raises(ValueError, match=line):
        client.answer({"stage": stage, **nonce}, memory)


@pytest.mark.parametrize(
    ("lost", "more"),
    [({}, 2**30), ({4: client.SHARE}, 2**21)],  # the second: beyond the sum of four, not of five
)
def test_wrong_uploads_fail_the_sum(
    lost: dict[int, str], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = client.add_masks
    monkeypatch.setattr(client, "add_masks", lambda q, memory: right(q, memory) + np.uint32(more))
    with pytest.raises(SumFailedError, match="outside its range"):
        protocol(5, lost)
