"""Masks and the four stages: what a sum is, whom it may lose, and what the server can see."""

import base64
import contextlib
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedaccord.compat.secure_aggregation import combine_shares, create_shares
from fedaccord.secure import client, masks
from fedaccord.secure.server import SecureRound, SumFailedError, regular_graph

SIZE = 300


def test_the_primitives_give_known_answers() -> None:
    """HKDF: RFC 5869, A.1. AES-256-CTR: NIST SP 800-38A, F.5.5. ECDH on P-256: RFC 5903, 8.1."""
    made = HKDF(hashes.SHA256(), 42, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert made.derive(b"\x0b" * 22).hex().startswith("3cb25f25faacd57a90434f64d0362f2a2d2d0a90")
    key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
    counter = bytes(range(0xF0, 0x100))
    cipher = Cipher(algorithms.AES(bytes.fromhex(key)), modes.CTR(counter)).encryptor()
    block = cipher.update(bytes.fromhex("6bc1bee22e409f96e93d7e117393172a"))
    assert block.hex() == "601ec313775789a5b7a7f504bbf3d228"
    i = bytes.fromhex("c88f01f510d9ac3f70a292daa2316de544e9aab8afe84049c62a9c57862d1433")
    r = bytes.fromhex("c6ef9c5d78ae012a011164acb397ce2088685d8f06bf9be0b283ab46476bee53")
    shared = "d6840f6b42f6edafd13116e0e12565202fef8e9ece7dce03812464d04b9442de"
    found = masks._private(i).exchange(ec.ECDH(), masks._private(r).public_key())
    assert found.hex() == shared
    derived = HKDF(hashes.SHA256(), 32, None, None).derive(bytes.fromhex(shared))
    assert masks.agreed(i, masks.public_key(r)) == base64.urlsafe_b64encode(derived)
    assert masks.agreed(r, masks.public_key(i)) == masks.agreed(i, masks.public_key(r))


def test_a_mask_is_the_key_stream_of_its_seed() -> None:
    seed = bytes(range(32))
    made = HKDF(hashes.SHA256(), 48, None, b"fedaccord secure sum mask").derive(seed)
    cipher = Cipher(algorithms.AES(made[:32]), modes.CTR(made[32:])).encryptor()
    stream = cipher.update(bytes(40))
    assert masks.expand(seed, 10, 32).tobytes() == stream
    assert masks.expand(seed, 5, 64).tobytes() == stream
    with pytest.raises(ValueError, match="a seed of 32 bytes, got 4"):
        masks.expand(seed[:4], 10, 32)


def test_every_bit_of_a_seed_changes_the_mask() -> None:
    seed = int.from_bytes(bytes(range(32)), "big")
    flipped = [seed] + [seed ^ (1 << bit) for bit in range(256)]
    found = {masks.expand(s.to_bytes(32, "big"), 4, 32).tobytes() for s in flipped}
    assert len(found) == 257


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


def protocol(
    n: int = 6,
    lost: dict[int, str] | None = None,
    degree: int = 20,
    word_bits: int = 24,
    seen: list[Any] | None = None,
) -> tuple[dict[int, Any], Any]:
    """(uploads in plain of those in the sum, the sum); lost: client -> stage to which it does not
    answer; seen: every answer that the server gets."""
    lost, values = lost or {}, np.random.default_rng(0)
    plain = {i: values.integers(0, 2**word_bits, SIZE) for i in range(n)}
    server = SecureRound(range(n), word_bits, degree, 0.6)
    memories: dict[int, Any] = {i: {} for i in range(n)}

    def ask(payloads: Any) -> dict[int, Any]:
        answers: dict[int, Any] = {}
        for i, payload in payloads.items():
            if lost.get(i) != payload["stage"]:
                answers[i], memories[i] = client.answer(payload, memories[i])
        if seen is not None:
            seen.extend(answers.values())
        return answers

    shares = server.shares(ask(server.setup()))
    uploads = {}
    for i, payload in server.masked(ask(shares)).items():
        if lost.get(i) != client.MASKED:
            memories[i] = client.opened(payload, memories[i])
            uploads[i] = client.masked(plain[i], memories[i])
    if seen is not None:
        seen.append(uploads)
    total = server.total(uploads, ask(server.unmask([*uploads])))
    return {i: plain[i] for i in uploads}, total


STAGES = (client.SETUP, client.SHARE, client.MASKED, client.UNMASK)


@pytest.mark.parametrize("degree", [8, 20])  # 8: of nine holders six are left
@pytest.mark.parametrize("lost", [{}, *({3: stage} for stage in STAGES), dict(enumerate(STAGES))])
def test_the_sum_is_that_of_the_uploads_whoever_is_lost(lost: dict[int, str], degree: int) -> None:
    plain, total = protocol(12, lost, degree)
    assert {*plain} == {i for i in range(12) if lost.get(i) in (None, client.UNMASK)}
    assert np.array_equal(total, sum(plain.values()))


def test_many_bits_are_summed_in_64() -> None:
    plain, total = protocol(4, word_bits=48)
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


def test_what_the_server_sees() -> None:
    """In no answer is a client's seed, key or upload; uploads are uniform, also where two clients
    have the same plain numbers."""
    seen: list[Any] = []
    plain, _ = protocol(6, {5: client.MASKED}, seen=seen)
    uploads = seen[-2] if isinstance(seen[-2], dict) and 0 in seen[-2] else None
    uploads = next(it for it in seen if 0 in it) if uploads is None else uploads
    values = np.concatenate([*uploads.values()]).astype(np.float64) / 2**32
    assert abs(values.mean() - 0.5) < 5 * np.sqrt(1 / 12 / len(values))
    assert abs((values < 1 / 256).mean() - 1 / 256) < 5 * np.sqrt(1 / 256 / len(values))
    for i, y in uploads.items():
        assert not np.isin(y - plain[i], 0).any()
        others = [uploads[j] for j in uploads if j != i]
        assert all(not np.array_equal(y, z) for z in others)
    answers = [it for it in seen if 0 not in it]
    kinds = {frozenset(it) for it in answers}
    assert kinds == {
        frozenset({"cipher-key", "mask-key"}),
        frozenset({"receivers", "sealed"}),
        frozenset({"seeds", "keys"}),
    }
    for found in answers:
        if "seeds" in found:  # of the five active clients a seed's share each, of the lost its key
            assert [len(found["seeds"]), len(found["keys"])] == [5, 1]


def test_a_client_refuses_what_would_reveal_its_upload() -> None:
    server = SecureRound(range(3), 24, 20, 0.6)
    memories: dict[int, Any] = {}
    keys: dict[int, Any] = {}
    for i, payload in server.setup().items():
        keys[i], memories[i] = client.answer(payload, {})
    shares: dict[int, Any] = {}
    asked = server.shares(keys)
    with pytest.raises(ValueError, match="more than half of 3"):
        client.answer({**asked[0], "threshold": 1}, memories[0])
    for i, payload in asked.items():
        shares[i], memories[i] = client.answer(payload, memories[i])
    forward = server.masked(shares)
    wrong = {**forward[0], "sealed": forward[0]["sealed"][::-1]}
    with pytest.raises(ValueError, match="are not its own"):
        client.opened(wrong, memories[0])
    opened = client.opened(forward[0], memories[0])
    with pytest.raises(ValueError, match="a message came twice"):
        client.opened(forward[0], opened)  # a second upload under the same masks
    unmask = server.unmask([0, 1, 2])[0]
    with pytest.raises(ValueError, match="either active or lost"):
        client.answer({**unmask, "lost": [1]}, opened)
    with pytest.raises(ValueError, match="at least 2 active"):
        client.answer({**unmask, "active": [0], "lost": [1, 2]}, opened)
    with pytest.raises(ValueError, match="current round"):
        client.answer({**unmask, "nonce": b"0" * 16}, opened)
    _, after = client.answer(unmask, opened)
    with pytest.raises(ValueError, match="current round"):
        client.answer(unmask, after)


def test_a_wrong_upload_fails_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    right = client.masked
    monkeypatch.setattr(client, "masked", lambda q, kept: right(q, kept) + np.uint32(2**30))
    with pytest.raises(SumFailedError, match="outside its range"):
        protocol(5)
