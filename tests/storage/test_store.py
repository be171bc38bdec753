"""What a client remembers, and how it is stored in its Context beside other records."""

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.common.serde import context_from_proto, context_to_proto
from torch import Tensor

from fedaccord.core.client_half import ClientHalf
from fedaccord.core.request import TrainInstruction
from fedaccord.core.rule import LocalRule, Stateless
from fedaccord.plugins.relaxed_init import RelaxedInit
from fedaccord.storage import store
from fedaccord.storage.store import (
    Memory,
    MissingStateError,
    Version,
    memory_after,
    packed_before,
)
from fedaccord.strategies.fedavg import FedAvgClient
from fedaccord.strategies.feddyn import FedDynClient
from fedaccord.wire.records import pack, unpack_state


class Inner(NamedTuple):
    c_i: Tensor


class State(NamedTuple):
    last: Tensor
    base: Inner
    none: Stateless
    later: Tensor | None = None


NOTHING = torch.empty(0)
LIKE = State(NOTHING, Inner(NOTHING), Stateless())


def vector(dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    return torch.arange(start, start + 6, dtype=dtype) / 7


def context(**more: Any) -> Context:
    plain: dict[str, Any] = {"run_id": 1, "node_id": 2, "node_config": {}, "run_config": {}}
    return Context(**{**plain, "state": RecordDict(), **more})


def through_protobuf(own: Context) -> Context:
    message = context_to_proto(own)
    return context_from_proto(type(message).FromString(message.SerializeToString()))


def packed(round: int, state: Any) -> Version:
    return Version(round, pack(state))


# --- in a Context ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("later", [False, True])
def test_a_nested_state_survives(dtype: torch.dtype, later: bool) -> None:
    own, x = context(), vector(dtype)
    state = State(x, Inner(vector(dtype, start=2)), Stateless(), x if later else None)
    assert store.ContextStore(own).load(2) is None
    store.ContextStore(own).save(2, Memory(packed(7, state), attempt=3))
    for each in (own, through_protobuf(own), pickle.loads(pickle.dumps(own))):
        memory = store.ContextStore(each).load(2)
        assert memory is not None
        assert (memory.latest.round, memory.before, memory.attempt) == (7, None, 3)
        copy = unpack_state(LIKE, memory.latest.state)
        assert type(copy) is State
        assert type(copy.base) is Inner
        assert copy.none == Stateless()
        assert torch.equal(copy.last, state.last)
        assert torch.equal(copy.base.c_i, state.base.c_i)
        assert (copy.later is None) == (not later)


def test_a_state_without_vectors_is_a_state() -> None:
    own = context()
    store.ContextStore(own).save(2, Memory(packed(0, Stateless())))
    for each in (own, through_protobuf(own)):
        memory = store.ContextStore(each).load(2)
        assert memory is not None
        assert unpack_state(Stateless(), memory.latest.state) == Stateless()


def test_two_versions_are_kept_and_one_where_there_is_one() -> None:
    own, like = context(), Inner(NOTHING)
    first, second = (packed(t, Inner(vector(start=t))) for t in (0, 4))
    store.ContextStore(own).save(2, Memory(second, first, attempt=1))
    for each in (own, through_protobuf(own)):
        memory = store.ContextStore(each).load(2)
        assert memory is not None
        assert memory.before is not None
        for version, round in ((memory.latest, 4), (memory.before, 0)):
            assert version.round == round
            assert torch.equal(unpack_state(like, version.state).c_i, vector(start=round))
    store.ContextStore(own).save(2, Memory(first))
    memory = store.ContextStore(own).load(2)
    assert memory is not None
    assert memory.before is None
    assert memory.latest.round == 0


def test_the_version_of_the_last_checkpoint_is_kept_too() -> None:
    own, like = context(), Inner(NOTHING)
    first, second, third = (packed(t, Inner(vector(start=t))) for t in (0, 4, 9))
    for memory in (Memory(third, second, 1, first), Memory(third, None, 1, first)):
        store.ContextStore(own).save(2, memory)
        for each in (own, through_protobuf(own)):
            copy = store.ContextStore(each).load(2)
            assert copy is not None
            assert (copy.before is None) == (memory.before is None)
            assert copy.durable is not None
            assert copy.durable.round == 0
            assert torch.equal(unpack_state(like, copy.durable.state).c_i, vector(start=0))
    store.ContextStore(own).save(2, Memory(second, first))
    assert store.ContextStore(own).load(2) == Memory(second, first)


def test_other_records_of_the_context_are_left_alone() -> None:
    own = context(state=RecordDict({"mine": ConfigRecord({"n": 1})}))
    store.ContextStore(own).save(2, Memory(packed(0, Inner(vector()))))
    assert own.state.config_records["mine"]["n"] == 1


# --- which version a visit begins with ------------------------------------------------------------


def instruction(
    round: int,
    accepted: int,
    *,
    rule: LocalRule | None = None,
    attempt: int = 0,
    durable: int = -1,
    plugins: Any = (),
) -> TrainInstruction:
    half = ClientHalf(rule or FedDynClient(0.5), plugins)
    return TrainInstruction(
        *(round, 9, half, ((2, 3),), 0.1, 0.0, 0.0, 1, 0, 0, 0, "float64"),
        attempt=attempt,
        accepted=accepted,
        durable=durable,
    )


def request(memory: Memory | None, instruction: TrainInstruction) -> tuple[Any, Memory]:
    """The state that a visit begins with, and the memory after it: states are words here."""
    start = packed_before(memory, instruction)
    return start, memory_after(memory, instruction, f"after {instruction.round}")


def test_a_visit_begins_with_the_state_that_was_accepted_last() -> None:
    start, memory = request(None, instruction(0, -1))
    assert start is None
    start, memory = request(memory, instruction(2, 0))
    assert start == "after 0"
    start, memory = request(memory, instruction(3, 0))  # the reply of round 2 was lost
    assert start == "after 0"
    start, memory = request(memory, instruction(5, 0))  # and that of round 3
    assert start == "after 0"
    start, memory = request(memory, instruction(6, 5))
    assert start == "after 5"
    assert memory == Memory(Version(6, "after 6"), Version(5, "after 5"))


def test_a_first_step_that_was_not_accepted_is_a_first_visit_again() -> None:
    _, memory = request(None, instruction(0, -1))
    start, memory = request(memory, instruction(1, -1))
    assert start is None
    assert memory == Memory(Version(1, "after 1"))
    start, _ = request(memory, instruction(2, 1))
    assert start == "after 1"


def test_a_message_that_comes_twice_begins_where_it_began() -> None:
    _, memory = request(None, instruction(0, -1))
    once = request(memory, instruction(4, 0))
    assert request(once[1], instruction(4, 0)) == once


def test_a_message_of_an_earlier_round_changes_nothing() -> None:
    _, memory = request(None, instruction(0, -1))
    _, memory = request(memory, instruction(4, 0))
    with pytest.raises(ValueError, match=r"the message of round 3 came after that of round 5"):
        request(memory, instruction(2, 0))


def test_a_server_that_begins_again_goes_back_with_its_clients() -> None:
    _, memory = request(None, instruction(0, -1))
    _, memory = request(memory, instruction(4, 0))
    start, memory = request(memory, instruction(2, 0, attempt=1))
    assert start == "after 0"
    assert memory.attempt == 1


def test_a_server_that_resumes_from_its_last_checkpoint_finds_the_state_however_far_back() -> None:
    _, memory = request(None, instruction(0, -1))
    _, memory = request(memory, instruction(1, 0))
    for round in range(2, 9):  # the checkpoint of round 2 holds that 1 was accepted
        _, memory = request(memory, instruction(round, round - 1, durable=1))
    versions = Version(8, "after 8"), Version(7, "after 7"), Version(1, "after 1")
    assert (memory.latest, memory.before, memory.durable) == versions
    for attempt in (1, 2):
        start, memory = request(memory, instruction(2, 1, attempt=attempt, durable=1))
        assert start == "after 1"
        assert memory.durable is None  # it is the one before
        _, memory = request(memory, instruction(3, 2, attempt=attempt, durable=1))
    _, memory = request(memory, instruction(4, 3, attempt=2, durable=3))  # a later checkpoint
    assert memory == Memory(Version(4, "after 4"), Version(3, "after 3"), 2)


def test_without_checkpoints_that_need_it_two_versions_are_kept() -> None:
    memory = None
    for round in range(9):
        _, memory = request(memory, instruction(round, round - 1))
        assert memory.durable is None


def test_a_message_of_an_earlier_start_changes_nothing_whatever_its_round() -> None:
    _, memory = request(None, instruction(0, -1, attempt=3))
    _, memory = request(memory, instruction(4, 0, attempt=3))
    _, memory = request(
        memory, instruction(1, 0, attempt=7)
    )  # another start, from an earlier checkpoint
    for round in (0, 1, 5, 8):
        with pytest.raises(
            ValueError, match=f"round {round + 1} is of an earlier start of the run"
        ):
            request(memory, instruction(round, 0, attempt=3))
    assert request(memory, instruction(2, 1, attempt=7))[0] == "after 1"


@pytest.mark.parametrize("memory", [None, Memory(Version(3, "after 3"), Version(1, "after 1"))])
def test_a_state_that_is_gone_is_lost(memory: Memory | None) -> None:
    with pytest.raises(MissingStateError):
        packed_before(memory, instruction(5, 2))
    start = RelaxedInit(beta=0.1)
    with pytest.raises(MissingStateError):
        packed_before(memory, instruction(5, 2, rule=FedAvgClient(), plugins=(start,)))
    assert packed_before(memory, instruction(5, 2, rule=FedAvgClient())) is None  # stateless
